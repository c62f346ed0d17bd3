"""Where this machine keeps what is fetched or compiled once."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`pagefold` in the user's cache: $XDG_CACHE_HOME, or ~/.cache where that is not set. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pagefold")

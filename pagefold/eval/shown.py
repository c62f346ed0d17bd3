"""How tables of results are shown."""

import re
import sys
from pathlib import Path

from rich.console import Console

WIDTH = 180  # of tables that go to a file


def console() -> Console:
    """As wide as the terminal, or wide enough for any table where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def short_name(name: str) -> str:
    """The name of a configuration, or a line of them, with files without their folders."""
    return re.sub(r"=[^,=\s]*/", "=", name)


def model_name(model: str) -> str:
    """A model's file or folder without those that it lies in, or its id."""
    path = Path(model)
    return path.name if path.exists() else model

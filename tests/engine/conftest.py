"""The layouts that engine tests run over."""

from collections.abc import Callable

import pytest

from pagefold.kv.layout import LAYOUTS
from tests.engine.tiny import write_profile

# layouts that cannot be built from their name alone; a new one without options needs no entry
VARIANTS = {
    "clustered": [
        "clustered:profile={profile},heads_per_page=1",
        "clustered:profile={profile},heads_per_page=2,scope=cross",
        "clustered:profile={profile},heads_per_page=2,scope=layer",
    ]
}
LAYOUT_SPECS = [spec for name in LAYOUTS.names() for spec in VARIANTS.get(name, [name])]


@pytest.fixture(scope="session")
def layout_of(tmp_path_factory) -> Callable[[str], str]:
    """Puts the path of a head profile into a layout spec."""
    profile = write_profile(tmp_path_factory.mktemp("profile") / "tiny.npz")
    return lambda spec: spec.format(profile=profile)

"""Plug-ins are found by dropping a file, and a wrong spec string says what would have been right."""

import dataclasses
import importlib
import sys
from typing import ClassVar

import pytest

from pagefold.core.registry import Registry

PLUGIN = """
from typing import ClassVar
from toolbox import TOOLS

@TOOLS.add
class Hammer:
    name: ClassVar[str] = "hammer"
    weight: int = 3
"""


@pytest.fixture
def toolbox(tmp_path, monkeypatch):
    """An importable package whose folder of plug-ins is still empty."""
    plugins = tmp_path / "toolbox" / "tools"
    plugins.mkdir(parents=True)
    (plugins / "__init__.py").write_text("")
    (plugins.parent / "__init__.py").write_text(
        "from pagefold.core.registry import Registry\nTOOLS = Registry('tool', 'toolbox.tools')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield plugins
    for name in [name for name in sys.modules if name.split(".")[0] == "toolbox"]:
        del sys.modules[name]


@pytest.fixture
def tools(toolbox):
    registry = Registry("tool", "toolbox.tools")

    @registry.add
    class Hammer:
        name: ClassVar[str] = "hammer"
        weight: int = 3
        soft: bool = False
        length: float = 0.5
        maker: str = "none"

    @registry.add
    class Anvil:
        name: ClassVar[str] = "anvil"

    return registry


def test_names_are_sorted_and_options_show_defaults(tools):
    assert tools.names() == ["anvil", "hammer"]
    assert tools.options("hammer") == {"weight": 3, "soft": False, "length": 0.5, "maker": "none"}
    assert tools.options("anvil") == {}


def test_a_bare_name_builds_the_defaults(tools):
    hammer = tools.build("hammer")
    assert (hammer.weight, hammer.soft, hammer.length, hammer.maker) == (3, False, 0.5, "none")
    assert isinstance(hammer, tools.get("hammer"))


def test_options_are_parsed_as_they_are_annotated(tools):
    hammer = tools.build("hammer:weight=16,soft=yes,length=1e-3,maker=a=b")
    assert (hammer.weight, hammer.soft, hammer.length, hammer.maker) == (16, True, 0.001, "a=b")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("False", False), ("no", False)]
)
def test_booleans_mean_what_they_say(tools, text, value):
    assert tools.build(f"hammer:soft={text}").soft is value


def test_plugins_hold_no_state(tools):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tools.build("hammer").weight = 4
    assert tools.build("hammer") == tools.build("hammer:weight=3")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hamer", ["unknown tool 'hamer'", "anvil, hammer"]),
        ("", ["unknown tool ''", "anvil, hammer"]),
        ("hammer:wieght=3", ["tool 'hammer'", "unknown option 'wieght'", "weight, soft, length, maker"]),
        ("anvil:weight=3", ["unknown option 'weight'", "known: none"]),
        ("hammer:soft", ["option 'soft' needs a value", "soft=VALUE"]),
        ("hammer:weight=heavy", ["tool 'hammer'", "option 'weight'", "'heavy'"]),
        ("hammer:weight=1.5", ["option 'weight'", "'1.5'"]),
        ("hammer:soft=maybe", ["option 'soft'", "'maybe'", "true", "false"]),
    ],
)
def test_a_wrong_spec_says_what_is_wrong_and_what_is_known(tools, spec, words):
    with pytest.raises(ValueError) as caught:
        tools.build(spec)
    for word in words:
        assert word in str(caught.value)


def test_one_name_has_one_owner(tools):
    class Other:
        name: ClassVar[str] = "hammer"

    with pytest.raises(ValueError, match="duplicate tool 'hammer'"):
        tools.add(Other)
    assert tools.options("hammer")["weight"] == 3


def test_dropping_a_file_into_the_folder_registers_it(toolbox):
    (toolbox / "hammer.py").write_text(PLUGIN)
    tools = importlib.import_module("toolbox").TOOLS
    assert tools.names() == ["hammer"]
    assert tools.build("hammer:weight=5").weight == 5

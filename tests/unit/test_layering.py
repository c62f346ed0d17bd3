"""Who may import whom: read from the source with `ast`, so lazy imports and imports for type checkers count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pagefold"

# A room may import itself and rooms of earlier rows; rooms of one row never import each other.
LAYERS = [
    ["core"],
    ["kv", "store"],
    ["evict"],
    ["backends"],
    ["models"],
    ["runner"],
    ["engine"],
    ["root"],  # pagefold/__init__.py: lazy public names
    ["server"],
    ["bench", "eval"],
    ["cli"],
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}

NO_TORCH = {"core", "kv", "root"}
TRITON = ("backends/", "store/shim.py")
ONLY_ROOMS = {"engine/scheduler.py": {"core", "kv"}}  # besides its own, so that planning is tested without torch


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, by statement or by a literal given to `import_module`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.ImportFrom():
                yield "."
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield name


def room_of(path: str) -> str:
    """The room a file belongs to: its folder, or its own name at the top of the package."""
    first = path.split("/")[0].removesuffix(".py")
    return {"__init__": "root", "__main__": "cli"}.get(first, first)


def violations(package: Path) -> list[str]:
    """One line for each broken rule, as "file: what is wrong"."""
    found = []
    for source in sorted(package.rglob("*.py")):
        path = source.relative_to(package).as_posix()
        text, room = source.read_text(), room_of(path)
        if room not in RANK:
            found.append(f"{path}: room {room} has no place in the layering")
        elif path != "__init__.py" and source.name == "__init__.py" and text.strip():
            found.append(f"{path}: must be empty")
        else:
            names = imported_names(ast.parse(text))
            found += [f"{path}: {fault}" for name in names if (fault := import_fault(path, room, name))]
    return list(dict.fromkeys(found))


def import_fault(path: str, room: str, name: str) -> str | None:
    """What is wrong with `path`, a file of `room`, importing `name`; None if nothing is."""
    if name == ".":
        return "relative import"
    package, *inner = name.split(".")
    if package == "torch" and (room in NO_TORCH or path in ONLY_ROOMS):
        return f"{room} must not import torch"
    if package == "triton" and not path.startswith(TRITON):
        return f"{room} must not import triton"
    if package != "pagefold" or inner == ["__version__"]:
        return None
    target = inner[0] if inner and inner[0] in RANK else "root"
    if target == room:
        return None
    if RANK[target] >= RANK[room]:
        return f"{room} must not import {target}"
    if target not in ONLY_ROOMS.get(path, RANK):
        return f"must not import {target}, only {' and '.join(sorted(ONLY_ROOMS[path]))}"
    return None


def test_every_import_goes_to_a_lower_room():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("evict/a.py", "from pagefold.engine.scheduler import Scheduler", "evict must not import engine"),
        ("evict/a.py", "import pagefold.engine.scheduler", "evict must not import engine"),
        ("evict/a.py", "from pagefold import engine", "evict must not import engine"),
        ("evict/a.py", "def f():\n    import pagefold.backends.cpu", "evict must not import backends"),
        ("evict/a.py", "import importlib\nimportlib.import_module('pagefold.cli')", "evict must not import cli"),
        ("evict/a.py", "from pagefold import LLM", "evict must not import root"),
        ("evict/a.py", "import pagefold", "evict must not import root"),
        ("store/a.py", "import pagefold.kv.pool", "store must not import kv"),
        ("bench/a.py", "from pagefold.eval.needle import Needle", "bench must not import eval"),
        ("eval/a.py", "from pagefold.cli import main", "eval must not import cli"),
        ("core/a.py", "import torch", "core must not import torch"),
        ("kv/layouts/a.py", "def f():\n    from torch.nn import functional", "kv must not import torch"),
        ("runner/a.py", "import triton.language as tl", "runner must not import triton"),
        ("store/formats/a.py", "import triton", "store must not import triton"),
        ("evict/a.py", "from . import scorer", "relative import"),
        ("engine/scheduler.py", "import pagefold.store.format", "must not import store, only core and kv"),
        ("engine/scheduler.py", "import torch", "engine must not import torch"),
        ("evict/__init__.py", "X = 1", "must be empty"),
        ("__init__.py", "import torch", "root must not import torch"),
        ("attic/a.py", "", "room attic has no place in the layering"),
    ],
)
def test_each_kind_of_violation_is_caught(tmp_path, path, source, fault):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(source + "\n")
    assert violations(tmp_path) == [f"{path}: {fault}"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("backends/triton/a.py", "import triton"),
        ("store/shim.py", "import triton"),
        ("engine/scheduler.py", "from pagefold.kv.manager import KVManager\nfrom pagefold.core.types import Chunk"),
        ("engine/scheduler.py", "from pagefold.engine.sequence import Sequence"),
        ("engine/engine.py", "from pagefold.runner.runner import ModelRunner"),
        ("bench/a.py", "from pagefold import LLM"),
        ("core/a.py", "from pagefold import __version__"),
        ("evict/a.py", "import torch\nimport tritonclient"),
        ("__init__.py", "def __getattr__(name):\n    from pagefold.engine.llm import LLM"),
        ("evict/__init__.py", "\n"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path, path, source):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(source + "\n")
    assert violations(tmp_path) == []

"""Flags of the engine on the evaluations' command lines, and parsers of lists."""

import argparse
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagefold.core.config import EngineConfig, ModelConfig


def add_engine_flags(parser: argparse.ArgumentParser, names: Sequence[str], model: str = ModelConfig.model) -> None:
    """The positional `model`, and a flag for each of some engine options; those not given stay out of the namespace."""
    leaves = {leaf.name: leaf for leaf in EngineConfig.leaves()}
    parser.add_argument("model", nargs="?", default=model, help=f"{leaves['model'].metadata['help']} ({model})")
    group = parser.add_argument_group("engine")
    for leaf in (leaves[name] for name in names):
        kinds = [kind for kind in typing.get_args(leaf.type) or (leaf.type,) if kind is not type(None)]
        group.add_argument(
            f"--{leaf.name.replace('_', '-')}",
            type=typing.cast(Callable[[str], Any], kinds[0]),
            choices=leaf.metadata["choices"],
            default=argparse.SUPPRESS,
            help=leaf.metadata["help"],
        )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given."""
    names = {leaf.name for leaf in EngineConfig.leaves()}
    return {name: value for name, value in vars(args).items() if name in names}


def new_file(text: str) -> Path:
    """A parser of files to write: hours of work must not end in a folder that is not there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, the folder {path.parent} does not exist")
    return path


def listed(separator: str = ",") -> Callable[[str], list[str]]:
    """A parser of lists."""
    return lambda text: [part for part in re.split(separator, text) if part]


FORMATS = listed(",(?!v=)")  # "k=NAME,v=NAME" is one
SCORERS = listed(r",(?!\w+=)")  # "NAME:option=1,option=2" is one

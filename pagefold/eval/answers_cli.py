"""`pagefold eval train-chains`: flags in, tables out."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagefold.eval.train_options import TrainOptions


def add_answer_parsers(subparsers: Any) -> None:
    """Add the commands to the subparsers of `pagefold eval`, as `cli.add_parsers` does."""
    _add_train_chains(subparsers)


# ---- train-chains


def _add_train_chains(subparsers: Any) -> None:
    parser = subparsers.add_parser("train-chains", help="train the small model that `eval chains` is for")
    parser.add_argument("out", type=Path, help="directory for the weights")
    for field in fields(TrainOptions):
        how: dict[str, Any] = {"action": "store_true"} if field.type is bool else {"type": field.type}
        text = field.metadata["help"] + ("" if field.type is bool else " (default: %(default)s)")
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help=text, **how)
    parser.set_defaults(func=run_train_chains)


def run_train_chains(args: argparse.Namespace) -> int:
    from pagefold.eval.train_chains import train

    options = TrainOptions(**{field.name: getattr(args, field.name) for field in fields(TrainOptions)})
    train(options, args.out, lambda line: print(line, flush=True))
    return 0

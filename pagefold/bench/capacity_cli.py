"""`pagefold bench capacity`: runs what was asked for; tables, JSON and a chart out."""

import argparse
import dataclasses
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagefold.bench.capacity import Capacity, run_all, run_vllm
from pagefold.bench.capacity_work import Growth, numbers
from pagefold.bench.charts import COLORS
from pagefold.bench.export import export_hf
from pagefold.bench.peers import PeerHome
from pagefold.bench.throughput import processor
from pagefold.bench.workloads import OUR_CHUNK, device_of
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import choose_device, choose_dtype
from pagefold.store.format import parse_format

DEFAULTS = {"enable_prefix_caching": False, "kv_swap_bytes": 0, "max_num_seqs": 32} | OUR_CHUNK
PEER_FORMATS = ("bf16", "fp8")

Quality = Callable[[dict[str, Any], Sequence[str], int], dict[str, dict[str, Any]]]


def run(options: dict[str, Any], args: argparse.Namespace, quality: Quality) -> int:
    """Run the command. `quality` measures formats on the same model: see `pagefold.eval.formats.format_quality`."""
    for name in ("kv_format", "max_model_len"):
        if name in options:
            raise InputError(name, f"is set by --{'formats' if name == 'kv_format' else 'context-lens'} here")
    formats = re.split(r",(?!v=)", args.formats)  # "k=NAME,v=NAME" is one
    for format in formats:
        try:
            parse_format(format)
        except ValueError as error:
            raise InputError("formats", str(error)) from None
    contexts = numbers("context_lens", args.context_lens)
    users = tuple(sorted(numbers("users", args.users)))
    growth = Growth(min(contexts), args.output_len, users, args.steps, args.clone_prompts)
    threads = args.threads or len(os.sched_getaffinity(0))
    if threads < 1:
        raise InputError("threads", f"got {threads}, must be an integer >= 1")
    options = DEFAULTS | options
    device = device_of(options)
    if options.get("dtype", "auto") == "auto":
        dtype = choose_dtype("auto", choose_device(options.get("backend", "auto")))
        options["dtype"] = str(dtype).removeprefix("torch.")
    growth.check(EngineConfig.from_options(**options))
    console = Console() if Console().is_terminal else Console(width=200)

    def report(results: Sequence[Capacity]) -> None:
        if args.json:
            Path(args.json).write_text(json.dumps(_report(options, growth, threads, results), indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="pagefold-export-") as folder:
        peer = None
        if args.peer:
            model_dir = Path(options["model"])
            if options.get("load_format") != "dummy" or not model_dir.is_dir():
                model_dir = export_hf(options["model"], folder, options["dtype"])
            home = PeerHome(args.peer_python, args.peer_path)
            peer = lambda format, work: run_vllm(format, options, work, model_dir, home, device, threads)  # noqa: E731
        results = run_all(options, formats, contexts, growth, threads, peer, PEER_FORMATS, report)
    results = _with_quality(console, options, formats, contexts, results, quality)
    report(results)
    for context in contexts:
        console.print(capacity_table([result for result in results if result.context == context]))
    if any(result.capacity == options["max_num_seqs"] for result in results):
        console.print(f"no more than {options['max_num_seqs']} users run at once: --max-num-seqs")
    for result in results:
        if result.note:
            console.print(f"{label_of(result)}: {result.note}", markup=False)
    if args.chart:
        capacity_chart(args.chart, results)
    return 0 if all(result.clean for result in results if result.engine == "pagefold") else 1


def _with_quality(
    console: Console,
    options: dict[str, Any],
    formats: Sequence[str],
    contexts: Sequence[int],
    results: list[Capacity],
    quality: Quality,
) -> list[Capacity]:
    if options.get("load_format") == "dummy":
        console.print("retrieval and KL were not measured: the weights are random")
        return results
    found = {context: quality(options, formats, context) for context in contexts}
    return [
        dataclasses.replace(result, quality=found[result.context][result.format])
        if result.engine == "pagefold"
        else result
        for result in results
    ]


def _report(options: dict[str, Any], growth: Growth, threads: int, results: Sequence[Capacity]) -> dict[str, Any]:
    return {
        "options": options,
        "output_len": growth.output_len,
        "threads": threads,
        "machine": {"processor": processor(), "python": platform.python_version(), "torch": torch.__version__},
        "results": [asdict(result) | {"clean": result.clean} for result in results],
    }


def label_of(result: Capacity) -> str:
    name = f"{result.engine} {result.version}".strip()
    return f"{name}, {result.format}"


def capacity_table(results: Sequence[Capacity]) -> Table:
    """One row for each count of users of each engine, in one context."""
    first = results[0]
    prompts = " (prompts of pagefold's users after the first are copies)" if first.cloned else ""
    table = Table(title=f"{first.context} tokens a user{prompts}", title_justify="left")
    rows, has_quality = [], any(result.quality for result in results)
    for result in results:
        for stage in result.stages:
            at_most = stage["users"] == result.capacity
            row = {
                "engine": label_of(result),
                "users": f"{stage['users']}" + (" (clean capacity)" if at_most else ""),
                "prefill s": _prefill(result, stage),
                "ms/token": f"{stage['latency_ms']:.2f}",
                "p99": f"{stage['latency_p99_ms']:.2f}",
                "decode tok/s": f"{stage['decode_tok_s']:.1f}",
                "preempted": "" if stage["preemptions"] is None else f"{stage['preemptions']}",
                "bytes/token": f"{result.bytes_per_token:.0f}" if result.bytes_per_token else "",
                "pool tokens": f"{result.pool_tokens}",
            }
            if has_quality:
                row |= {name: str(result.quality.get(name, "")) if at_most else "" for name in ("needles", "KL")}
            rows.append(row)
    for name in rows[0] if rows else ("engine",):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _prefill(result: Capacity, stage: dict[str, Any]) -> str:
    """Seconds of all prompts, or of the only one that was read."""
    seconds = stage["prefill_s"]
    return f"{seconds[0]:.2f} x 1" if result.cloned else f"{sum(seconds):.2f}"


def capacity_chart(path: str | Path, results: Sequence[Capacity]) -> None:
    """Write a picture of users against aggregate decode tokens per second: a line for each engine and format, a star at
    the clean capacity, a panel for each context.

    Raises InputError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("chart", "needs matplotlib: pip install 'pagefold[bench]'") from None
    contexts = list(dict.fromkeys(result.context for result in results))
    figure = Figure(figsize=(6.5 * len(contexts), 4.5), layout="constrained")
    for axes, context in zip(figure.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        here = [result for result in results if result.context == context and result.stages]
        for i, result in enumerate(here):
            users = [stage["users"] for stage in result.stages]
            speed = [stage["decode_tok_s"] for stage in result.stages]
            style = {"color": COLORS[i % len(COLORS)], "linestyle": "-" if result.engine == "pagefold" else "--"}
            axes.plot(users, speed, "o", label=label_of(result), **style)
            axes.plot(users[-1:], speed[-1:], "*", color=style["color"], markersize=15)
        axes.set_title(f"{context} tokens a user; the star is the clean capacity", fontsize="medium")
        axes.set_xlabel("users")
        axes.set_ylabel("decode tokens/s, all users")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if here:
            axes.legend(frameon=False)
    figure.savefig(path, dpi=130)

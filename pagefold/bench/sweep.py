"""How speed changes with the length of the output, with a full cache and a folded one."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pagefold.bench.charts import lines_chart
from pagefold.bench.measure import EngineResult
from pagefold.bench.peers import PeerHome, Workload
from pagefold.bench.throughput import (
    Result,
    label_of,
    ours_are_ok,
    print_remarks,
    report,
    run_case,
    threads_of,
    wide_console,
)
from pagefold.bench.workloads import Case, engine_name
from pagefold.core.types import InputError

SCORER = "zipage"


def parse_lengths(text: str) -> list[int]:
    """Output lengths from "2048,4096"; InputError if one is no positive integer."""
    try:
        lengths = [int(item) for item in text.split(",")]
    except ValueError:
        raise InputError("sweep_output_len", f"got {text!r}, must be integers such as 2048,4096") from None
    if min(lengths) < 1:
        raise InputError("sweep_output_len", f"got {min(lengths)}, must be >= 1")
    return lengths


def sweep_cases(case: Case, lengths: Sequence[int]) -> list[Case]:
    """For each output length a full and a folded engine on the prompts of a case of one engine. The context is the
    same for all of them unless it was given, so that nothing but the length differs."""
    (options,) = case.engines.values()
    if options.get("kv_eviction") == "none":
        raise InputError("kv_eviction", "got 'none', must be a scorer: the sweep runs a full cache as well")
    prompts = case.workload.prompts
    context = max(map(len, prompts)) + max(lengths)
    shared = {"max_model_len": context} | options
    ways = [shared | {"kv_eviction": "none"}, shared | {"kv_eviction": options.get("kv_eviction", SCORER)}]
    work = [Workload(prompts, [length] * len(prompts), case.workload.temperature) for length in lengths]
    engines = {engine_name(way): way for way in ways}
    peers = case.peer_options | ({"max_model_len": shared["max_model_len"]} if case.device == "cuda" else {})
    return [
        dataclasses.replace(
            case, title=f"{case.title}, {length} out", workload=one, engines=engines, peer_options=peers
        )
        for length, one in zip(lengths, work, strict=True)
    ]


def sweep_table(lengths: Sequence[int], results: Sequence[list[Result]], title: str) -> Table:
    """Engines one after the other, in each the lengths."""
    table = Table(title=title, title_justify="left")
    names = ["output tokens", "tok/s", "x shortest", "step ms", "running (mean)", "preempted", "rows kept", "note"]
    table.add_column("engine", no_wrap=True)
    for name in names:
        table.add_column(name, justify="left" if name == "note" else "right")
    for column in zip(*results, strict=True):
        for length, result in zip(lengths, column, strict=True):
            cells = [""] * 6
            if result.ok:
                times = f"{result.tok_s / column[0].tok_s:.2f}" if column[0].ok else ""
                cells = [f"{result.tok_s:.1f}", times, *_ours(result)]
            table.add_row(label_of(result), f"{length}", *cells, escape(result.note), end_section=length == lengths[-1])
    return table


def _ours(result: Result) -> list[str]:
    if not isinstance(result, EngineResult):
        return ["", "", "" if result.preemptions is None else f"{result.preemptions}", ""]
    kept = f"{result.rows_kept / result.rows_seen:.0%}"
    return [f"{1e3 * result.step_s:.2f}", f"{result.mean_running:.1f}", f"{result.preemptions}", kept]


def run_sweep(
    cases: Sequence[Case],
    peers: dict[str, PeerHome],
    threads: int | None = None,
    json_file: str | None = None,
    chart: str | None = None,
) -> bool:
    """Run every engine at every length, each in a process of its own, and show them; True if all passed their check."""
    console, threads = wide_console(), threads_of(threads)
    lengths, results, reports = [case.workload.output_lens[0] for case in cases], [], []
    for case in cases:
        results.append(run_case(case, peers, threads, console))
        print_remarks(case, results[-1], console)
        reports.append(report(case, results[-1], threads))
        if json_file:  # long runs that are cut short keep what they have
            Path(json_file).write_text(json.dumps(reports, indent=1) + "\n")
    place = cases[0].device if cases[0].device == "cuda" else f"{threads} threads"
    title = f"Output length: {len(cases[0].workload.prompts)} requests ({cases[0].dtype}, {place})"
    console.print(sweep_table(lengths, results, title))
    if chart:
        lines_chart(chart, title, "output tokens per request", _series(lengths, results))
    return all(ours_are_ok(row) for row in results)


def _series(lengths: Sequence[int], results: Sequence[list[Result]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """{panel: {engine: its points}} of the runs that passed their check."""
    panels: dict[str, Any] = {"output tokens per second": defaultdict(list), "median step, ms": defaultdict(list)}
    speeds, steps = panels.values()
    for length, row in zip(lengths, results, strict=True):
        for result in row:
            if result.ok:
                speeds[label_of(result)].append((length, result.tok_s))
            if result.ok and isinstance(result, EngineResult):
                steps[label_of(result)].append((length, 1e3 * result.step_s))
    return panels

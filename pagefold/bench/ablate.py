"""What each part of folding is worth: the same work with one part off at a time, as in the ablation of Zipage
(arXiv 2603.08743): scheduling, asynchronous compaction, prefix cache, redundancy, global score."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from pagefold.bench.charts import bar_chart
from pagefold.bench.measure import EngineResult
from pagefold.bench.peers import PeerHome
from pagefold.bench.throughput import (
    Result,
    label_of,
    ours_are_ok,
    print_remarks,
    report,
    run_case,
    threads_of,
    title_of,
    wide_console,
)
from pagefold.bench.workloads import Case
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.engine.build import for_device
from pagefold.engine.policy import build_scorer
from pagefold.evict.scorer import SCORERS

SCORER = "zipage"
LAG = 8  # tokens, where none is asked for
COMPARED = ("enable_prefix_caching", "kv_window_lending")
FULL, FOLDED = "full cache", "folded"


@dataclass(frozen=True)
class Ablation:
    """
    case     the full cache, everything on, and then one part off in each engine
    absent   {row: why there is none}
    """

    case: Case
    absent: dict[str, str]


def ablation_of(case: Case, given: dict[str, Any]) -> Ablation:
    """The rows of an ablation on the work of a case of one engine.

    given   the options that were asked for
    Raises InputError if one of them is what the rows compare.
    """
    for field in COMPARED:
        if field in given:
            raise InputError(field, f"got {given[field]!r}, and --ablate compares its values: leave it out")
    (options,) = case.engines.values()
    spec = options.get("kv_eviction", SCORER)
    scorer = build_scorer(spec)
    if scorer is None:
        raise InputError("kv_eviction", "got 'none', must be a scorer: --ablate has a row without one")
    most = min(len(case.workload.prompts), EngineConfig.from_options(**options).scheduler.max_num_seqs)
    folded = options | {"kv_eviction": spec, "enable_prefix_caching": True, "max_num_seqs": most}
    absent: dict[str, str] = {}
    lag = _lag(folded, case.device)
    if case.device != "cuda":
        absent["asynchronous compaction"] = "a CPU has no second stream; rows are compacted between steps"
    elif lag < 1:
        absent["asynchronous compaction"] = "the window's queries span all of kv_buffer, which leaves no token of lag"
    else:
        folded["kv_lag"] = lag
    rows = {FULL: folded | {"kv_eviction": "none"}, FOLDED: folded}
    if scorer.needs_window:
        rows["constrained scheduling"] = folded | {"kv_window_lending": "for-life"}
    else:
        absent["constrained scheduling"] = f"{scorer.name} looks at no queries, so nobody needs a window"
    if "asynchronous compaction" not in absent:
        rows["synchronous compaction"] = folded | {"kv_lag": 0}
    rows["no prefix cache"] = folded | {"enable_prefix_caching": False}
    for name, option, value in (
        ("full redundancy", "redundancy", "full"),
        ("lightning redundancy", "redundancy", "lightning"),
        ("no redundancy", "redundancy", "none"),
        ("no global score", "alpha", 0.0),
        ("no weights by values", "values", False),
    ):
        if option not in SCORERS.options(scorer.name):
            absent[name] = f"{scorer.name} has no option {option}"
        elif getattr(scorer, option) != value:
            rows[name] = folded | {"kv_eviction": with_option(spec, option, value)}
    peers = case.peer_options | ({"enable_prefix_caching": True} if case.device == "cuda" else {})
    case = dataclasses.replace(case, title=f"Ablation, {case.title}", engines=rows, peer_options=peers)
    return Ablation(case, absent)


def _lag(folded: dict[str, Any], device: str) -> int:
    """Tokens from a compaction's launch to its commit. Raises InputError for 0, which is the row without."""
    if folded.get("kv_lag") == 0:
        raise InputError("kv_lag", "got 0, must be at least 1: --ablate has a row without a lag")
    config = EngineConfig.from_options(**{name: value for name, value in folded.items() if name != "kv_lag"})
    config = for_device(config, torch.device(device))
    return folded.get("kv_lag", min(LAG, config.period - config.lead))


def with_option(spec: str, option: str, value: object) -> str:
    """A spec string with one option set."""
    name, _, text = spec.partition(":")
    kept = [item for item in text.split(",") if item and item.partition("=")[0] != option]
    return f"{name}:{','.join([*kept, f'{option}={value}'])}"


def ratio(result: Result, first: Result) -> float | None:
    """Output tokens per second, as a multiple of the first row's; None if either failed its check."""
    return result.tok_s / first.tok_s if result.ok and first.ok else None


def ablation_table(ablation: Ablation, results: list[Result], threads: int) -> Table:
    """One row per engine, then those that there are none of, with the reason."""
    table = Table(title=title_of(ablation.case, threads), title_justify="left")
    first = results[0]
    names = ["tok/s", f"x {FULL}", "step ms", "running (mean)", "at most", "preempted", "folds", "rows evicted"]
    table.add_column("engine", no_wrap=True)
    for name in [*names, "compaction s"]:
        table.add_column(name, justify="right")
    table.add_column("note", overflow="fold")
    for result in results:
        multiple, cells = ratio(result, first), [f"{result.tok_s:.1f}"]
        cells.append("" if multiple is None else f"{multiple:.2f}")
        if isinstance(result, EngineResult):
            cells += [f"{1e3 * result.step_s:.2f}", f"{result.mean_running:.1f}", f"{result.peak_running}"]
            cells += [f"{result.preemptions}", f"{result.folds}", f"{result.rows_evicted:.0f}"]
            cells.append(f"{result.compaction_s:.2f} ({result.compaction_s / result.wall_s:.1%})" if result.ok else "")
        cells = cells if result.ok else []
        table.add_row(label_of(result), *cells, *[""] * (len(names) + 1 - len(cells)), escape(result.note))
    for name, reason in ablation.absent.items():
        table.add_row(name, *[""] * (len(names) + 1), escape(f"not run: {reason}"))
    return table


def run_ablation(
    ablation: Ablation,
    peers: dict[str, PeerHome],
    threads: int | None = None,
    json_file: str | None = None,
    chart: str | None = None,
) -> bool:
    """Run every row, each in a process of its own, and show them; True if all passed their check."""
    console, threads = wide_console(), threads_of(threads)
    results = run_case(ablation.case, peers, threads, console)
    console.print(ablation_table(ablation, results, threads))
    print_remarks(ablation.case, results, console)
    multiples = {label_of(result): ratio(result, results[0]) for result in results}
    if json_file:
        facts = report(ablation.case, results, threads) | {"ratio_to_first": multiples, "absent": ablation.absent}
        Path(json_file).write_text(json.dumps(facts, indent=1) + "\n")
    if chart:
        bars = {label_of(result): result.tok_s for result in results if result.ok}
        notes = [f"{result.tok_s:.0f}" + _times(multiples[label_of(result)]) for result in results if result.ok]
        bar_chart(chart, title_of(ablation.case, threads), "output tokens per second", bars, notes)
    return ours_are_ok(results)


def _times(multiple: float | None) -> str:
    return "" if multiple is None else f"  ({multiple:.2f}x)"

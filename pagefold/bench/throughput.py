"""Output tokens per second on fixed work: this engine in one configuration after the other, and peers beside it."""

import dataclasses
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagefold.bench.export import export_hf
from pagefold.bench.measure import CHECKED_TOKENS, EngineResult, run_engine
from pagefold.bench.peers import PeerHome, PeerResult, run_peer
from pagefold.bench.workloads import Case
from pagefold.core.types import InputError

Result = EngineResult | PeerResult


def run_case(case: Case, peers: dict[str, PeerHome], threads: int, console: Console) -> list[Result]:
    """Run every engine and every peer of a case, each when the one before it is gone."""
    results: list[Result] = []
    for name, options in case.engines.items():
        with console.status(f"{case.title}: pagefold, {name}"):
            results.append(run_engine(name, options, case.workload, threads))
    with tempfile.TemporaryDirectory(prefix="pagefold-export-") as folder:
        if peers:
            model = next(iter(case.engines.values()))["model"]
            with console.status(f"preparing {model} for the peers"):
                directory = _peer_model(case, model, folder)
        for name, home in peers.items():
            where: dict[str, Any] = {"device": case.device, "options": case.peer_options}
            with console.status(f"{case.title}: {name}"):
                results.append(run_peer(name, case.workload, directory, case.dtype, threads, home, **where))
    return results


def print_remarks(case: Case, results: list[Result], console: Console) -> None:
    for result in results:
        if remark := _remark(case, result, results[0]):
            console.print(f"{label_of(result)}: {remark}", markup=False)


def _peer_model(case: Case, model: str, folder: str) -> Path:
    """A directory that peers can read: the model's own config where no weights are wanted, else an export."""
    if case.peer_options.get("load_format") == "dummy" and Path(model).is_dir():
        return Path(model)
    return export_hf(model, folder, case.dtype)


def label_of(result: Result) -> str:
    return f"{result.name} {result.version}".strip() if isinstance(result, PeerResult) else f"pagefold, {result.name}"


def _remark(case: Case, result: Result, ours: Result) -> str:
    """Why there are no figures; or, for a peer, how many of its requests begin as ours do (rounding may differ)."""
    random = case.workload.temperature or case.peer_options.get("load_format") == "dummy"
    if not result.ok or isinstance(result, EngineResult) or random:
        return result.note
    first = [[tuple(ids[:CHECKED_TOKENS]) for ids in side.outputs] for side in (result, ours)]
    same = sum(a == b for a, b in zip(*first, strict=False))
    return f"{same} of {len(first[0])} requests begin with the same {CHECKED_TOKENS} tokens as {label_of(ours)}"


def _of_ours(words: Callable[[EngineResult], str]) -> Callable[[Result], str]:
    return lambda result: words(result) if isinstance(result, EngineResult) else ""


COLUMNS: dict[str, Callable[[Result], str]] = {
    "tok/s": lambda r: f"{r.tok_s:.1f}",
    "wall s": lambda r: f"{r.wall_s:.2f}",
    "prefill s": lambda r: f"{r.prefill_s:.2f}" if r.prefill_s else "",
    "decode tok/s": lambda r: f"{r.decode_tok_s:.1f}" if r.decode_tok_s else "",
    "TTFT s": _of_ours(lambda r: f"{r.ttft_s:.2f}"),
    "TPOT ms": _of_ours(lambda r: f"{1e3 * r.tpot_s:.1f}"),
    "init s": lambda r: f"{r.init_s:.1f}" if r.init_s else "",
    "peak RSS MB": lambda r: f"{r.peak_rss_bytes / 1e6:.0f}",
    "peak GPU GB": lambda r: f"{r.peak_device_bytes / 1e9:.2f}" if r.peak_device_bytes else "",
    "running": _of_ours(lambda r: f"{r.peak_running}"),
    "preempted": lambda r: "" if r.preemptions is None else f"{r.preemptions}",
    "pages at most": _of_ours(lambda r: f"{r.peak_pages} of {r.num_pages}"),
    "KV GB, for rows": _of_ours(
        lambda r: f"{r.kv_bytes / 1e9:.2f} ({r.kv_row_bytes / r.kv_bytes:.1%})" if r.kv_bytes else ""
    ),
    "rows kept/seen": _of_ours(lambda r: f"{r.rows_kept:.0f}/{r.rows_seen} ({r.rows_kept / r.rows_seen:.0%})"),
}


def results_table(case: Case, results: list[Result], threads: int) -> Table:
    """One row per engine, columns that have something to say. Ratios are to each peer; there is none if either side
    failed its check."""
    table = Table(title=title_of(case, threads), title_justify="left")
    cells = {name: [cell(result) if result.ok else "" for result in results] for name, cell in COLUMNS.items()}
    cells = {"engine": [label_of(result) for result in results]} | {k: v for k, v in cells.items() if any(v)}
    for peer in results:
        if isinstance(peer, PeerResult):
            cells[f"x {peer.name}"] = [f"{r.tok_s / peer.tok_s:.2f}" if r.ok and peer.ok else "" for r in results]
    failed = ["failed" if not result.ok else "" for result in results]
    if any(failed):
        cells["check"] = failed
    for name in cells:
        table.add_column(name, justify="left" if name == "engine" else "right")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def title_of(case: Case, threads: int) -> str:
    """The work and where it runs."""
    lens = [{len(p) for p in case.workload.prompts}, set(case.workload.output_lens)]
    shape = [f"{min(s)}" if len(s) == 1 else f"{min(s)} to {max(s)}" for s in lens]
    title = f"{case.title}: {len(case.workload.prompts)} requests, {shape[0]} tokens in, {shape[1]} out"
    place = case.device if case.device == "cuda" else f"{threads} threads"
    return f"{title} ({case.dtype}, {place})"


def report(case: Case, results: list[Result], threads: int) -> dict[str, Any]:
    """A case as JSON: the machine, the work, the engines' options and every figure; token ids are left out."""
    shape = {"input_lens": [len(p) for p in case.workload.prompts], "output_lens": case.workload.output_lens}
    return {
        "title": case.title,
        "dtype": case.dtype,
        "threads": threads,
        "machine": {"processor": processor(), "python": platform.python_version(), "torch": torch.__version__},
        "device": case.device,
        "workload": shape | {"temperature": case.workload.temperature},
        "peer_options": case.peer_options,
        "pagefold": [
            asdict(dataclasses.replace(r, outputs=())) | {"options": case.engines[r.name]}
            for r in results
            if isinstance(r, EngineResult)
        ],
        "peers": [asdict(dataclasses.replace(r, outputs=())) for r in results if isinstance(r, PeerResult)],
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def run_throughput(
    cases: list[Case], peers: dict[str, PeerHome], threads: int | None = None, json_file: str | None = None
) -> bool:
    """Run all cases and print their tables; True if every engine of ours passed its check."""
    console, threads = wide_console(), threads_of(threads)
    reports, ok = [], True
    for case in cases:
        results = run_case(case, peers, threads, console)
        console.print(results_table(case, results, threads))
        print_remarks(case, results, console)
        ok &= ours_are_ok(results)
        reports.append(report(case, results, threads))
        if json_file:
            Path(json_file).write_text(json.dumps(reports, indent=1) + "\n")
    return ok


def wide_console() -> Console:
    """Files and pipes get wide tables."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def threads_of(threads: int | None) -> int:
    """CPU threads to use: as told, or all cores."""
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if threads < 1:
        raise InputError("threads", f"got {threads}, must be an integer >= 1")
    return threads


def ours_are_ok(results: Sequence[Result]) -> bool:
    """Whether every engine of ours passed its check."""
    return all(result.ok for result in results if isinstance(result, EngineResult))

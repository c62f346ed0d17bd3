"""Output tokens per second on fixed work: this engine in one configuration after the other, and peers beside it.

Every configuration runs in a process of its own, so that its peak resident memory is its own. This file is also the
program of that process.
"""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagefold.bench.export import export_hf
from pagefold.bench.peers import PeerHome, PeerResult, Workload, peak_device_bytes, run_peer
from pagefold.bench.workloads import Case
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.outputs import RequestOutput
from pagefold.engine.scheduler import Stats

CHECKED_PROMPTS, CHECKED_TOKENS = 2, 8
EXACT = ("float32", "float64")


# ---- one engine, in this process


@dataclass(frozen=True)
class Sample:
    """A step: seconds from the start to its end, requests that ran in it and that waited, pages held after it."""

    seconds: float
    running: int
    waiting: int
    pages: int


@dataclass
class Served:
    """Requests served together. Lists are in the order of the prompts; times in seconds since the start."""

    outputs: list[RequestOutput]
    first_s: list[float]
    last_s: list[float]
    timeline: list[Sample] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return max(self.last_s)

    @property
    def output_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def rows_kept(self) -> float:
        """Rows per head that the requests had at their end, summed."""
        return sum(output.kv.rows_kept for output in self.outputs)

    @property
    def rows_seen(self) -> int:
        """Rows per head that a full cache would have had."""
        return sum(output.kv.tokens for output in self.outputs)


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], salt: str = "") -> Served:
    """Hand all prompts over at once and step the engine until it is empty."""
    ids = [f"{salt}/{index}" for index in range(len(prompts))]
    start = time.perf_counter()
    for id, prompt, sampling in zip(ids, prompts, params, strict=True):
        engine.add(Request(id, tuple(prompt), sampling, cache_salt=salt))
    first: dict[str, float] = {}
    last: dict[str, tuple[float, RequestOutput]] = {}
    timeline = []
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            first.setdefault(output.request_id, now)
            if output.finished:
                last[output.request_id] = now, output
        running = len(engine.scheduler.running) + sum(output.finished for output in outputs)
        pages = sum(pool.num_held for pool in engine.manager.pools)
        timeline.append(Sample(now, running, len(engine.scheduler.waiting), pages))
    return Served([last[id][1] for id in ids], [first[id] for id in ids], [last[id][0] for id in ids], timeline)


@dataclass(frozen=True)
class EngineResult:
    """What one configuration did.

    tok_s               output tokens per second of `wall_s`
    wall_s              seconds from the first prompt in to the last token out, loading and warm-up excluded
    init_s              seconds of loading and capturing, before the warm-up
    prefill_s           seconds of the prompts with one output token each; 0 if they were not run so
    decode_tok_s        see `Workload.decode_rate`
    ttft_s              median seconds from the start to a request's first token
    tpot_s              median seconds per further token of a request
    peak_rss_bytes      peak resident memory of the process (VmHWM), weights on a CPU included
    peak_device_bytes   most device memory that tensors had (torch.cuda.max_memory_allocated)
    kv_bytes            asked for KV pages; `kv_row_bytes` of them are rows that can be held
    peak_pages          most pages held at once, of `num_pages` in all tiers
    rows_kept           rows per head at the end, summed over the requests, of `rows_seen` that a full cache would hold
    device              name of the CUDA device; "" on a CPU
    note                "" if the outputs passed the check, else what is wrong with them, or why there are none
    outputs             token ids, one list per prompt
    """

    name: str
    tok_s: float = 0.0
    wall_s: float = 0.0
    output_tokens: int = 0
    init_s: float = 0.0
    prefill_s: float = 0.0
    decode_tok_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    peak_rss_bytes: int = 0
    peak_device_bytes: int = 0
    kv_bytes: int = 0
    kv_row_bytes: int = 0
    peak_running: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    num_pages: int = 0
    rows_kept: float = 0.0
    rows_seen: int = 0
    device: str = ""
    note: str = ""
    outputs: tuple[tuple[int, ...], ...] = ()

    @property
    def ok(self) -> bool:
        return not self.note


def measure(name: str, options: dict[str, Any], workload: Workload) -> EngineResult:
    """Run one configuration in this process: load, warm up, run, check. `options` are those of `EngineConfig`."""
    config = EngineConfig.from_options(**options)
    start = time.perf_counter()
    engine = build_engine(config)
    init_s = time.perf_counter() - start
    _warm_up(engine, workload)
    prefill_s = _serve_apart(engine, workload.prefill(), "prefill").wall_s if workload.prefill_apart else 0.0
    engine.scheduler.stats = stats = Stats()
    served = serve(engine, workload.prompts, _sampling(workload))
    peak_rss_bytes, device_bytes = _peak_rss_bytes(), peak_device_bytes()
    paces = [
        (end - first) / (length - 1)
        for first, end, length in zip(served.first_s, served.last_s, workload.output_lens, strict=True)
        if length > 1
    ]
    return EngineResult(
        name=name,
        tok_s=served.output_tokens / served.wall_s,
        wall_s=served.wall_s,
        output_tokens=served.output_tokens,
        init_s=init_s,
        prefill_s=prefill_s,
        decode_tok_s=workload.decode_rate(served.wall_s, prefill_s),
        ttft_s=statistics.median(served.first_s),
        tpot_s=statistics.median(paces) if paces else 0.0,
        peak_rss_bytes=peak_rss_bytes,
        peak_device_bytes=device_bytes,
        kv_bytes=config.cache.kv_cache_memory_bytes or _pool_bytes(engine),
        kv_row_bytes=_row_bytes(engine),
        peak_running=stats.peak_running,
        preemptions=stats.preemptions,
        peak_pages=stats.peak_pages,
        num_pages=sum(pool.num_pages - 1 for pool in engine.manager.pools),
        rows_kept=served.rows_kept,
        rows_seen=served.rows_seen,
        device=torch.cuda.get_device_name() if device_bytes else "",
        note=_fault(engine, workload, served),
        outputs=tuple(tuple(output.outputs[0].token_ids) for output in served.outputs),
    )


def _sampling(workload: Workload) -> list[SamplingParams]:
    how: dict[str, Any] = {"temperature": workload.temperature, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(max_tokens=length, **how) for length in workload.output_lens]


def _serve_apart(engine: Engine, workload: Workload, salt: str) -> Served:
    """Serve something else than the work; the prefix cache remembers nothing of it."""
    served = serve(engine, workload.prompts, _sampling(workload), salt)
    if engine.manager.prefix is not None:
        engine.manager.prefix.clear()
    return served


def _warm_up(engine: Engine, workload: Workload) -> None:
    """Whatever is compiled or allocated at its first use; where the work is folded, a fold too."""
    _serve_apart(engine, workload.warm_up(), "warm-up")
    budget, period = engine.config.eviction.kv_budget, engine.config.period
    room = workload.max_len - budget - 1
    if engine.config.eviction.kv_eviction != "none" and room > 0:
        one = Workload([[1] * (budget + 1)], [min(2 * period, room)], workload.temperature)
        _serve_apart(engine, one, "warm-up of folding")


def _pool_bytes(engine: Engine) -> int:
    geometry = engine.manager.geometry
    return sum(pages * size for pages, size in zip(geometry.num_pages, geometry.bytes_per_page, strict=True))


def _row_bytes(engine: Engine) -> int:
    """Bytes of the rows that all tiers have room for: without padding's page and what scorers remember of rows."""
    return sum(
        (store.num_pages - 1) * store.num_columns * store.page_size * store.format.bytes_per_row(store.head_dim)
        for part in engine.runner.kv.parts
        for store in part.tiers
    )


def _fault(engine: Engine, workload: Workload, served: Served) -> str:
    """What is wrong with the outputs, or "". Lengths always; with full and exact rows also the first tokens, which must
    be those of the same prompts run one by one."""
    outputs = [output.outputs[0].token_ids for output in served.outputs]
    for index, (ids, length) in enumerate(zip(outputs, workload.output_lens, strict=True)):
        if len(ids) != length:
            return f"request {index} got {len(ids)} tokens of {length}"
    model, cache, evict = engine.config.model, engine.config.cache, engine.config.eviction
    exact_rows = cache.kv_format in ("auto", "fp32", "fp64") and cache.kv_cold_format is None
    if workload.temperature or model.dtype not in EXACT or not exact_rows or evict.kv_eviction != "none":
        return ""
    for index in range(min(CHECKED_PROMPTS, len(outputs))):
        count = min(CHECKED_TOKENS, workload.output_lens[index])
        one = Workload(workload.prompts[index : index + 1], [count])
        alone = serve(engine, one.prompts, _sampling(one), f"alone-{index}")
        if alone.outputs[0].outputs[0].token_ids != outputs[index][:count]:
            return f"request {index} begins with other tokens when it runs alone"
    return ""


def _peak_rss_bytes() -> int:
    """VmHWM of this process; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


# ---- one engine, in a process of its own


def run_engine(name: str, options: dict[str, Any], workload: Workload, threads: int) -> EngineResult:
    """`measure` in a fresh process with `threads` CPU threads. One that fails is a result with a note."""
    work = {"name": name, "options": options, "workload": asdict(workload), "threads": threads}
    fields: dict[str, Any] = {"name": name}
    return EngineResult(**fields | run_apart("pagefold.bench.throughput", work, threads))


def run_apart(module: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """The answer of a module of ours run as a program, with files for the job and the answer, in a fresh process with
    `threads` CPU threads; {"note": its last words} if it fails."""
    with tempfile.TemporaryDirectory(prefix="pagefold-bench-") as folder:
        job_file, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        job_file.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, "-m", module, str(job_file), str(answer)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.exists():
            words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {"note": words[-1]}
        return json.loads(answer.read_text())


def _child(job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    result = measure(job["name"], job["options"], Workload(**job["workload"]))
    Path(answer_file).write_text(json.dumps(asdict(result)))


# ---- cases


Result = EngineResult | PeerResult


def run_case(case: Case, peers: dict[str, PeerHome], threads: int, console: Console) -> list[Result]:
    """Run every engine and every peer of a case, print the table, return the results."""
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
    console.print(results_table(case, results, threads))
    for result in results:
        if remark := _remark(case, result, results[0]):
            console.print(f"{label_of(result)}: {remark}", markup=False)
    return results


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
    lens = [{len(p) for p in case.workload.prompts}, set(case.workload.output_lens)]
    shape = [f"{min(s)}" if len(s) == 1 else f"{min(s)} to {max(s)}" for s in lens]
    title = f"{case.title}: {len(case.workload.prompts)} requests, {shape[0]} tokens in, {shape[1]} out"
    place = case.device if case.device == "cuda" else f"{threads} threads"
    table = Table(title=f"{title} ({case.dtype}, {place})", title_justify="left")
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
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    threads = threads or len(os.sched_getaffinity(0))
    if threads < 1:
        raise InputError("threads", f"got {threads}, must be an integer >= 1")
    reports, ok = [], True
    for case in cases:
        results = run_case(case, peers, threads, console)
        ok &= all(result.ok for result in results if isinstance(result, EngineResult))
        reports.append(report(case, results, threads))
        if json_file:
            Path(json_file).write_text(json.dumps(reports, indent=1) + "\n")
    return ok


if __name__ == "__main__":
    _child(*sys.argv[1:])

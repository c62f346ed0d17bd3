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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagefold.bench.export import export_hf
from pagefold.bench.peers import PeerResult, Workload, run_peer
from pagefold.bench.workloads import SHAPES, random_workload
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import build_engine, choose_dtype
from pagefold.engine.engine import Engine
from pagefold.engine.outputs import RequestOutput
from pagefold.engine.scheduler import Stats
from pagefold.models.sources import resolve
from pagefold.models.spec import ModelSpec

WARM_UP_TOKENS = 4
CHECKED_PROMPTS, CHECKED_TOKENS = 2, 8
SUITE_DTYPES = ("bfloat16", "float32")
SUITE_KV_BYTES = {"bfloat16": 300 << 20, "float32": 600 << 20}  # what the full cache of W2 needs, and a little more
# on a CPU a compaction costs about as much as a step, so it is done every 128 tokens instead of every page
FOLDED = {"kv_eviction": "zipage", "kv_budget": 256, "kv_buffer": 128}
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

    tok_s            output tokens per second of `wall_s`
    wall_s           seconds from the first prompt in to the last token out, loading and warm-up excluded
    ttft_s           median seconds from the start to a request's first token
    tpot_s           median seconds per further token of a request
    peak_rss_bytes   peak resident memory of the process (VmHWM), the weights included
    peak_pages       most pages held at once, of `num_pages` in all tiers
    rows_kept        rows per head at the end, summed over the requests, of `rows_seen` that a full cache would hold
    note             "" if the outputs passed the check, else what is wrong with them, or why there are none
    outputs          token ids, one list per prompt
    """

    name: str
    tok_s: float = 0.0
    wall_s: float = 0.0
    output_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    peak_rss_bytes: int = 0
    peak_running: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    num_pages: int = 0
    rows_kept: float = 0.0
    rows_seen: int = 0
    note: str = ""
    outputs: tuple[tuple[int, ...], ...] = ()

    @property
    def ok(self) -> bool:
        return not self.note


def measure(name: str, options: dict[str, Any], workload: Workload) -> EngineResult:
    """Run one configuration in this process: load, warm up, run, check. `options` are those of `EngineConfig`."""
    config = EngineConfig.from_options(**options)
    engine = build_engine(config)
    greedy = [_greedy(length) for length in workload.output_lens]
    # The shapes of the work without its tokens: kernels are compiled, and the prefix cache has nothing to reuse.
    serve(engine, [[1] * len(p) for p in workload.prompts], [_greedy(WARM_UP_TOKENS)] * len(greedy), "warm-up")
    if engine.manager.prefix is not None:
        engine.manager.prefix.clear()
    engine.scheduler.stats = stats = Stats()
    served = serve(engine, workload.prompts, greedy)
    peak_rss_bytes = _peak_rss_bytes()
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
        ttft_s=statistics.median(served.first_s),
        tpot_s=statistics.median(paces) if paces else 0.0,
        peak_rss_bytes=peak_rss_bytes,
        peak_running=stats.peak_running,
        preemptions=stats.preemptions,
        peak_pages=stats.peak_pages,
        num_pages=sum(pool.num_pages - 1 for pool in engine.manager.pools),
        rows_kept=served.rows_kept,
        rows_seen=served.rows_seen,
        note=_fault(engine, workload, served),
        outputs=tuple(tuple(output.outputs[0].token_ids) for output in served.outputs),
    )


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)


def _fault(engine: Engine, workload: Workload, served: Served) -> str:
    """What is wrong with the outputs, or "". Lengths always; with full and exact rows also the first tokens, which must
    be those of the same prompts run one by one."""
    outputs = [output.outputs[0].token_ids for output in served.outputs]
    for index, (ids, length) in enumerate(zip(outputs, workload.output_lens, strict=True)):
        if len(ids) != length:
            return f"request {index} got {len(ids)} tokens of {length}"
    model, cache, evict = engine.config.model, engine.config.cache, engine.config.eviction
    exact_rows = cache.kv_format in ("auto", "fp32", "fp64") and cache.kv_cold_format is None
    if model.dtype not in EXACT or not exact_rows or evict.kv_eviction != "none":
        return ""
    for index in range(min(CHECKED_PROMPTS, len(outputs))):
        count = min(CHECKED_TOKENS, workload.output_lens[index])
        alone = serve(engine, workload.prompts[index : index + 1], [_greedy(count)], f"alone-{index}")
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
    with tempfile.TemporaryDirectory(prefix="pagefold-bench-") as folder:
        job, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        work = {"name": name, "options": options, "workload": asdict(workload), "threads": threads}
        job.write_text(json.dumps(work))
        done = subprocess.run(
            [sys.executable, "-m", "pagefold.bench.throughput", str(job), str(answer)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.exists():
            words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return EngineResult(name, note=words[-1])
        return EngineResult(**json.loads(answer.read_text()))


def _child(job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    result = measure(job["name"], job["options"], Workload(**job["workload"]))
    Path(answer_file).write_text(json.dumps(asdict(result)))


# ---- cases: one piece of work, several engines


@dataclass(frozen=True)
class Case:
    """Engines to compare on one workload.

    title     what the work is
    dtype     precision of every engine, ours and peers
    engines   {name: engine options}
    """

    title: str
    workload: Workload
    dtype: str
    engines: dict[str, dict[str, Any]]


def engine_name(options: dict[str, Any]) -> str:
    """A configuration in a few words: "full", "zipage 256", "zipage 256, int4"."""
    evict = EngineConfig.from_options(**options).eviction
    parts = ["full" if evict.kv_eviction == "none" else f"{evict.kv_eviction} {evict.kv_budget}"]
    parts += [str(options[name]) for name in ("kv_layout", "kv_format", "kv_cold_format") if options.get(name)]
    return ", ".join(parts)


def suite_cases(options: dict[str, Any]) -> list[Case]:
    """`--suite cpu`: W1 and W2 with a full cache, W2 folded to 256 rows, in bf16 and fp32 (or in the dtype given)."""
    vocab_size, special_ids = _vocabulary(options)
    dtypes = SUITE_DTYPES if options.get("dtype", "auto") == "auto" else (options["dtype"],)
    cases = []
    for dtype in dtypes:
        pool = {"kv_cache_memory_bytes": SUITE_KV_BYTES[dtype]} if dtype in SUITE_KV_BYTES else {}
        for name, shape in SHAPES.items():
            full = pool | options
            variants = [full] if name == "W1" else [full, full | FOLDED]
            engines = {engine_name(variant): variant | {"dtype": dtype} for variant in variants}
            workload = random_workload(*shape, vocab_size, options.get("seed", 0), special_ids)
            cases.append(Case(name, workload, dtype, engines))
    return cases


def random_case(options: dict[str, Any], num_requests: int, input_len: int, output_len: int) -> Case:
    """`--num-requests N --input-len A --output-len B`: our engine as configured, on random tokens."""
    vocab_size, special_ids = _vocabulary(options)
    shape = num_requests, input_len, output_len
    return single_case("random", options, random_workload(*shape, vocab_size, options.get("seed", 0), special_ids))


def single_case(title: str, options: dict[str, Any], workload: Workload) -> Case:
    dtype = options.get("dtype", "auto")
    if dtype == "auto":
        dtype = str(choose_dtype(dtype)).removeprefix("torch.")
    return Case(title, workload, dtype, {engine_name(options): options | {"dtype": dtype}})


def _vocabulary(options: dict[str, Any]) -> tuple[int, frozenset[int]]:
    source = resolve(options["model"])
    return ModelSpec.from_hf(source.config()).vocab_size, source.tokenizer().special_ids


Result = EngineResult | PeerResult


def run_case(case: Case, peers: dict[str, str | None], threads: int, console: Console) -> list[Result]:
    """Run every engine and every peer ({name: its interpreter}) of a case, print the table, return the results."""
    results: list[Result] = []
    for name, options in case.engines.items():
        with console.status(f"{case.title}: pagefold, {name}"):
            results.append(run_engine(name, options, case.workload, threads))
    with tempfile.TemporaryDirectory(prefix="pagefold-export-") as folder:
        if peers:
            model = next(iter(case.engines.values()))["model"]
            with console.status(f"writing {model} for the peers"):
                export_hf(model, folder, case.dtype)
        for name, python in peers.items():
            with console.status(f"{case.title}: {name}"):
                results.append(run_peer(name, case.workload, folder, case.dtype, threads, python))
    console.print(results_table(case, results, threads))
    for result in results:
        if remark := _remark(result, results[0]):
            console.print(f"{label_of(result)}: {remark}", markup=False)
    return results


def label_of(result: Result) -> str:
    return f"{result.name} {result.version}".strip() if isinstance(result, PeerResult) else f"pagefold, {result.name}"


def _remark(result: Result, ours: Result) -> str:
    """Why there are no figures; or, for a peer, how many of its requests begin as ours do (rounding may differ)."""
    if not result.ok or isinstance(result, EngineResult):
        return result.note
    first = [[tuple(ids[:CHECKED_TOKENS]) for ids in side.outputs] for side in (result, ours)]
    same = sum(a == b for a, b in zip(*first, strict=False))
    return f"{same} of {len(first[0])} requests begin with the same {CHECKED_TOKENS} tokens as {label_of(ours)}"


def results_table(case: Case, results: list[Result], threads: int) -> Table:
    """One row per engine. Ratios are to each peer; there is none if either side failed its check."""
    lens = [{len(p) for p in case.workload.prompts}, set(case.workload.output_lens)]
    shape = [f"{min(s)}" if len(s) == 1 else f"{min(s)} to {max(s)}" for s in lens]
    title = f"{case.title}: {len(case.workload.prompts)} requests, {shape[0]} tokens in, {shape[1]} out"
    table = Table(title=f"{title} ({case.dtype}, {threads} threads)", title_justify="left")
    peers = [result for result in results if isinstance(result, PeerResult)]
    columns = ["engine", "tok/s", "wall s", "TTFT s", "TPOT ms", "peak RSS MB", "running", "preempted", "pages at most"]
    for column in [*columns, "rows kept/seen", *(f"x {peer.name}" for peer in peers)]:
        table.add_column(column, justify="left" if column == "engine" else "right")
    for result in results:
        if not result.ok:
            table.add_row(label_of(result), "failed")
            continue
        cells = [f"{result.tok_s:.1f}", f"{result.wall_s:.2f}"]
        memory = f"{result.peak_rss_bytes / 1e6:.0f}"
        if isinstance(result, EngineResult):
            cells += [f"{result.ttft_s:.2f}", f"{1e3 * result.tpot_s:.1f}", memory, f"{result.peak_running}"]
            cells += [f"{result.preemptions}", f"{result.peak_pages} of {result.num_pages}"]
            share = result.rows_kept / result.rows_seen
            cells += [f"{result.rows_kept:.0f}/{result.rows_seen} ({share:.0%})"]
        else:
            cells += ["", "", memory, "", "", "", ""]
        ratios = [f"{result.tok_s / peer.tok_s:.2f}" if peer.ok else "" for peer in peers]
        table.add_row(label_of(result), *cells, *ratios)
    return table


def report(case: Case, results: list[Result], threads: int) -> dict[str, Any]:
    """A case as JSON: the machine, the work, the engines' options and every figure; token ids are left out."""
    shape = {"input_lens": [len(p) for p in case.workload.prompts], "output_lens": case.workload.output_lens}
    return {
        "title": case.title,
        "dtype": case.dtype,
        "threads": threads,
        "machine": {"processor": _processor(), "python": platform.python_version(), "torch": torch.__version__},
        "workload": shape,
        "pagefold": [
            asdict(dataclasses.replace(r, outputs=())) | {"options": case.engines[r.name]}
            for r in results
            if isinstance(r, EngineResult)
        ],
        "peers": [asdict(dataclasses.replace(r, outputs=())) for r in results if isinstance(r, PeerResult)],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def run_throughput(
    cases: list[Case], peers: dict[str, str | None], threads: int | None = None, json_file: str | None = None
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

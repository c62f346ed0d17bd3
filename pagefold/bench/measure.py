"""One engine on fixed work: served and measured in this process, or in a process of its own, so that its peak resident
memory is its own and the device's memory is free afterwards. This file is also the program of that process.
"""

import json
import os
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

from pagefold.bench.peers import Workload, peak_device_bytes
from pagefold.core.config import EngineConfig
from pagefold.core.types import Request, SamplingParams
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
    def mean_running(self) -> float:
        """Requests running at once, averaged over time."""
        total, before = 0.0, 0.0
        for sample in self.timeline:
            total += sample.running * (sample.seconds - before)
            before = sample.seconds
        return total / before

    @property
    def step_s(self) -> float:
        """Median seconds from one step's end to the next one's."""
        ends = [0.0, *(sample.seconds for sample in self.timeline)]
        return statistics.median(end - start for start, end in zip(ends, ends[1:], strict=False))

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


def end_all(engine: Engine) -> None:
    """Abort whatever there is, and read the steps in flight."""
    for seq in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(seq.request.id)
    while engine.has_work:
        engine.step()


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
    step_s              median seconds of a step
    mean_running        requests running at once, averaged over time; `peak_running` is the most
    folds               times that a request was folded
    compaction_s        seconds that it took (`Compressor.spent`); more than it adds to steps that run beside it
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
    step_s: float = 0.0
    mean_running: float = 0.0
    folds: int = 0
    compaction_s: float = 0.0
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

    @property
    def rows_evicted(self) -> float:
        """Rows per head, summed over the requests."""
        return self.rows_seen - self.rows_kept


def measure(name: str, options: dict[str, Any], workload: Workload) -> EngineResult:
    """Run one configuration in this process: load, warm up, run, check. `options` are those of `EngineConfig`."""
    config = EngineConfig.from_options(**options)
    start = time.perf_counter()
    engine = build_engine(config)
    init_s = time.perf_counter() - start
    _warm_up(engine, workload)
    prefill_s = _serve_apart(engine, workload.prefill(), "prefill").wall_s if workload.prefill_apart else 0.0
    engine.scheduler.stats = stats = Stats()
    before_s = compaction_seconds(engine)
    served = serve(engine, workload.prompts, _sampling(workload))
    compaction_s = compaction_seconds(engine) - before_s
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
        step_s=served.step_s,
        mean_running=served.mean_running,
        folds=stats.folds,
        compaction_s=compaction_s,
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
    engine.manager.forget_all()
    return served


def compaction_seconds(engine: Engine) -> float:
    """Seconds that compactions took so far; waits for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return engine.runner.compressor.spent()[1]


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
    return EngineResult(**fields | run_apart("pagefold.bench.measure", work, threads))


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


if __name__ == "__main__":
    _child(*sys.argv[1:])

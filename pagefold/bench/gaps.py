"""`pagefold bench gaps`: how long a GPU idles between decode steps, what it waits for, and what keeps it busy.

Requests decode together, in steady state, with a short context. A first stretch of steps is timed by the clock alone,
a second one is traced, since tracing costs time itself: busy times are the trace's, the period is the clock's.
"""

import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from pagefold.bench.measure import end_all
from pagefold.bench.workloads import random_workload, require_cuda
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import Loaded, build_engine, load_model
from pagefold.engine.engine import Engine
from pagefold.models.spec import ModelSpec
from pagefold.models.weights import EMBED, tensor_shapes

WARM_UP_STEPS = 20
SPARE_STEPS = 16  # first tokens, and steps planned ahead
CHUNK = 8192  # tokens of a prefill step
KV_BYTES = 16 << 30  # on a GPU; 256 requests of 400 tokens take 15 GB of a model with 36 layers of 8 KV heads of 128
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
SHOWN = 10


# ---- what a trace says


class Span(NamedTuple):
    """Something the device did, in microseconds."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Gap:
    """The device idles after one kernel and before another: per step in all, how often, and the longest time."""

    after: str
    before: str
    us: float
    count: float
    longest_us: float


@dataclass(frozen=True)
class Kernel:
    """Time and launches of a kernel per step."""

    name: str
    us: float
    count: float


@dataclass(frozen=True)
class Timeline:
    """A traced stretch, from its first kernel to the end of its last, per step, in microseconds.

    busy_us   something runs on the device (times of several streams are not added up)
    idle_us   nothing does
    gaps      by the kernels around them, those that cost most first
    kernels   those that take most first
    """

    busy_us: float
    idle_us: float
    launches: float
    gaps: list[Gap]
    kernels: list[Kernel]


def device_spans(trace: dict[str, Any]) -> list[Span]:
    """Kernels, copies and fills of a Chrome trace, by their start."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_DEVICE]
    return sorted(Span(float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]) for e in events)


def timeline(spans: Iterable[Span], steps: int) -> Timeline:
    """What `steps` steps did on the device; `spans` by their start. Raises ValueError if there is none."""
    spans = list(spans)
    if not spans:
        raise ValueError("bench gaps: the trace has no kernel in it; is another profiler running?")
    busy, last = spans[0].end - spans[0].start, spans[0]
    idle: dict[tuple[str, str], list[float]] = {}
    for span in spans[1:]:
        if span.start > last.end:
            idle.setdefault((last.name, span.name), []).append(span.start - last.end)
        busy += max(0.0, span.end - max(span.start, last.end))
        last = max(last, span, key=lambda s: s.end)
    took: dict[str, list[float]] = {}
    for span in spans:
        took.setdefault(span.name, []).append(span.end - span.start)
    gaps = [Gap(*names, sum(us) / steps, len(us) / steps, max(us)) for names, us in idle.items()]
    kernels = [Kernel(name, sum(us) / steps, len(us) / steps) for name, us in took.items()]
    return Timeline(
        busy_us=busy / steps,
        idle_us=sum(gap.us for gap in gaps),
        launches=len(spans) / steps,
        gaps=sorted(gaps, key=lambda gap: -gap.us),
        kernels=sorted(kernels, key=lambda kernel: -kernel.us),
    )


# ---- what the host does


class WatchedRunner:
    """A runner that notes how long its results were waited for; everything else is the runner's own."""

    def __init__(self, runner: Any):
        self._runner = runner
        self.waited_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, *args: Any, **options: Any) -> "WatchedStep":
        return WatchedStep(self, self._runner.launch(*args, **options))


class WatchedStep:
    def __init__(self, watch: WatchedRunner, launched: Any):
        self._watch = watch
        self._launched = launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launched, name)

    def result(self) -> Any:
        start = time.perf_counter()
        result = self._launched.result()
        self._watch.waited_s += time.perf_counter() - start
        return result


@dataclass(frozen=True)
class Steps:
    """Steady decode steps by the clock, per step.

    period_s         from one step to the next, over all of them
    median_step_s    inside `Engine.step`
    host_s           inside `Engine.step`, but not waiting for a result
    tokens           that came out
    """

    period_s: float
    median_step_s: float
    host_s: float
    tokens: float


@dataclass(frozen=True)
class Gaps:
    """One number of running requests.

    tok_s          output tokens per second while nothing is traced
    floor_share    of the period, that a device copy's rate needs to read all weights once; None if not measured
    timeline       None if nothing was traced
    """

    num_requests: int
    tok_s: float
    steps: Steps
    floor_share: float | None = None
    timeline: Timeline | None = field(default=None)


def measure_gaps(
    loaded: Loaded,
    options: dict[str, Any],
    num_requests: int,
    input_len: int,
    steps: int,
    temperature: float = 0.0,
    floor_s: float | None = None,
    traced: bool = True,
) -> Gaps:
    """Let `num_requests` requests decode, time `steps` steps, trace as many more (if `traced`)."""
    for name, value in (("num_requests", num_requests), ("input_len", input_len), ("steps", steps)):
        if value < 1:
            raise InputError(name, f"got {value}, must be an integer >= 1")
    chunk = options.get("max_num_batched_tokens", CHUNK)
    prefill_steps = math.ceil(num_requests * input_len / max(1, chunk - num_requests))  # the first decode meanwhile
    output_len = prefill_steps + WARM_UP_STEPS + 2 * steps + SPARE_STEPS
    defaults = {"max_num_seqs": num_requests, "max_model_len": input_len + output_len, "max_num_batched_tokens": chunk}
    engine = build_engine(EngineConfig.from_options(**defaults | {"enable_prefix_caching": False} | options), loaded)
    work = random_workload(num_requests, input_len, output_len, loaded.spec.vocab_size)
    how = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=output_len, detokenize=False)
    started: set[str] = set()
    for i, prompt in enumerate(work.prompts):
        engine.add(Request(f"gaps-{i}", tuple(prompt), how))
    while len(started) < num_requests:
        outputs = engine.step()
        started |= {output.request_id for output in outputs}
        if any(output.finished for output in outputs):
            raise InputError("num_requests", f"got {num_requests}, the engine does not run as many at once")
    time_steps(engine, WARM_UP_STEPS)
    clock = time_steps(engine, steps)
    seen = timeline(trace_steps(engine, steps), steps) if traced else None
    end_all(engine)
    share = None if floor_s is None else floor_s / clock.period_s
    return Gaps(num_requests, clock.tokens / clock.period_s, clock, share, seen)


def time_steps(engine: Engine, steps: int) -> Steps:
    """Run `steps` steps by the clock."""
    runner = engine.runner
    engine.runner = watch = WatchedRunner(runner)  # type: ignore[assignment]
    inside, tokens = [], 0
    try:
        _synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            entered = time.perf_counter()
            tokens += len(engine.step())
            inside.append(time.perf_counter() - entered)
        _synchronize()
        total = time.perf_counter() - start
    finally:
        engine.runner = runner
    host = (sum(inside) - watch.waited_s) / steps
    return Steps(total / steps, statistics.median(inside), host, tokens / steps)


def trace_steps(engine: Engine, steps: int) -> list[Span]:
    """What the device does during `steps` steps. Needs a CUDA device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        _synchronize()
    with tempfile.TemporaryDirectory(prefix="pagefold-gaps-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return device_spans(json.loads(path.read_text()))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of the weights that a decode step reads: all but the embedding; a tied one is read as the head."""
    return itemsize * sum(math.prod(shape) for name, shape in tensor_shapes(spec).items() if name != EMBED)


# ---- the command


def run_gaps(
    options: dict[str, Any],
    num_requests: list[int],
    input_len: int,
    steps: int,
    temperature: float,
    json_file: str | None = None,
) -> None:
    """Measure each number of running requests on one model in memory and print the tables. Raises InputError if there
    is no CUDA device; on a CPU backend that is asked for, steps are timed and nothing is traced."""
    require_cuda("backend", "bench gaps", options)
    traced = options.get("backend", "auto") in ("auto", "triton")
    loaded = load_model(EngineConfig.from_options(**options))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    read, bandwidth, floor_s = weight_bytes(loaded.spec, loaded.decoder.dtype.itemsize), 0.0, None
    if traced and not options.keys() & {"num_pages", "gpu_memory_utilization"}:
        options = {"kv_cache_memory_bytes": KV_BYTES} | options
    if traced:
        from pagefold.bench.kernels import copy_bandwidth  # brings kernels that only a GPU needs

        bandwidth = copy_bandwidth()
        floor_s = read / bandwidth
        console.print(
            f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s; {read / 1e9:.2f} GB of weights read "
            f"a step, {floor_s * 1e6:.0f} us"
        )
    found = []
    for number in num_requests:
        found.append(measure_gaps(loaded, options, number, input_len, steps, temperature, floor_s, traced))
        gc.collect()  # the engine's memory goes back before the next one is built
        if traced:
            torch.cuda.empty_cache()
        if json_file:
            facts = {"options": options, "input_len": input_len, "copy_tb_s": bandwidth / 1e12, "weight_bytes": read}
            Path(json_file).write_text(json.dumps(facts | {"runs": [asdict(g) for g in found]}, indent=1) + "\n")
    console.print(steps_table(found))
    for gaps in found:
        if gaps.timeline:
            console.print(gaps_table(gaps), kernels_table(gaps))


def steps_table(found: list[Gaps]) -> Table:
    """One row per number of running requests; times of the trace are empty without one."""
    table = Table(title="A decode step, us", title_justify="left")
    columns = ("running", "tok/s", "period", "in step", "host", "GPU busy", "idle", "idle traced", "launches", "floor")
    for column in columns:
        table.add_column(column, justify="right")
    for gaps in found:
        steps, seen = gaps.steps, gaps.timeline
        cells = [f"{gaps.num_requests}", f"{gaps.tok_s:.1f}"]
        cells += [f"{1e6 * seconds:.0f}" for seconds in (steps.period_s, steps.median_step_s, steps.host_s)]
        if seen:
            idle = max(0.0, 1e6 * steps.period_s - seen.busy_us)
            cells += [f"{seen.busy_us:.0f}", f"{idle:.0f} ({idle / steps.period_s / 1e6:.0%})", f"{seen.idle_us:.0f}"]
            cells += [f"{seen.launches:.0f}"]
        else:
            cells += [""] * 4
        table.add_row(*cells, "" if gaps.floor_share is None else f"{gaps.floor_share:.0%}")
    return table


def gaps_table(gaps: Gaps) -> Table:
    assert gaps.timeline
    table = Table(title=f"{gaps.num_requests} running: where the GPU idles, per step", title_justify="left")
    for column in ("us", "times", "longest us", "after", "before"):
        table.add_column(column, justify="left" if column in ("after", "before") else "right", no_wrap=True)
    for gap in gaps.timeline.gaps[:SHOWN]:
        table.add_row(f"{gap.us:.1f}", f"{gap.count:.1f}", f"{gap.longest_us:.1f}", gap.after[:48], gap.before[:48])
    return table


def kernels_table(gaps: Gaps) -> Table:
    assert gaps.timeline
    table = Table(title=f"{gaps.num_requests} running: what keeps it busy, per step", title_justify="left")
    for column in ("us", "share", "times", "kernel"):
        table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)
    for kernel in gaps.timeline.kernels[:SHOWN]:
        share = kernel.us / gaps.timeline.busy_us
        table.add_row(f"{kernel.us:.1f}", f"{share:.1%}", f"{kernel.count:.1f}", kernel.name[:96])
    return table

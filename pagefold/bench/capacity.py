"""How many users with long contexts fit without a preemption, format by format, and how fast they decode together.

Every format gets an engine and a process of its own; users arrive in it one after the other (`growth`). This file is
also the program of that process.
"""

import dataclasses
import json
import sys
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagefold.bench.capacity_work import Growth
from pagefold.bench.growth import WARM_OUTPUT, WARM_PROMPT, WARM_STEPS, chosen_counts, grow, prompt_of
from pagefold.bench.measure import end_all, run_apart
from pagefold.bench.peers import PeerHome, peak_device_bytes, run_growth
from pagefold.bench.workloads import NAMED_TEMPERATURE
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.sequence import Sequence as Running
from pagefold.engine.sequence import Status
from pagefold.kv.bounds import fits_requests
from pagefold.kv.state import HOT

CLONED_PAGES = 64  # copied at a time


@dataclass(frozen=True)
class Capacity:
    """What one format did in one context.

    capacity            clean capacity: users that run to the end of their context with no preemption, by the pages
    pool_tokens         tokens that the pool holds, none evicted
    bytes_per_token     of all heads and layers, scales and padding included; 0 if the engine does not tell
    stages              see `growth.grow`; the last is measured at the clean capacity
    cloned              prompts after the first were copied: only the first user's prefill was measured
    init_s              seconds of loading and capturing
    peak_device_bytes   most device memory that tensors had (torch.cuda.max_memory_allocated)
    quality             {"kl", "perplexity", "needles"}, as `pagefold.eval.formats` found them
    note                "" if there are figures, else why not
    """

    engine: str
    format: str
    context: int
    capacity: int = 0
    pool_tokens: int = 0
    bytes_per_token: float = 0.0
    stages: tuple[dict[str, Any], ...] = ()
    cloned: bool = False
    init_s: float = 0.0
    peak_device_bytes: int = 0
    device: str = ""
    version: str = ""
    quality: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.note

    @property
    def clean(self) -> bool:
        """Whether there are figures, and nobody was preempted."""
        return self.ok and not any(stage["preemptions"] for stage in self.stages)


# ---- one engine, in this process


class Crowd:
    """Users of one of our engines."""

    def __init__(self, engine: Engine, growth: Growth):
        self._engine = engine
        self._growth = growth
        self._first: Running | None = None

    @property
    def capacity(self) -> int:
        growth, engine = self._growth, self._engine
        return fits_requests(engine.manager.geometry, engine.policies.default, growth.prompt_len, growth.context - 1)

    def warm_up(self) -> None:
        """Whatever is compiled or allocated at its first use."""
        self._request("warm-up", -1, min(WARM_PROMPT, self._growth.prompt_len), WARM_OUTPUT)
        while self._engine.has_work:
            self._engine.step()

    def add(self, user: int) -> None:
        self._request(str(user), user, self._growth.prompt_len, self._growth.output_len)
        if self._growth.clone_prompts:
            if self._first is None:
                self._first = self._engine.scheduler.waiting[0]
            else:
                clone_prompt(self._engine, self._first)

    def step(self) -> list[int]:
        return [int(output.request_id) for output in self._engine.step() if not output.finished]

    def leave(self) -> None:
        end_all(self._engine)

    def _request(self, id: str, user: int, prompt_len: int, max_tokens: int) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=NAMED_TEMPERATURE, ignore_eos=True, detokenize=False
        )
        self._engine.add(Request(id, tuple(prompt_of(user, prompt_len, self._engine.vocab_size)), sampling))


def clone_prompt(engine: Engine, first: Running) -> None:
    """Start the request at the head of the queue as if it had read the prompt of `first`, a running one as long.

    It takes pages of its own, as any request does, and gets copies of the rows of all tokens but the last, which the
    next step computes. Raises RuntimeError if there is no room."""
    scheduler, manager, runner = engine.scheduler, engine.manager, engine.runner
    seq = scheduler.waiting[0]
    margin = sum(other.kv.num_groups for other in scheduler.running)
    seq.state = manager.admit(seq.policy, seq.tokens, seq.prompt_len, seq.last, None, margin)
    if seq.state is None or not manager.extend(seq.kv, seq.prompt_len - 1):
        raise RuntimeError(f"no room for a copy of a prompt of {seq.prompt_len} tokens")
    scheduler.waiting.pop(0)
    seq.status, seq.num_cached = Status.RUNNING, 0
    insort(scheduler.running, seq, key=lambda other: other.order)
    num_pages = int(seq.kv.num_pages.max())
    src, dst = (torch.from_numpy(kv.pages[:, :num_pages].ravel()).long().to(runner.device) for kv in (first.kv, seq.kv))
    for some in torch.arange(len(src)).split(CLONED_PAGES):
        for part in runner.kv.parts:
            runner.backend.copy_pages(part.tiers[HOT], src[some], part.tiers[HOT], dst[some])


@torch.inference_mode()
def measure(options: dict[str, Any], growth: Growth) -> Capacity:
    """Run one format in this process. `options` are those of `EngineConfig`."""
    config = EngineConfig.from_options(**options)
    growth.check(config)
    start = time.perf_counter()
    engine = build_engine(config)
    init_s = time.perf_counter() - start
    crowd = Crowd(engine, growth)
    found = _result(engine, growth, crowd.capacity, init_s)
    counts = chosen_counts(growth.users, crowd.capacity)
    if not counts:
        return dataclasses.replace(found, note=f"no user of {growth.context} tokens fits")
    chunks = -(-growth.prompt_len // config.scheduler.tokens_per_step)
    reading = 2 if growth.clone_prompts else chunks + 2  # steps that others decode in while a user arrives
    need = reading * (counts[-1] - 1) + (growth.steps + WARM_STEPS) * len(counts)
    if need >= growth.output_len:
        raise InputError("output_len", f"got {growth.output_len}, the first user generates {need + 1} at least")
    crowd.warm_up()
    stats = engine.scheduler.stats
    stages = grow(crowd.add, crowd.step, counts, growth.steps, lambda: stats.preemptions)
    crowd.leave()
    return dataclasses.replace(found, stages=tuple(stages), peak_device_bytes=peak_device_bytes())


def _result(engine: Engine, growth: Growth, capacity: int, init_s: float) -> Capacity:
    geometry = engine.manager.geometry
    return Capacity(
        engine="pagefold",
        format=engine.config.cache.kv_format,
        context=growth.context,
        capacity=capacity,
        pool_tokens=(geometry.num_pages[HOT] - 1) // geometry.num_groups * geometry.page_size,
        bytes_per_token=geometry.bytes_per_page[HOT] * geometry.num_groups / geometry.page_size,
        cloned=growth.clone_prompts,
        init_s=init_s,
        device=torch.cuda.get_device_name() if peak_device_bytes() else "",
    )


def _child(job_file: str, answer_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    result = measure(job["options"], Growth(**job["growth"] | {"users": tuple(job["growth"]["users"])}))
    Path(answer_file).write_text(json.dumps(asdict(result)))


# ---- all engines, each in a process of its own


def run_format(options: dict[str, Any], growth: Growth, threads: int) -> Capacity:
    """`measure` in a fresh process. One that fails is a result with a note."""
    job = {"options": options, "growth": asdict(growth), "threads": threads}
    who: dict[str, Any] = {"engine": "pagefold", "format": options["kv_format"], "context": growth.context}
    fields = who | run_apart("pagefold.bench.capacity", job, threads)
    stages = tuple(fields.pop("stages", ()))
    return Capacity(stages=stages, **fields)


def run_vllm(
    format: str, options: dict[str, Any], growth: Growth, model_dir: Path, home: PeerHome, device: str, threads: int
) -> Capacity:
    """vLLM with the same memory, contexts and users; it reads every prompt itself.

    format    "bf16", rows in the model's precision, or "fp8"
    options   ours, of which it gets those that it knows
    """
    names = ("load_format", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "gpu_memory_utilization")
    given = {name: options[name] for name in names if options.get(name) not in (None, "auto")}
    job = {
        "model": str(model_dir.resolve()),
        "dtype": options["dtype"],
        "temperature": NAMED_TEMPERATURE,
        "options": given | {"kv_cache_dtype": "auto" if format == "bf16" else format},
    }
    answer = run_growth(job | asdict(growth), home, device, threads)
    stages = tuple(answer.pop("stages", ()))
    return Capacity("vllm", format, growth.context, stages=stages, **answer)


Report = Callable[[Sequence[Capacity]], None]


def run_all(
    options: dict[str, Any],
    formats: Sequence[str],
    contexts: Sequence[int],
    growth: Growth,
    threads: int,
    peer: Callable[[str, Growth], Capacity] | None,
    peer_formats: Sequence[str],
    report: Report,
) -> list[Capacity]:
    """Every format and every format of the peer, in every context.

    options   engine options, of which the format and the length follow from here
    peer      runs one of `peer_formats`; None: there is no peer
    report    told what there is, after every engine
    """
    results: list[Capacity] = []
    for context in contexts:
        work = dataclasses.replace(growth, context=context)
        for format in formats:
            results.append(run_format(options | {"kv_format": format, "max_model_len": context}, work, threads))
            report(results)
        for format in peer_formats if peer else ():
            results.append(peer(format, work))  # type: ignore[misc]
            report(results)
    return results


if __name__ == "__main__":
    _child(*sys.argv[1:])

"""The host must not be what a step waits for: plans, tables, results and outputs of a full batch, without a model."""

import statistics
import sys
import time

import numpy as np
import pytest

from pagefold.core.config import EngineConfig
from pagefold.core.types import Request, SamplingParams, StepPlan, StepResult
from pagefold.engine.engine import Engine
from pagefold.engine.policy import PolicyMaker
from pagefold.kv.bounds import KVGeometry
from pagefold.kv.layout import HeadLayout
from pagefold.kv.manager import KVManager

RUNNING, STEPS, PAGE = 256, 96, 32


class Worker:
    """Draws a token wherever one is wanted, and keeps its own time apart."""

    def __init__(self):
        self.seconds = 0.0

    def launch(self, plan: StepPlan) -> "Worker":
        start = time.thread_time()
        ids: list[int | None] = [None if spec is None else 7 for spec in plan.samples.lasting]
        self._result = StepResult(plan.step, ids, [None] * len(ids), {})
        self.seconds += time.thread_time() - start
        return self

    def result(self) -> StepResult:
        return self._result


def full_batch(num_groups: int, **options) -> Engine:
    """An engine whose every sequence decodes; their pages are opened, and their folds fall due, at different steps."""
    layout = HeadLayout(
        np.arange(num_groups, dtype=np.int32)[:, None],
        np.zeros((num_groups, 1), np.int32),
        np.ones(num_groups),
    )
    config = EngineConfig.from_options(
        page_size=PAGE, max_num_seqs=RUNNING, max_num_batched_tokens=1 << 20, plan_ahead=False, **options
    )
    policies = PolicyMaker(config, layout)
    pages = RUNNING * 64 * num_groups
    geometry = KVGeometry((pages,), (2,), (1,), num_groups, PAGE, RUNNING, config.window_slots)
    engine = Engine(config, Worker(), KVManager(geometry), policies, None, 100, 1 << 20, ())  # type: ignore[arg-type]
    for i in range(RUNNING):
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        engine.add(Request(str(i), tuple([i % 100] * (1060 + i % PAGE)), sampling))
    for _ in range(2 * PAGE):
        engine.step()
    assert len(engine.scheduler.running) == RUNNING
    return engine


def yardstick() -> float:
    """Seconds of processor time that work of the kinds a step is made of takes here and now: 3.3 ms on a quiet core of
    an AMD EPYC, twice that beside a busy one."""
    start = time.thread_time()
    table: dict[int, tuple[int, int]] = {}
    for i in range(20_000):
        table[i % 256] = i, len(table)
    for _ in range(200):
        np.arange(256).cumsum().argsort()
    return time.thread_time() - start


def step_costs(engine: Engine) -> list[float]:
    """Processor time that the host takes per step, the worker's apart, in yardsticks."""
    costs = []
    for _ in range(STEPS):
        own, start = engine.runner.seconds, time.thread_time()  # type: ignore[attr-defined]
        assert len(engine.step()) == RUNNING
        seconds = time.thread_time() - start - (engine.runner.seconds - own)  # type: ignore[attr-defined]
        costs.append(seconds / yardstick())
    return costs


@pytest.mark.parametrize("num_groups", [1, 72])
@pytest.mark.parametrize("eviction", ["none", "zipage"])
def test_a_step_of_a_full_batch_costs_the_host_a_few_milliseconds(num_groups, eviction):
    engine = full_batch(num_groups, kv_eviction=eviction, kv_budget=1024)
    assert statistics.median(step_costs(engine)) < 3
    assert (engine.scheduler.stats.folds > RUNNING) == (eviction == "zipage")


def calls_of(engine: Engine, steps: int) -> int:
    """Python functions called in so many steps: what the host does, whatever else the machine does meanwhile."""
    calls = 0

    def count(frame, event: str, arg) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_sequence_costs_the_host_calls_only_when_something_happens_to_it():
    """Each opens a page once in so many steps, and nothing else happens. Neither does anything in pressure mode while
    memory is ample: rows that nobody asks to evict are those of a full cache."""
    full, pressed = (
        calls_of(full_batch(1, **options), PAGE)
        for options in ({}, {"kv_eviction": "zipage", "kv_budget": 1024, "kv_evict_when": "pressure"})
    )
    assert full < PAGE * RUNNING * 2 and pressed - full < PAGE * 20

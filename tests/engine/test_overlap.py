"""Jobs that run beside the steps may be as late as the rule of `Compressor.before_edits` lets them.

On a CPU there is no second stream; here a job is held back until its result is waited for, while steps, aborts, swaps
and admissions go on around it. Nothing that it reads may have changed by then, and nothing that it writes may have a
new owner.
"""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from pagefold.core.types import Job, Move, Request, ScorePolicy, SwapOp, TableEdits
from pagefold.engine.engine import Engine
from pagefold.runner.compressor import Compressor
from tests.engine.tiny import assert_drained, greedy, prompt_of, tiny_engine

OPTIONS: dict[str, Any] = {
    "kv_eviction": "zipage",
    "kv_budget": 12,
    "kv_buffer": 8,
    "kv_prefill_buffer": 8,
    "kv_lag": 3,
    "max_num_batched_tokens": 16,
    "preemption": "swap",
}
REQUESTS = [(prompt_of(3 + 5 * i % 37, i), 10 + 7 * i % 31) for i in range(24)]


class LateJobs(Compressor):
    """Jobs begin when somebody waits for them."""

    def run(self, jobs: list[Job], policies: list[ScorePolicy]) -> None:
        if jobs:
            self._note(jobs, Late(self, jobs, policies))  # type: ignore[arg-type]

    def before_edits(self, edits, swaps) -> None:
        self.queue = [running.done for running in self._running]
        super().before_edits(edits, swaps)

    def _wait(self, done) -> None:
        for late in self.queue[: self.queue.index(done) + 1]:
            self._run(late.jobs, late.policies)


class Late:
    def __init__(self, compressor: LateJobs, jobs: list[Job], policies: list[ScorePolicy]):
        self.jobs, self.policies = jobs, policies

    def query(self) -> bool:
        return False


def serve(engine: Engine, doomed: set[int]) -> dict[int, list[int]]:
    """Tokens of the requests that were not aborted; each of `doomed` is, the first time that a job of it is running."""
    waiting, tokens, rng = list(range(len(REQUESTS))), {}, random.Random(0)
    while waiting or engine.has_work:
        for i in [waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 3)))]:
            engine.add(Request(f"{i}", tuple(REQUESTS[i][0]), greedy(REQUESTS[i][1])))
        for seq in list(engine.scheduler.running):
            if int(seq.request.id) in doomed and seq.kv.ticket:
                engine.abort(seq.request.id)
            elif rng.random() < 0.1 and engine.scheduler.can_preempt(seq):
                engine.scheduler.preempt(seq)
        tokens |= {int(out.request_id): out.outputs[0].token_ids for out in engine.step() if out.finished}
    assert_drained(engine)
    return {i: tokens[i] for i in tokens if i not in doomed}


@cache
def expected() -> dict[int, list[int]]:
    return serve(tiny_engine(num_pages=2000, **OPTIONS), set())


@pytest.mark.parametrize("cold", [{}, {"kv_cold_format": "fp64", "kv_cold_after": 4}], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("num_pages", [2000, 24])
def test_jobs_as_late_as_can_be_change_no_token(num_pages, plan_ahead, cold):
    engine = tiny_engine(num_pages=num_pages, plan_ahead=plan_ahead, **OPTIONS | cold)
    runner = engine.runner
    late = runner.compressor = LateJobs(runner.backend, runner.kv, runner.model.scale)
    done, run = [], late._run
    late._run = lambda jobs, policies: done.append(len(jobs)) or run(jobs, policies)  # type: ignore[method-assign]
    doomed = set(range(0, len(REQUESTS), 4))
    tokens = serve(engine, doomed)
    assert done and (num_pages > 24 or engine.scheduler.stats.swaps)
    for i, found in tokens.items():
        assert found == expected()[i], i


@pytest.mark.parametrize(
    "pages, slot, swapped, to_host, waits",
    [
        ([7, 8], 2, [], True, False),
        ([8, 21], 2, [], True, True),
        ([8], 1, [], True, True),
        ([8], 2, [22], True, True),
        ([8], 2, [22], False, False),
    ],
    ids=["others", "a page has an owner", "a slot has another sequence", "swapped out", "swapped into"],
)
def test_whoever_gets_a_page_waits_for_the_job_that_writes_it(pages, slot, swapped, to_host, waits):
    """Whoever swaps into pages names them in its table as well."""
    engine = tiny_engine(**OPTIONS)
    runner = engine.runner
    late = LateJobs(runner.backend, runner.kv, runner.model.scale)
    ran, late._run = [], lambda jobs, policies: ran.append(jobs)  # type: ignore[method-assign]
    for owner, dst in ((1, [20, 21, 22]), (3, [30, 31])):
        late.run([Job(owner, 0, 0, 5, 20, 20, 12, np.array(dst, np.int32), 0, 1, 0)], [])
    edits = np.array([[4, 0, 5, page] for page in pages], np.int32)
    lengths = np.array([[slot, 0, 4, 0]], np.int32)
    swap = SwapOp(0, Move.OUT if to_host else Move.IN, np.array(swapped, np.int32), np.array(swapped, np.int32))
    late.before_edits(TableEdits(edits, lengths), [swap])
    assert len(ran) == waits

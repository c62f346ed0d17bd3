"""Requests of one engine may keep everything, fold, or fold only under pressure, and none is the worse for it."""

from typing import Any

import pytest

from pagefold.core.types import SamplingParams, StepPlan
from pagefold.engine.engine import Engine
from tests.engine.tiny import alone, assert_drained, greedy, prompt_of, run, seeded, tiny_engine

SHARED = prompt_of(16)
MIX = [
    greedy(40, kv_eviction="none"),
    greedy(40),
    greedy(40, kv_budget=24),
    greedy(40, kv_eviction="recency", kv_budget=8),
    greedy(40, kv_eviction="snapkv"),
    seeded(40, 5, kv_eviction="none"),
    greedy(40, kv_evict_when="pressure"),
]


@pytest.mark.parametrize("lending", ["just-in-time", "for-life"])
@pytest.mark.parametrize("plan_ahead", [False, True])
def test_exact_and_folded_requests_share_an_engine_and_a_prefix(plan_ahead, lending):
    """Each gets the tokens it gets alone; exact ones those of an engine that never folds, and all rows of theirs."""
    options: dict[str, Any] = {"kv_eviction": "zipage", "kv_window_slots": 2, "num_pages": 2000}
    engine = tiny_engine(plan_ahead=plan_ahead, kv_window_lending=lending, **options)
    prompts = [SHARED + prompt_of(9, i)[1:] for i in range(len(MIX))]
    outputs = run(engine, prompts, MIX)
    assert_drained(engine)
    for prompt, params, output in zip(prompts, MIX, outputs, strict=True):
        exact = params.kv_eviction == "none" or params.kv_evict_when == "pressure"
        want = alone(prompt, params if not exact else plain(params), **({} if exact else options))
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        assert (output.kv.rows_evicted == 0) == exact
        rows = params.kv_budget or engine.config.eviction.kv_budget
        assert exact or output.kv.rows_kept <= rows + engine.config.period


def plain(params: SamplingParams) -> SamplingParams:
    return greedy(40) if params.seed is None else seeded(40, params.seed)


class PlanRecorder:
    """Stands in front of an engine's runner and keeps what it is told."""

    def __init__(self, engine: Engine):
        self.plans: list[StepPlan] = []
        self._runner = engine.runner
        engine.runner = self  # type: ignore[assignment]

    def launch(self, plan: StepPlan):
        self.plans.append(plan)
        return self._runner.launch(plan)


def facts(plan: StepPlan) -> tuple:
    """All that the device is asked to do in a step."""
    edits = plan.edits.pages.tolist(), plan.edits.lengths.tolist()
    swaps = [(op.tier, op.to_host, op.src_pages.tolist(), op.dst_pages.tolist()) for op in plan.swaps]
    draws = [spec and (spec.seed, spec.position) for spec in plan.samples]
    return plan.step, edits, swaps, plan.chunks, plan.tokens.tolist(), draws, plan.jobs, plan.policies


@pytest.mark.parametrize("plan_ahead", [False, True])
@pytest.mark.parametrize("scorer", ["zipage", "recency"])
def test_pressure_with_ample_memory_asks_the_device_for_nothing_more(scorer, plan_ahead):
    """Step for step the plans of an engine that never evicts: no window kept, no job, no other page."""
    recorded = []
    for options in ({}, {"kv_eviction": scorer, "kv_evict_when": "pressure"}):
        engine = tiny_engine(num_pages=2000, plan_ahead=plan_ahead, **options)
        recorder = PlanRecorder(engine)
        prompts = [prompt_of(5 + 7 * i, i) for i in range(12)]
        outputs = run(engine, prompts, [seeded(30 + i, i) for i in range(12)])
        assert all(output.kv.rows_evicted == 0 for output in outputs)
        assert not any(chunk.window_slot for plan in recorder.plans for chunk in plan.chunks)
        recorded.append([facts(plan) for plan in recorder.plans])
    assert recorded[0] == recorded[1]

"""Folding on real rows, on either side: what is kept, who may write where, and that a request depends on itself alone.

Each test runs on the CPU backend, and on a GPU where there is one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagefold.backends.base import JobBatch, KVView
from pagefold.core.types import Job, Request, SamplingParams, ScorePolicy, StepPlan
from pagefold.engine.engine import Engine
from pagefold.runner.compressor import Compressor
from tests.engine.tiny import assert_drained, drain, greedy, run, seeded
from tests.gpu.test_engine import engine_of

BACKENDS = ["cpu", pytest.param("triton", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)
FOLDED: dict[str, Any] = {"kv_eviction": "zipage", "kv_sink_tokens": 1}
PAGE, BUDGET, WINDOW = 16, 32, 8  # of `engine_of`


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


TRUNK = prompt_of(96)


def tokens_of(output) -> list[int]:
    return output.outputs[0].token_ids


def alone(prompt: list[int], params: SamplingParams, **options: Any) -> list[int]:
    return tokens_of(run(engine_of(**options), [prompt], [params])[0])


def settle(engine: Engine) -> None:
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize()


# ---- what is kept


def test_a_budget_beyond_the_length_gives_the_tokens_of_full_kv(backend):
    """Zipage invariant 1, drawn tokens included."""
    prompts, params = [prompt_of(9 + 20 * i, i) for i in range(4)], [greedy(50), seeded(50, 1), greedy(60), greedy(9)]
    full = run(engine_of(backend=backend), prompts, params)
    kept = run(engine_of(backend=backend, **FOLDED, kv_budget=160), prompts, params)
    assert [tokens_of(output) for output in kept] == [tokens_of(output) for output in full]
    assert all(output.kv.compactions == 0 for output in kept)


class Moves:
    """Stands before `Backend.compact`, and checks what each call wrote."""

    def __init__(self, engine: Engine):
        self.calls = 0
        self._compact = engine.runner.backend.compact
        engine.runner.backend.compact = self  # type: ignore[method-assign]
        engine.runner.compressor._graphs = None  # whose replays call nobody

    def __call__(self, kv: KVView, jobs: JobBatch, columns: slice, keep: torch.Tensor, state: dict) -> None:
        store, before = kv.tiers[0], [plane.clone() for plane in kv.tiers[0].planes.values()]
        self._compact(kv, jobs, columns, keep, state)
        written = torch.zeros(store.num_pages, dtype=torch.bool, device=keep.device)
        written[jobs.dst_pages.flatten()] = True
        for (name, plane), old in zip(store.planes.items(), before, strict=True):
            assert torch.equal(plane[~written], old[~written]), "a page was written that is no destination"
            if name.removeprefix("state.") not in state:
                for j in range(len(keep)):
                    self._check(kv, jobs, columns, keep, j, plane, old)
        self.calls += 1

    def _check(self, kv, jobs, columns, keep, j, plane, old) -> None:
        """The rows of one job, bit by bit: a sorted gather of its source rows."""
        dst = jobs.dst_pages[j][jobs.dst_pages[j] > 0]
        chosen = keep[j, :, : len(dst) * kv.page_size]
        assert (chosen.diff(dim=-1) > 0).all() and (chosen < jobs.num_src[j]).all()
        pages = kv.page_table[jobs.slots[j], jobs.groups[j], int(jobs.first_page[j]) :].long()
        for c, column in enumerate(range(plane.shape[1])[columns]):
            source = old[pages[chosen[c] // kv.page_size], column, chosen[c] % kv.page_size]
            assert torch.equal(plane[dst, column].flatten(0, 1), source)


@pytest.mark.parametrize("scorer", ["zipage", "zipage:redundancy=full,pool=always", "snapkv", "keydiff"])
def test_kept_rows_move_bit_by_bit_and_nothing_else_is_written(backend, scorer):
    """Invariants 2, 4, 5 and 9: into fresh pages, in order, whatever the request shares with others."""
    engine = engine_of(backend=backend, kv_eviction=scorer)
    moves = Moves(engine)
    outputs = run(engine, [TRUNK, TRUNK, TRUNK[:64] + prompt_of(9, 1), prompt_of(20, 2)], [greedy(60)] * 4)
    assert moves.calls > 6 and all(output.kv.compactions >= 2 for output in outputs)
    assert_drained(engine)


def test_heads_stay_within_their_bound_and_every_source_page_is_full(backend):
    """Invariants 13 and 14."""
    engine = engine_of(backend=backend, **FOLDED, kv_buffer=32, kv_lag=4)
    launch, jobs = engine.runner.launch, []

    def watched(plan: StepPlan):
        jobs.extend(plan.jobs)
        return launch(plan)

    engine.runner.launch = watched  # type: ignore[method-assign]
    for i, length in enumerate((3, 40, 130)):
        engine.add(Request(f"{i}", tuple(prompt_of(length, i)), greedy(150)))
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            if seq.kv.evicted.any():
                assert (seq.kv.rows <= BUDGET + 32 + 4).all()
        engine.manager.check()
    assert len(jobs) > 9
    for job in jobs:
        assert job.num_tokens % 32 == 0 and (job.first_page + job.num_src_pages) * PAGE == job.num_rows


# ---- windows


class Windows(Compressor):
    """Folds as ever, and keeps the queries that each fold looked at: {(request, tokens): [L, w, Hq, D]}."""

    def __init__(self, engine: Engine):
        runner = engine.runner
        super().__init__(runner.backend, runner.kv, runner.model.scale, overlap=engine.config.eviction.kv_lag > 0)
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self._engine = engine
        runner.compressor = self

    def _run(self, jobs: list[Job], policies: list[ScorePolicy]) -> None:
        owner = {seq.kv.slot: seq.request.id for seq in self._engine.scheduler.running}
        for job in jobs:
            self.seen[owner[job.slot], job.num_tokens] = self.kv.window[:, job.window_slot].cpu().clone()
        super()._run(jobs, policies)


@pytest.mark.parametrize("lag", [0, 4])
def test_every_query_of_a_window_is_of_its_request_and_its_place(backend, lag):
    """Invariants 12 and 18: windows are lent to one after the other, and hold what a request alone would have there."""
    options = {**FOLDED, "backend": backend, "kv_lag": lag}
    prompts = [prompt_of(5 + 11 * i, i) for i in range(7)]
    crowd = Windows(engine_of(**options, kv_window_slots=2))
    outputs = run(crowd._engine, prompts, [greedy(60)] * 7)
    singles: dict[tuple[str, int], torch.Tensor] = {}
    for i, prompt in enumerate(prompts):
        single = Windows(engine_of(**options))
        single._engine.add(Request(f"run-{i}", tuple(prompt), greedy(60)))
        assert tokens_of(drain(single._engine)[f"run-{i}"]) == tokens_of(outputs[i])
        singles |= single.seen
    assert crowd.seen.keys() == singles.keys() and len(singles) > 12
    for key, window in crowd.seen.items():
        torch.testing.assert_close(window, singles[key], atol=1e-3, rtol=1e-3)


# ---- the prefix cache


def bytes_of_pages(engine: Engine, pages: np.ndarray) -> list[torch.Tensor]:
    at = torch.from_numpy(pages).to(engine.runner.device)
    return [plane[at].cpu().clone() for plane in engine.runner.kv.tiers[0].planes.values()]


def guard_shared_pages(engine: Engine) -> Callable[[], int]:
    """After every step, pages that two hold or the prefix cache knows must be what they were, in every plane. Returns a
    function that says how many pages were compared so far."""
    launch, compared = engine.runner.launch, 0
    pool = engine.manager.pools[0]

    def guarded(plan: StepPlan):
        nonlocal compared
        shared = np.flatnonzero((pool.refs > 1) | pool.cached)
        before = bytes_of_pages(engine, shared)
        launched = launch(plan)
        settle(engine)
        for old, new in zip(before, bytes_of_pages(engine, shared), strict=True):
            assert torch.equal(old, new), "a shared page was written"
        compared += len(shared)
        return launched

    engine.runner.launch = guarded  # type: ignore[method-assign]
    return lambda: compared


@pytest.mark.parametrize("options", [{}, {"kv_lag": 4}, {"kv_lag": 4, "num_pages": 40}], ids=["", "late", "tight"])
def test_shared_pages_are_never_written_and_siblings_fold_on_their_own(backend, options):
    """Invariant 16. All of a sibling's pages may be shared when it folds; each gets the tokens it gets alone."""
    shared = {**FOLDED, "backend": backend, "kv_lag": options.get("kv_lag", 0)}
    engine = engine_of(**FOLDED, backend=backend, **options)
    compared = guard_shared_pages(engine)
    work = [
        (TRUNK + [1], greedy(40)),
        (TRUNK + [2], greedy(40)),
        (TRUNK + [3], greedy(40, kv_eviction="none")),
        (TRUNK + prompt_of(30, 1), greedy(40)),
        (TRUNK[:64] + [4], greedy(40, kv_budget=48)),
        (TRUNK + [5], seeded(40, 5)),
    ]
    run(engine, [TRUNK], [greedy(1)])  # the trunk is known from now on
    outputs = run(engine, [prompt for prompt, _ in work], [params for _, params in work])
    assert_drained(engine)
    assert compared() > 100 and sum(output.kv.compactions > 0 for output in outputs) == 5
    assert options.get("num_pages") or all(output.num_cached_tokens >= 48 for output in outputs)
    for (prompt, params), output in zip(work, outputs, strict=True):
        assert tokens_of(output) == alone(prompt, params, **shared)


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 79, 80])
def test_a_hit_gives_the_tokens_of_a_cold_prompt(backend, length):
    """Invariant 21: identical, page-aligned and nested prompts, that fold at once or later."""
    options = {**FOLDED, "backend": backend}
    engine, prompt = engine_of(**options), TRUNK[:length]
    compared = guard_shared_pages(engine)
    want = alone(prompt, greedy(40), **options, enable_prefix_caching=False)
    first, second, third = (run(engine, [prompt], [greedy(40)])[0] for _ in range(3))
    assert [tokens_of(output) for output in (first, second, third)] == [want] * 3
    assert second.num_cached_tokens == third.num_cached_tokens >= (length - 1 - WINDOW) // PAGE * PAGE - PAGE
    (longer,) = run(engine, [prompt + prompt_of(17, 3)], [greedy(20)])
    assert tokens_of(longer) == alone(prompt + prompt_of(17, 3), greedy(20), **options, enable_prefix_caching=False)
    assert compared() > 0
    assert_drained(engine)


# ---- one engine, many policies


def test_exact_and_folded_requests_share_an_engine(backend):
    options = {**FOLDED, "backend": backend}
    work = [
        (prompt_of(40 + i, i), greedy(40, **policy))
        for i, policy in enumerate(
            [
                {"kv_eviction": "none"},
                {},
                {"kv_budget": 64},
                {"kv_eviction": "snapkv"},
                {"kv_eviction": "recency", "kv_budget": 48},
                {"kv_evict_when": "pressure"},
            ]
        )
    ]
    engine = engine_of(**options, kv_window_slots=1)
    outputs = run(engine, [prompt for prompt, _ in work], [params for _, params in work])
    assert_drained(engine)
    assert [output.kv.compactions > 0 for output in outputs] == [False, True, True, True, True, False]
    for (prompt, params), output in zip(work, outputs, strict=True):
        assert tokens_of(output) == alone(prompt, params, **options)
    for i in (0, 5):
        assert tokens_of(outputs[i]) == alone(work[i][0], greedy(40), backend=backend)


# ---- failures


@pytest.mark.parametrize("options", [{}, {"kv_lag": 4}, {"plan_ahead": False}], ids=["", "late", "not ahead"])
def test_a_compaction_that_fails_ends_the_requests_it_was_for_and_no_other(backend, options, monkeypatch, caplog):
    """Invariant 23. The others were running beside it, or fold later, or share its prefix."""
    options = {**FOLDED, "backend": backend, **options}
    engine = engine_of(**options)
    compressor, number = engine.runner.compressor, 0
    score = compressor.score

    def failing(ctx, policy):
        nonlocal number
        number += 1
        if number == 1:
            raise ZeroDivisionError("a scorer's")
        return score(ctx, policy)

    monkeypatch.setattr(compressor, "score", failing)
    monkeypatch.setattr(compressor, "_graphs", None)  # whose replays call nobody
    prompts = [prompt_of(47), prompt_of(47)[:33] + [1], prompt_of(30, 1), prompt_of(9, 2)]
    outputs = run(engine, prompts, [greedy(40), greedy(40), greedy(50, kv_eviction="none"), greedy(60)])
    assert_drained(engine)
    ended = [output.outputs[0].finish_reason for output in outputs]
    assert ended == ["abort", "length", "length", "length"]
    error = outputs[0].outputs[0].error
    assert error and "compaction failed" in error and "a scorer's" in error and "compaction failed" in caplog.text
    assert tokens_of(outputs[0]) == alone(prompts[0], greedy(40), **options)[: len(tokens_of(outputs[0]))]
    for prompt, params, output in zip(prompts[1:], (40, 50, 60), outputs[1:], strict=True):
        policy = {"kv_eviction": "none"} if params == 50 else {}
        assert tokens_of(output) == alone(prompt, greedy(params, **policy), **options)
    (again,) = run(engine, prompts[:1], [greedy(40)])
    assert tokens_of(again) == alone(prompts[0], greedy(40), **options)

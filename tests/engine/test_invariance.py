"""Neighbours, chunks, prefix hits, preemptions, pools and aborts change when a token is computed, never which."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.engine import Engine
from tests.engine.tiny import alone, assert_drained, drain, greedy, prompt_of, run, seeded, tiny_engine

TRUNK = prompt_of(24)
PROMPTS = [
    TRUNK[:1],
    TRUNK[:16],  # whole pages, and an event of most policies
    TRUNK,
    TRUNK[:13] + prompt_of(9, 1),
    TRUNK[:20] + prompt_of(14, 2),
    prompt_of(31, 3),
]
SAMPLING = [
    greedy(1),
    greedy(18),
    greedy(25, kv_eviction="none"),
    greedy(14, kv_eviction="recency", kv_budget=8),
    seeded(17, 7),
    seeded(12, -5, n=2, top_p=0.8, presence_penalty=0.5),
    greedy(30, kv_evict_when="pressure"),  # folds when its neighbours make it: only its length is certain
]
LAYOUTS = ["uniform", "clustered:profile={profile},heads_per_page=1"]


@st.composite
def policies(draw) -> dict:
    """What a request's tokens may depend on."""
    options = {
        "kv_eviction": draw(st.sampled_from(["none", "recency", "snapkv", "zipage"])),
        "kv_lag": draw(st.sampled_from([0, 1])),
        "kv_layout": draw(st.sampled_from(LAYOUTS)),
    }
    if draw(st.booleans()):
        options |= {"kv_buffer": 8, "kv_prefill_buffer": 8, "kv_window_stride": draw(st.sampled_from([1, 3]))}
    if cold := draw(st.sampled_from([None, None, "fp64", "int4"])):
        options |= {"kv_cold_format": cold, "kv_cold_after": draw(st.sampled_from([0, 6]))}
    return options


@st.composite
def circumstances(draw) -> dict:
    """What they may not depend on."""
    return {
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 7, 16, 64])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "num_pages": draw(st.integers(8, 50)),
        "kv_window_slots": draw(st.integers(1, 3)),
        "enable_prefix_caching": draw(st.booleans()),
        "preemption": draw(st.sampled_from(["recompute", "swap"])),
        "kv_swap_bytes": draw(st.sampled_from([0, 1 << 15, 1 << 22])),
        "plan_ahead": draw(st.booleans()),
    }


@cache
def expected(policy: tuple, prompt: int, sampling: int) -> list[list[int]]:
    """Alone, in one chunk, with all the memory in the world."""
    options = dict(policy) | {"enable_prefix_caching": False, "num_pages": 2000, "max_num_batched_tokens": 512}
    return [choice.token_ids for choice in alone(PROMPTS[prompt], SAMPLING[sampling], **options).outputs]


def disturb(engine: Engine, action: str, index: int, live: list[str]) -> str | None:
    """One blow between two steps. Returns the id of the request that it aborted."""
    scheduler = engine.scheduler
    if action in ("preempt", "preempt all"):
        victims = scheduler.running[index : index + 1] if action == "preempt" else scheduler.running[::-1]
        for seq in victims:
            if scheduler.can_preempt(seq):
                scheduler.preempt(seq)
    elif action == "abort" and index < len(live):
        engine.abort(live[index])
        return live[index]
    return None


@settings(max_examples=60)
@given(
    policies(),
    circumstances(),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.sampled_from(["", "preempt", "preempt", "preempt all", "abort"]), st.integers(0, 5)), max_size=30
    ),
)
def test_tokens_depend_on_the_request_alone(layout_of, policy, world, requests, blows):
    """Requests are (prompt, sampling, step of arrival); a blow falls after each of the first steps."""
    policy = policy | {"kv_layout": layout_of(policy["kv_layout"])}
    groups = 4 if "clustered" in policy["kv_layout"] else 1
    engine = tiny_engine(**policy | world | {"num_pages": world["num_pages"] * groups})
    waiting, outputs, live = list(enumerate(requests)), {}, []
    aborted: set[str] = set()
    for step in range(5000):
        for item in [item for item in waiting if item[1][2] <= step]:
            waiting.remove(item)
            i, (prompt, sampling, _) = item
            try:
                engine.add(Request(str(i), tuple(PROMPTS[prompt]), SAMPLING[sampling]))
                live.append(str(i))
            except InputError as error:  # the pool is too small for it, however empty
                assert "pages" in str(error)
        for output in engine.step():
            outputs[output.request_id] = output
            if output.finished:
                live.remove(output.request_id)
        if step < len(blows) and (victim := disturb(engine, *blows[step], live)):
            live.remove(victim)
            aborted.add(victim)
        engine.manager.check()
        if not engine.has_work and not waiting:
            break
    else:
        raise AssertionError("no progress")
    assert_drained(engine)
    for id, output in outputs.items():
        want = expected(tuple(sorted(policy.items())), *requests[int(id)][:2])
        got = [choice.token_ids for choice in output.outputs]
        if SAMPLING[requests[int(id)][1]].kv_evict_when == "pressure":
            assert id in aborted or [len(part) for part in got] == [len(whole) for whole in want]
        elif id in aborted:
            assert all(whole[: len(part)] == part for whole, part in zip(want, got, strict=True))
        else:
            assert output.finished and got == want


@pytest.mark.parametrize("scorer", ["none", "recency", "snapkv", "zipage"])
def test_a_warm_prefix_gives_the_tokens_of_a_cold_one(scorer):
    """Hits are counted, too: outputs alone would not show that nothing is ever found."""
    engine = tiny_engine(kv_eviction=scorer, kv_budget=16)
    prompts = [TRUNK, TRUNK, TRUNK[:20] + prompt_of(14, 2), prompt_of(31, 3)]
    cold = [alone(p, greedy(20), kv_eviction=scorer, kv_budget=16).outputs[0].token_ids for p in prompts]
    for _ in range(2):
        warm = [run(engine, [prompt], [greedy(20)])[0] for prompt in prompts]
        assert [output.outputs[0].token_ids for output in warm] == cold
    # at most the page before the first fold whose window's queries are still computed: 24 - 3 tokens, 5 pages
    hits = [output.num_cached_tokens for output in warm]
    assert hits == ([20, 20, 32, 28] if scorer == "none" else hits) and all(hit >= 16 for hit in hits)
    assert_drained(engine)


@pytest.mark.parametrize("length", [23, 24, 25])
@pytest.mark.parametrize("prefill", [None, 8])
def test_a_prompt_that_is_folded_at_once_is_still_found_by_the_next(length, prefill):
    """The pages that the first fold gives back are whole and unevicted: a prompt that ends at the fold is no less a
    prefix than one that ends a token later."""
    options = {"kv_eviction": "recency", "kv_budget": 16, "kv_buffer": 8, "kv_prefill_buffer": prefill}
    engine = tiny_engine(**options)
    first, second = (run(engine, [prompt_of(length)], [greedy(20)])[0] for _ in range(2))
    # 20 tokens where the first fold, at 24, needs the query of one before it at least; at 32 it is far away
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == (24 if length == 25 and not prefill else 20)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_case_c6_a_thousand_short_requests_with_aborts_leave_nothing_behind():
    rng = random.Random(0)
    engine = tiny_engine(
        kv_eviction="snapkv", kv_budget=8, num_pages=60, max_num_seqs=16, kv_window_slots=3, max_num_batched_tokens=128
    )
    live: list[str] = []
    finished = 0
    for i in range(1000):
        prompt = TRUNK[: rng.randrange(1, 20)] + prompt_of(rng.randrange(1, 6), rng.randrange(30))
        engine.add(Request(str(i), tuple(prompt), SamplingParams(max_tokens=rng.randrange(1, 9), seed=i)))
        live.append(str(i))
        if rng.random() < 0.4:
            victim = rng.choice(live)
            engine.abort(victim)
            live.remove(victim)
        if len(live) > 20 or rng.random() < 0.1:
            done = [output.request_id for output in engine.step() if output.finished]
            live = [id for id in live if id not in done]
            finished += len(done)
        if i % 50 == 0:
            engine.manager.check()
    finished += len(drain(engine))
    assert finished > 400
    assert_drained(engine)
    engine.manager.forget_all()
    assert all(pool.num_free == pool.num_pages - 1 for pool in engine.manager.pools)


@pytest.mark.parametrize("when", ["always", "pressure"])
def test_a_prompt_larger_than_the_pool_is_folded_while_it_is_read(when):
    """In pressure mode, too, and the others run on behind it."""
    options = {"kv_eviction": "snapkv", "kv_buffer": 8, "kv_prefill_buffer": 8}
    engine = tiny_engine(num_pages=16, kv_evict_when=when, **options)
    outputs = run(engine, [prompt_of(200), prompt_of(9)], [greedy(30), greedy(9)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 9]
    assert outputs[0].outputs[0].token_ids == alone(prompt_of(200), greedy(30), **options).outputs[0].token_ids
    assert_drained(engine)


@pytest.mark.parametrize("num_pages", range(8, 30))
def test_a_request_under_pressure_ends_in_any_pool_that_may_hold_it(num_pages):
    """Alone, it is its own pressure: when it was asked to fold too late, it starts again."""
    options = {"kv_eviction": "recency", "kv_evict_when": "pressure", "kv_buffer": 12, "kv_lag": 3}
    engine = tiny_engine(num_pages=num_pages, **options)
    try:
        engine.add(Request("a", tuple(prompt_of(18)), greedy(60)))
    except InputError:
        assert num_pages < 11
        return
    assert len(drain(engine)["a"].outputs[0].token_ids) == 60
    assert_drained(engine)


@pytest.mark.parametrize("lag", [0, 1])
def test_cooled_requests_that_fill_the_cold_tier_end_without_a_host_to_swap_to(lag):
    """They are started again, and cooled again at the same tokens."""
    options = {"kv_cold_format": "int4", "kv_cold_after": 4, "kv_lag": lag}
    prompts = [prompt_of(9, seed) for seed in range(4)]
    engine = tiny_engine(num_pages=18, kv_swap_bytes=0, **options)
    outputs = run(engine, prompts, [greedy(50)] * 4)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == alone(prompt, greedy(50), **options).outputs[0].token_ids
    assert engine.scheduler.stats.tokens_lost > 0
    assert_drained(engine)

"""Turns of a chat: a request resumes from what an earlier one left, and its tokens follow from that alone."""

import random
import time

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pagefold.core.types import FinishReason, InputError
from pagefold.engine.sequence import Sequence
from pagefold.kv.bounds import peak_pages
from pagefold.kv.state import KVState
from tests.unit.kvsim import fold_policy
from tests.unit.test_scheduler import SIZE, World, assert_right, policies, trunk_of

POLICY = fold_policy(SIZE, [3])


def said(seq: Sequence) -> list[int]:
    return [*seq.request.prompt, *seq.output]


def chat(world: World, turns: int, first=30, policy=POLICY, seed=0, max_tokens=14) -> list[Sequence]:
    """One conversation, turn after turn, each alone in the world."""
    draw = random.Random(seed)
    new = lambda count: [draw.randrange(50) for _ in range(count)]  # noqa: E731
    seqs = [world.add(new(first), policy, max_tokens, keeps=True)]
    world.run()
    for _ in range(turns - 1):
        seqs.append(world.add(said(seqs[-1]) + new(9), policy, max_tokens, keeps=True))
        world.run()
    return seqs


@settings(max_examples=200)
@given(st.data())
def test_a_resumed_turn_says_what_an_uninterrupted_request_would(data):
    """Any policies, pools and chunks; branches, cut ends, aborts, preemptions, trunks in host memory or gone."""
    groups, tiers = data.draw(st.sampled_from([1, 1, 3])), data.draw(st.sampled_from([1, 1, 2]))
    world = World(
        groups=groups,
        tiers=tiers,
        pages=data.draw(st.integers(17, 40)) * groups,
        max_tokens=data.draw(st.sampled_from([1, 5, 16, 64])),
        seqs=data.draw(st.integers(1, 5)),
        windows=data.draw(st.integers(1, 3)),
        host=data.draw(st.sampled_from([1, 60])),
        kept=data.draw(st.sampled_from([0, 20, 90])) * groups,
        prefix=data.draw(st.booleans()),
        preemption=data.draw(st.sampled_from(["recompute", "swap"])),
        ahead=data.draw(st.booleans()),
        unsound=data.draw(st.sampled_from([None, None, 7])),
    )
    shapes = [data.draw(policies(groups, tiers, pressure=False)) for _ in range(2)]
    ended: list[Sequence] = []
    for _ in range(data.draw(st.integers(2, 5))):
        seqs = []
        for _ in range(data.draw(st.integers(1, 3))):
            before = data.draw(st.sampled_from([None, *ended[-2:], *ended[-2:]]))
            history = said(before) if before else []
            history = history[: len(history) - data.draw(st.sampled_from([0, 0, 0, 1, 3, 8]))]
            draw = random.Random(data.draw(st.integers(0, 3)))
            length = data.draw(st.integers(1, 9) if before else st.integers(12, 44))
            prompt = history + [draw.randrange(50) for _ in range(length)]
            policy = before.policy if before else data.draw(st.sampled_from(shapes))
            options = {"stop": data.draw(st.sampled_from([(), (3, 11)]))}
            options |= {"keeps": data.draw(st.sampled_from([True, True, True, False]))}
            try:
                seqs.append(world.add(prompt, policy, data.draw(st.integers(1, 20)), **options))
            except InputError:
                continue
        for blow in data.draw(st.lists(st.sampled_from(["", "preempt", "abort"]), max_size=8)):
            if not world.step():
                break
            running = list(world.scheduler.running)
            if blow == "abort" and running:
                world.scheduler.finish(running[-1], FinishReason.ABORT)
            elif blow == "preempt":
                for seq in filter(world.scheduler.can_preempt, running):
                    world.scheduler.preempt(seq)
            world.check()
        world.run()
        if data.draw(st.booleans()):  # others need the pool
            for tier, pool in enumerate(world.manager.pools):
                world.manager.trunks.make_room(tier, pool.num_pages - 1)
            world.check()
        whole = [seq for seq in seqs if seq.finish_reason is not FinishReason.ABORT or seq.error]
        for seq in whole:
            if trunk := trunk_of(seq):
                event(f"resumed, the trunk is in {'host memory' if trunk.on_host else 'the pool'}")
            assert_right(seq, world.runner.unsound, world.start_of(seq))
        ended += [seq for seq in whole if not seq.error]
    world.manager.forget_all()
    assert all(pool.num_free == pool.num_pages - 1 for pool in [*world.manager.pools, *world.manager.host_pools])


def num_cached(seq: Sequence) -> int:
    assert seq.num_cached is not None
    return seq.num_cached


def test_each_turn_computes_its_own_tokens_and_little_else():
    """Case: a history far beyond the budget. What is computed again is at most the window before the next event."""
    world = World(pages=80)
    first, *later = chat(world, turns=5, first=60)
    assert num_cached(first) == 0
    for before, seq in zip([first, *later], later):
        stored = len(said(before)) - 1
        assert stored - POLICY.window - SIZE < num_cached(seq) <= stored
        assert (seq.kv.rows <= POLICY.budget + POLICY.period).all()  # later turns fold again, generated text too
        assert seq.kv.evicted[0] > before.kv.evicted[0]
        assert_right(seq, start=world.start_of(seq))
    assert world.scheduler.stats.resumed == 4


def test_a_turn_that_is_not_to_be_kept_leaves_nothing_and_finds_nothing():
    world = World(pages=80, prefix=False)
    (first,) = chat(world, turns=1)
    prompt = [*said(first), 1, 2, 3]
    for options in ({"keeps": False}, {"keeps": True, "prompt_logprobs": 0}):
        seq = world.add(prompt, POLICY, 5, **options)
        world.run()
        assert seq.num_cached == 0
        assert_right(seq)
    num_trunks = len(world.manager.trunks)
    world.add([7] * 40, POLICY, 5)
    world.run()
    assert len(world.manager.trunks) == num_trunks


def test_another_policy_or_salt_finds_nothing():
    world = World(pages=80, prefix=False)
    (first,) = chat(world, turns=1)
    prompt = [*said(first), 1, 2, 3]
    other = world.add(prompt, fold_policy(SIZE, [4]), 5, keeps=True)
    world.run()
    assert other.num_cached == 0
    find = world.manager.trunks.find
    assert find(("", POLICY.ask), prompt) and not find(("secret", POLICY.ask), prompt)


def test_branches_share_their_trunk_and_never_write_it():
    """Two answers to one history at once: the second holds the very pages the first does, but for its open one."""
    world = World(pages=120)
    (first,) = chat(world, turns=1, max_tokens=15)  # the last page stays open
    trunk = next(iter(world.manager.trunks))
    branches = [world.add([*said(first), *tail], POLICY, 20, keeps=True) for tail in ([1, 2], [3, 4], [1, 2, 5])]
    shared = 0
    while world.step():
        shared = max(shared, int(world.manager.pools[0].refs.max()))
    assert shared == 3 and all(seq.state and seq.state.trunk is trunk for seq in branches)
    for seq in branches:
        assert_right(seq, start=world.start_of(seq))
    again = world.add([*said(first), 9], POLICY, 20, keeps=True)
    world.run()
    assert_right(again, start=world.start_of(again))
    assert again.kv.trunk is trunk


def test_a_cut_turn_leaves_the_kept_one_as_it_was():
    world = World(pages=60)
    (first,) = chat(world, turns=1)
    trunk = next(iter(world.manager.trunks))
    for steps in (1, 2, 6):
        cut = world.add([*said(first), 1, 2, 3], POLICY, 40, keeps=True)
        for _ in range(steps):
            world.step()
        world.scheduler.finish(cut, FinishReason.ABORT)
        world.run()
        assert list(world.manager.trunks) == [trunk]
    whole = world.add([*said(first), 1, 2, 3], POLICY, 40, keeps=True)
    world.run()
    assert whole.kv.trunk is trunk
    assert_right(whole, start=world.start_of(whole))


def test_what_was_stored_since_the_last_fold_can_be_cut_off():
    """A client that leaves the answer's end out (a stop string, a mark of the template) still resumes."""
    world = World(pages=80, prefix=False)
    policy = fold_policy(SIZE, [3], period_pages=3)
    seq = world.add(list(range(25)), policy, 22, keeps=True)
    world.run()
    assert seq.kv.fixed == 36 and seq.kv.num_tokens == 46
    for length, resumes in ((44, True), (37, True), (36, False)):  # one token must be left to compute
        prompt = said(seq)[:length]
        cut = world.add([*prompt, 49] if length == 44 else prompt, policy, 3, keeps=True)
        world.run()
        assert (cut.kv.trunk is not None) == resumes
        assert_right(cut, start=world.start_of(cut))


def test_exact_pages_win_where_they_are_as_many():
    world = World(pages=200)
    (first,) = chat(world, turns=1)
    prompt = [*said(first), *range(20)]
    exact = world.add(prompt, fold_policy(SIZE, [3], scorer=None), 2)
    world.run()
    seq = world.add(prompt, POLICY, 5, keeps=True)
    world.run()
    assert exact.num_cached is not None and seq.kv.trunk is None
    assert num_cached(seq) >= len(said(first)) - POLICY.window
    assert_right(seq)


# ---- memory


def test_trunks_give_way_before_anybody_waits_or_is_preempted():
    """A pool full of trunks serves as many requests at once as an empty one."""
    peaks = []
    for chats in (0, 6):
        world = World(pages=61, seqs=20, windows=8, prefix=False)
        for seed in range(chats):
            chat(world, turns=1, seed=seed)
        world.scheduler.stats.peak_running = 0
        for i in range(12):
            world.add([i] * 9, POLICY, 30)
        world.run()
        peaks.append(world.scheduler.stats.peak_running)
        assert world.scheduler.stats.preemptions == 0
    assert peaks[0] == peaks[1] > 5


def test_the_least_recently_used_goes_first_and_a_followed_turn_before_all():
    world = World(pages=200, prefix=False)
    old, new = (chat(world, turns=1, seed=seed)[0] for seed in (1, 2))
    followed = chat(world, turns=2, seed=3)[0].request.prompt  # its trunk, that is
    history = lambda: [trunk.tokens[:30] for trunk in world.manager.trunks]  # noqa: E731
    assert history() == [followed, old.request.prompt, new.request.prompt, followed]
    for tail in (1, 2):  # with the second it has branches
        world.add([*said(old), tail], POLICY, 1, keeps=True)
    world.run()
    assert history()[:3] == [followed, new.request.prompt, followed]
    pool = world.manager.pools[0]
    for left in range(len(history()) - 1, -1, -1):
        world.manager.trunks.make_room(0, pool.num_free + 1)
        assert len(history()) == left
        world.check()
    assert pool.num_free == pool.num_pages - 1


def test_chats_that_overflow_the_pool_go_on_from_host_memory():
    """Four conversations by turns in a pool that holds two trunks: with host memory nothing is computed twice."""
    cached, policy = {}, fold_policy(SIZE, [3], prefill_pages=2)
    for kept in (0, 60):
        world = World(pages=12, prefix=False, kept=kept, host=1)
        chats = [chat(world, turns=1, policy=policy, seed=seed) for seed in range(4)]
        for turn in range(2):
            for talk in chats:
                talk.append(world.add([*said(talk[-1]), turn, 5, 6], policy, 14, keeps=True))
                world.run()
                assert_right(talk[-1], start=world.start_of(talk[-1]))
        cached[kept] = sum(num_cached(seq) for talk in chats for seq in talk)
        assert all(seq.kv.trunk for talk in chats for seq in talk[1:]) == bool(kept)
    assert cached[60] > 300 > cached[0]


def test_a_preempted_request_gets_the_host_memory_that_trunks_have():
    world = World(pages=40, prefix=False, kept=12, host=1)
    for seed in range(6):
        chat(world, turns=1, seed=seed)
    world.manager.trunks.make_room(0, 39)
    assert world.manager.host_pools[0].num_idle > 0
    seq = world.add([1] * 30, POLICY, 30)
    while not (seq.state and seq.kv.folded and world.scheduler.can_preempt(seq)):
        world.step()
    world.scheduler.preempt(seq)
    world.run()
    assert world.scheduler.stats.swaps == 1
    assert_right(seq)


@pytest.mark.parametrize("pages", [16, 17, 20, 33])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_far_beyond_the_pool_is_served_in_its_folded_peak(pages, lag):
    """Tangram P9, P10 and P13: what is reserved at admission is what a prompt needs at most, in all chunkings, and so
    with a prefix hit and when it resumes."""
    policy, outputs = fold_policy(SIZE, [3], prefill_pages=4, lag=lag), set()
    draw = random.Random(5)
    prompt = [draw.randrange(50) for _ in range(300)]
    for max_tokens in (1, 3, 16, 64):
        world = World(pages=pages, max_tokens=max_tokens)
        seq = world.add(prompt, policy, 20, keeps=True)
        most = peak_pages(policy, SIZE, len(prompt), seq.last)[0]
        assert most == 3 + 4 + (lag > 0)
        twin = world.add(prompt, policy, 20)
        world.run()
        again = world.add([*said(seq), *prompt[:90]], policy, 20, keeps=True)
        world.run()
        assert again.kv.trunk and num_cached(again) > 300
        assert twin.output == seq.output and num_cached(twin) in (0, 12)
        for one in (seq, twin, again):
            assert one.kv.peak_held[0] <= most
            assert_right(one, start=world.start_of(one))
        assert world.scheduler.stats.preemptions == 0
        outputs.add((*seq.output, *again.output))
    assert len(outputs) == 1


def test_a_group_owns_what_its_rows_need_and_no_turn_holds_more_than_was_reserved():
    """Tangram P5, P6, P12 and P25, uneven budgets, after every step of every turn (`World.check` counts the pages)."""
    policy = fold_policy(SIZE, [2, 4, 8], prefill_pages=2)
    world = World(groups=3, pages=200)
    for seq in chat(world, turns=4, first=70, policy=policy):
        start = seq.kv.trunk.counts if seq.kv.trunk else None
        most = peak_pages(policy, SIZE, seq.prompt_len, seq.last, start)[0]
        assert seq.kv.peak_held[0] <= most <= sum((8 + 16 + 32) // SIZE + 2 for _ in range(3))
        assert_right(seq, start=world.start_of(seq))


def test_looking_for_a_trunk_is_exact_and_cheap():
    """64 histories of 20,000 tokens that begin alike: far below a millisecond, whether there is a trunk or not."""
    world, size = World(groups=1, pages=70), SIZE
    trunks, draw = world.manager.trunks, np.random.default_rng(0)
    trunk, tails = draw.integers(0, 150_000, 10_000).tolist(), draw.integers(0, 150_000, (64, 10_000)).tolist()
    for page, tail in enumerate(tails, 1):
        kv = KVState(POLICY, size, 1, 30_000, 0, 0)
        kv.evicted, kv.fixed = np.array([20_000 - size], np.int32), 20_000 - size
        kv.pages[0, 0] = page
        trunks.keep(kv, trunk + tail, "")
    root = ("", POLICY.ask)
    hit, near = trunk + tails[40] + [1, 2], [*trunk, *tails[40][:-5], 1, 2, 3, 4, 5, 6]
    took = []
    for _ in range(5):
        start = time.perf_counter()
        found, missed = trunks.find(root, hit), trunks.find(root, near)
        took.append((time.perf_counter() - start) / 2)
        assert found is not None and found[1] == 20_000 and missed is None
    assert min(took) < 1e-3


@pytest.mark.parametrize(("max_tokens", "folds_again"), [(200, True), (4, False)])
def test_pressure_mode_resumes_and_folds_again_only_when_memory_is_short(max_tokens, folds_again):
    policy, world = fold_policy(SIZE, [3], under_pressure=True), World(pages=32, prefix=False)
    first = world.add(list(range(30)), policy, 60, keeps=True)
    world.add([9] * 40, policy, 60)
    world.run()
    assert first.kv.folded, "the pool is too small for both"
    second = world.add([*said(first), 1, 2, 3], policy, max_tokens, keeps=True)
    world.run()
    assert second.kv.trunk is not None and num_cached(second) == first.kv.num_tokens
    assert len(second.output) == max_tokens
    assert (second.kv.num_compactions > first.kv.num_compactions) == folds_again

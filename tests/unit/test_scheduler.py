"""Whatever is shared, chunked, preempted, swapped or aborted around it, a request's tokens depend on itself alone."""

import math
import random
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.core.config import SchedulerConfig
from pagefold.core.types import FinishReason, InputError, Request, StepPlan, window_lead
from pagefold.engine.scheduler import Scheduler
from pagefold.engine.sequence import Sequence, Status
from pagefold.kv.bounds import KVGeometry, check_fits
from pagefold.kv.manager import KVManager
from pagefold.kv.state import COLD, HOT, FoldPolicy, KVState
from pagefold.kv.timeline import fits_in_time
from pagefold.kv.trunks import Trunk
from tests.unit.kvsim import Rows, SimRunner, expected_output, fold_policy, greedy, rows_at

SIZE = 4


class World:
    """A scheduler, its memory and a simulated worker, with checks after every step.

    ahead     plan a step before the one before it is executed, as the engine does with `plan_ahead`
    unsound   where this token would be drawn, the logits are not finite
    kept      host pages that trunks may take
    """

    def __init__(
        self,
        groups=1,
        pages=60,
        tiers=1,
        max_tokens=16,
        seqs=6,
        windows=2,
        host=400,
        prefix=True,
        preemption="recompute",
        lending="just-in-time",
        ahead=False,
        unsound=None,
        failing=frozenset(),
        kept=0,
        stride=1,
    ):
        sizes = (pages,) * tiers, (host + kept,) * tiers, (1,) * tiers
        geometry = KVGeometry(*sizes, groups, SIZE, seqs, windows, (kept,) * tiers)
        self.manager = KVManager(geometry, prefix)
        self.scheduler = Scheduler(
            SchedulerConfig(seqs, max_tokens, kv_window_lending=lending, preemption=preemption), self.manager
        )
        self.policies: dict[str, FoldPolicy] = {}
        self.runner = SimRunner(geometry, self.policies, unsound, failing, stride)
        self.ahead = ahead
        self.in_flight: deque[tuple[StepPlan, list[np.ndarray]]] = deque()
        self.arrivals = count()
        self.origins: dict[Trunk, KVState] = {}  # whose rows a trunk has
        self.manager.trunks.keep = self._note_origin(self.manager.trunks.keep)

    def _note_origin(self, keep: Callable) -> Callable:
        def noted(kv: KVState, tokens: list[int], salt: str) -> None:
            before = set(self.manager.trunks)
            keep(kv, tokens, salt)
            self.origins |= dict.fromkeys(set(self.manager.trunks) - before, kv)

        return noted

    def start_of(self, seq: Sequence) -> Rows | None:
        """The rows that a sequence resumed from, computed all over again from the turns that led to them."""
        trunk = trunk_of(seq)
        return self._rows_of(trunk) if trunk else None

    def _rows_of(self, trunk: Trunk) -> Rows:
        kv = self.origins[trunk]
        start = self._rows_of(kv.trunk) if kv.trunk else None
        return rows_at(list(trunk.tokens), kv.fixed, kv.policy, SIZE, kv.prompt_len, kv.last, start)

    def add(
        self, prompt: list[int], policy: FoldPolicy, max_tokens: int, priority=0, stop=(), keeps=False, **options
    ) -> Sequence:
        check_fits(self.manager.geometry, policy, len(prompt), len(prompt) + max_tokens - 1)
        if policy.scorer:
            self.policies[policy.scorer] = policy
        n = next(self.arrivals)
        request = Request(str(n), tuple(prompt), greedy(max_tokens, stop_token_ids=stop, **options), priority)
        seq = Sequence(request, policy, n, 0, frozenset(stop), (), max_tokens, keeps_turn=keeps)
        self.scheduler.add(seq)
        return seq

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
            self.in_flight.append((plan, self.runner.free_pages(self.manager)))
        self.check()
        if not self.in_flight:
            return False
        if plan is None or not self.ahead or len(self.in_flight) > 1:
            self.scheduler.update(self.runner.execute(*self.in_flight.popleft()))
            self.check()
        return True

    def check(self) -> None:
        self.manager.check()
        assert_totals(self.manager)

    def run(self, limit=5000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("no progress")
        self.assert_empty()

    def assert_empty(self) -> None:
        assert all(pool.num_held == 0 for pool in self.manager.pools), "pages leaked"
        assert all(pool.num_held == 0 for pool in self.manager.host_pools), "host pages leaked"
        assert self.manager.num_windows_free == self.manager.geometry.window_slots, "windows leaked"
        assert not self.manager.live


def trunk_of(seq: Sequence) -> Trunk | None:
    """What a sequence that ended had resumed from."""
    kv = seq.state or seq.dropped  # preempted while its last token was being drawn
    return kv.trunk if kv else None


def assert_totals(manager: KVManager) -> None:
    """What the ledger keeps up to date is what counting all over again gives."""
    ledger, live = manager.ledger, manager.live
    folding = [kv for kv in live if any(kv.copies)]
    expected = sum((Fraction(kv.policy.lag + 1, kv.policy.period) for kv in folding), Fraction(0))
    jobs = min(1 + math.ceil(Fraction(3, 2) * expected), len(folding))
    for tier in (HOT, COLD):
        flying = {kv: len(kv.ticket.dst) if kv.ticket and kv.ticket.dst_tier == tier else 0 for kv in live}
        taken = {kv: kv.held[tier] + (flying[kv] if tier == COLD else 0) for kv in live}
        assert ledger.flying[tier] == sum(flying.values())
        assert ledger.promised[tier] == sum(max(0, kv.reserve[tier] - taken[kv]) for kv in live if kv.reserved)
        assert ledger.spare()[tier] == jobs * max((kv.copies[tier] for kv in folding), default=0)
    for kv in live:
        cold = int(kv.cold.sum())
        assert kv.held == [int(kv.num_pages.sum()) - cold, cold]
        event = kv.next_event()
        assert kv.upcoming()[0] == event and kv.quiet_until <= int(kv.num_pages[0] * SIZE + kv.evicted[0])
        assert event is None or kv.quiet_until < event


def assert_right(seq: Sequence, unsound: int | None = None, start: Rows | None = None) -> None:
    whole = expected_output(list(seq.request.prompt), seq.policy, SIZE, seq.max_tokens, start)
    ends = [i for i, token in enumerate(whole) if token in seq.stop_ids or token == unsound]
    error = bool(ends) and whole[ends[0]] == unsound
    assert seq.output == (whole[: ends[0] + (not error)] if ends else whole)
    assert (seq.error is not None) == error
    if seq.request.sampling.prompt_logprobs is not None:
        assert [entry.ids[0] for entry in seq.prompt_logprobs] == list(seq.request.prompt[1:])


@st.composite
def policies(draw, groups: int, tiers: int, pressure: bool, stride: int = 1):
    scorer = draw(st.sampled_from(["win", "plain", None]))
    period = draw(st.integers(1, 3))
    window = draw(st.integers(1, min(4, (period * SIZE - 1) // stride + 1)))
    return fold_policy(
        SIZE,
        [draw(st.integers(2, 4)) for _ in range(groups)],
        scorer=scorer,
        period_pages=period,
        prefill_pages=draw(st.sampled_from([None, period, 2 * period])),
        window=window,
        lag=draw(st.integers(0, period * SIZE - window_lead(window, stride))) % (period * SIZE),
        cold_after=draw(st.integers(0, 12)) if tiers == 2 else None,
        under_pressure=pressure and draw(st.booleans()),
        stride=stride,
    )


@settings(max_examples=250)
@given(st.data())
def test_output_depends_on_the_request_alone(data):
    """Any policies, chunk sizes, pools, priorities, shared prefixes, forced preemptions: the same tokens."""
    groups = data.draw(st.sampled_from([1, 1, 3]))
    tiers = data.draw(st.sampled_from([1, 1, 2]))
    stride = data.draw(st.sampled_from([1, 1, 2, 3]))
    world = World(
        groups=groups,
        tiers=tiers,
        stride=stride,
        pages=data.draw(st.integers(24, 70)) * groups,
        max_tokens=data.draw(st.sampled_from([1, 3, 7, 16, 64])),
        seqs=data.draw(st.integers(1, 6)),
        windows=data.draw(st.integers(1, 3)),
        host=data.draw(st.sampled_from([1, 400])),
        prefix=data.draw(st.booleans()),
        preemption=data.draw(st.sampled_from(["recompute", "swap"])),
        lending=data.draw(st.sampled_from(["just-in-time", "for-life"])),
        ahead=data.draw(st.booleans()),
        unsound=data.draw(st.sampled_from([None, None, 7])),
    )
    trunk = [random.Random(1).randrange(50) for _ in range(40)]
    seqs = []
    for _ in range(data.draw(st.integers(1, 7))):
        shared = data.draw(st.sampled_from([0, 8, 13, 24]))
        prompt = trunk[:shared] + data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=14))
        policy = data.draw(policies(groups, tiers, pressure=False, stride=stride))
        max_tokens, priority = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 1))
        options = {"stop": data.draw(st.sampled_from([(), (), (3, 11)]))}
        options |= {"prompt_logprobs": data.draw(st.sampled_from([None, None, 0]))}
        try:
            seqs.append(world.add(prompt, policy, max_tokens, priority, **options))
        except InputError:
            continue
    forced = data.draw(st.lists(st.sets(st.integers(0, 5)), max_size=20))
    for victims in forced:
        if not world.step():
            break
        running = list(world.scheduler.running)
        for seq in (running[victim] for victim in victims if victim < len(running)):
            if world.scheduler.can_preempt(seq):
                world.scheduler.preempt(seq)
                world.check()
    world.run()
    for seq in seqs:
        assert_right(seq, world.runner.unsound)


@settings(max_examples=150)
@given(st.data())
def test_aborts_leave_nothing_behind_and_hurt_nobody(data):
    """Cancel at any moment, folds in flight included; pressure mode in the mix."""
    groups = data.draw(st.sampled_from([1, 2]))
    world = World(
        groups=groups,
        pages=data.draw(st.integers(26, 50)) * groups,
        max_tokens=data.draw(st.integers(2, 20)),
        ahead=data.draw(st.booleans()),
        stride=(stride := data.draw(st.sampled_from([1, 1, 2, 5]))),
    )
    seqs = []
    for _ in range(data.draw(st.integers(2, 6))):
        prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        policy, keeps = data.draw(policies(groups, 1, pressure=True, stride=stride)), data.draw(st.booleans())
        seqs.append(world.add(prompt, policy, data.draw(st.integers(1, 40)), keeps=keeps))
    aborted = set()
    for victim in data.draw(st.lists(st.integers(0, 12), max_size=30)):
        if victim < len(seqs):
            world.scheduler.finish(seqs[victim], FinishReason.ABORT)
            aborted.add(victim)
            world.check()
        world.step()
    world.run()
    for i, seq in enumerate(seqs):
        if not seq.policy.under_pressure and seq.finish_reason is not FinishReason.ABORT:
            assert_right(seq, start=world.start_of(seq))
        assert seq.status is Status.FINISHED and (i in aborted or len(seq.output) == seq.max_tokens)


@settings(max_examples=80)
@given(st.data())
def test_folds_that_fail_end_their_requests_and_no_other(data):
    """Zipage invariant 23: what they wrote is junk, which nobody else ever reads, nor does a later prompt."""
    groups, tiers = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 1, 2]))
    world = World(
        groups=groups,
        tiers=tiers,
        pages=data.draw(st.integers(30, 70)) * groups,
        max_tokens=data.draw(st.sampled_from([3, 16, 64])),
        preemption=data.draw(st.sampled_from(["recompute", "swap"])),
        ahead=data.draw(st.booleans()),
        failing=frozenset(data.draw(st.sets(st.integers(1, 60), max_size=20))),
        stride=(stride := data.draw(st.sampled_from([1, 1, 2, 5]))),
    )
    trunk, seqs = list(range(30)), []
    for _ in range(data.draw(st.integers(1, 7))):
        prompt = trunk[: data.draw(st.integers(1, 30))] + data.draw(st.lists(st.integers(0, 49), max_size=4))
        seqs.append(
            world.add(
                prompt, data.draw(policies(groups, tiers, pressure=False, stride=stride)), data.draw(st.integers(1, 40))
            )
        )
    for victims in data.draw(st.lists(st.sets(st.integers(0, 5), max_size=2), max_size=20)):
        world.step()
        running = list(world.scheduler.running)
        for seq in (running[victim] for victim in victims if victim < len(running)):
            if world.scheduler.can_preempt(seq):
                world.scheduler.preempt(seq)
    world.run()
    for seq in seqs:
        if seq.error is None:
            assert_right(seq)
        else:
            assert seq.finish_reason is FinishReason.ABORT and seq.policy.evicts | (tiers == 2)
            whole = expected_output(list(seq.request.prompt), seq.policy, SIZE, seq.max_tokens)
            assert seq.output == whole[: len(seq.output)]


def test_a_turn_that_would_end_in_the_step_whose_fold_fails_has_failed():
    """Else what that fold wrote would be kept for the next turn."""
    policy, prompt = fold_policy(SIZE, [3]), list(range(9))
    whole = expected_output(prompt, policy, SIZE, 60)

    def serve(stop: tuple[int, ...]) -> Sequence:
        world = World(pages=100, failing=frozenset(range(60)))
        seq = world.add(prompt, policy, 60, stop=stop, keeps=True)
        world.run()
        assert not (seq.error and list(world.manager.trunks))
        return seq

    last = len(serve(()).output) - 1  # drawn in the step of the fold
    assert 0 < last < 59 and whole[last] not in whole[:last]
    assert serve((whole[last],)).error and not serve((whole[last - 1],)).error


def test_rows_stay_within_budget_period_and_lag():
    """|table| never grows beyond its bound after the first compaction, whatever the output's length."""
    world = World(groups=2, pages=100)
    policy = fold_policy(SIZE, [2, 3], period_pages=2, lag=5)
    seq = world.add(list(range(9)), policy, 300)
    while world.step():
        if seq.state and not seq.finished:
            assert (seq.kv.rows <= policy.budget + policy.period + policy.lag).all()
    assert len(seq.output) == 300
    assert_right(seq)


def test_a_full_pool_of_folding_requests_is_never_preempted():
    """Admission by reservation: what was admitted ends; the others wait their turn."""
    world = World(pages=41, seqs=20, windows=2)
    policy = fold_policy(SIZE, [3])
    seqs = [world.add([i] * (3 + i % 5), policy, 60) for i in range(20)]
    world.run()
    assert world.scheduler.stats.preemptions == 0
    assert world.scheduler.stats.peak_running >= 7
    for seq in seqs:
        assert_right(seq)


def test_requests_begin_early_if_they_find_what_they_grow_into(monkeypatch):
    """Others that end by then make room for them; so the work takes fewer steps, and nobody is preempted."""
    steps = {}
    for early in (True, False):
        if not early:
            monkeypatch.setattr("pagefold.kv.manager.fits_in_time", lambda *_: False)
        world = World(pages=200, seqs=20, windows=4)
        policy = fold_policy(SIZE, [20], period_pages=4)
        seqs = [world.add([i] * 3, policy, 120 + 10 * (i * 7 % 10)) for i in range(12)]
        began = 0
        while world.step():
            began += bool(world.manager.early)
        world.assert_empty()
        assert world.scheduler.stats.preemptions == 0
        assert bool(began) == early
        for seq in seqs:
            assert_right(seq)
        steps[early] = world.scheduler.stats.steps
    assert steps[True] < 0.92 * steps[False]


@given(st.data())
def test_a_request_that_ends_sooner_or_waits_does_no_harm_to_early_ones(data):
    """Stop tokens end some before their time, few windows keep some waiting: every answer is right, nothing leaks."""
    world = World(pages=data.draw(st.integers(40, 70)), seqs=10, windows=data.draw(st.integers(1, 3)))
    policy = fold_policy(SIZE, [data.draw(st.integers(4, 8))], lag=data.draw(st.integers(0, 1)))
    seqs = []
    for i in range(10):
        stop = (data.draw(st.integers(0, 30)),) if data.draw(st.booleans()) else ()
        seqs.append(world.add([i] * data.draw(st.integers(1, 9)), policy, data.draw(st.integers(1, 80)), stop=stop))
        for _ in range(data.draw(st.integers(0, 6))):
            world.step()
    world.run()
    for seq in seqs:
        assert_right(seq)


@pytest.mark.parametrize("lending", ["just-in-time", "for-life"])
def test_windows_lent_for_life_bound_who_runs(lending):
    """Zipage invariant 20: constrained, nobody is preempted. Requests that need no window join all the same."""
    world = World(pages=200, seqs=20, windows=2, max_tokens=64, prefix=False, lending=lending)
    seqs = [world.add([i] * (3 + i % 5), fold_policy(SIZE, [3]), 60) for i in range(6)]
    seqs.append(world.add([9] * 4, fold_policy(SIZE, [3], scorer="plain"), 60, priority=-1))
    most = 0
    while world.step():
        most = max(most, len(world.scheduler.running))
    world.assert_empty()
    assert world.scheduler.stats.preemptions == 0
    assert most == {"just-in-time": 7, "for-life": 3}[lending]
    for seq in seqs:
        assert_right(seq)


def test_a_prompt_that_is_wholly_cached_recomputes_its_last_token():
    """Case 43: a prompt of whole pages, twice; no shared page is written, and the hit is exact."""
    world = World()
    policy = fold_policy(SIZE, [9], scorer=None)
    first = world.add(list(range(16)), policy, 5)
    world.run()
    second = world.add(list(range(16)), policy, 5)
    world.run()
    assert second.output == first.output and second.num_cached == 12


def test_siblings_fold_on_their_own_and_the_shared_prefix_stays_pristine():
    """Case C3 and the reference's crash: nested and identical page-aligned prompts, all of whose pages are shared."""
    world = World(pages=120, seqs=8, windows=8)
    policy = fold_policy(SIZE, [3])
    trunk = list(range(24))
    seqs = [world.add(trunk, policy, 30)]
    for _ in range(3):
        world.step()
    seqs += [
        world.add(trunk, policy, 30),
        world.add(trunk + [1, 2, 3, 4], policy, 30),
        world.add(trunk[:16], policy, 30),
    ]
    world.run()
    late = world.add(trunk, fold_policy(SIZE, [3], scorer=None), 10)
    world.run()
    assert late.num_cached > 0
    for seq in [*seqs, late]:
        assert_right(seq)
    assert all(seq.num_cached > 0 for seq in seqs[1:3])


def test_preemption_under_load_gives_the_tokens_of_an_unloaded_run():
    """Cases 44 and 47: three times more requests than the pages allow, one shared prefix; resumes are no hits."""
    world = World(pages=26, seqs=12, max_tokens=32)
    policy = fold_policy(SIZE, [1], scorer=None)
    seqs = [world.add(list(range(8)) + [i], policy, 40) for i in range(6)]
    world.run()
    assert world.scheduler.stats.preemptions > 0
    for seq in seqs:
        assert_right(seq)
        assert seq.num_cached in (0, 8)
    assert world.scheduler.stats.prefix_hits == sum(seq.num_cached for seq in seqs)


def test_nobody_is_preempted_for_pages_that_a_result_in_flight_will_free():
    world = World(pages=15, prefix=False, ahead=True)
    policy = fold_policy(SIZE, [1], scorer=None)
    seqs = [
        world.add([i] * length, policy, max_tokens)
        for i, (length, max_tokens) in enumerate([(13, 11), (7, 12), (5, 19)])
    ]
    world.run()
    assert world.scheduler.stats.preemptions == 0
    for seq in seqs:
        assert_right(seq)


def test_pressure_mode_keeps_every_row_while_memory_is_ample():
    world = World(pages=200)
    seq = world.add([1, 2, 3], fold_policy(SIZE, [2], under_pressure=True), 80)
    world.run()
    assert seq.kv.evicted.sum() == 0
    assert seq.output == expected_output([1, 2, 3], fold_policy(SIZE, [2], scorer=None), SIZE, 80)


def test_pressure_mode_folds_the_longest_before_anybody_is_preempted():
    world = World(pages=60, seqs=8, windows=8)
    seqs = [world.add([i, 1, 2], fold_policy(SIZE, [3], under_pressure=True), 120) for i in range(6)]
    world.run()
    assert world.scheduler.stats.folds > 0 and world.scheduler.stats.preemptions == 0
    assert all(len(seq.output) == 120 for seq in seqs)


def test_freed_pages_of_an_uneven_layout_stay_free():
    """Tangram P5 and P8: each group owns ceil(rows / page) pages, after the next tokens too."""
    world = World(groups=3, pages=200)
    policy = fold_policy(SIZE, [2, 4, 8])
    seq = world.add(list(range(40)), policy, 60)
    seen = []
    while world.step():
        if seq.state and not seq.finished and seq.kv.evicted.any():
            seen.append(seq.kv.num_pages.tolist())
    assert all(pages[0] < pages[1] < pages[2] for pages in seen)
    assert max(pages[0] for pages in seen) <= 2 + 1 + 1


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_prompts_around_a_page_boundary(extra, max_tokens):
    """Zipage invariant 22: lengths m*b-1, m*b, m*b+1, and a prompt of exactly the cap."""
    world = World(windows=1)
    seq = world.add(list(range(16 + extra)), fold_policy(SIZE, [3], window=4), max_tokens)
    world.run()
    assert_right(seq)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", range(11, 18))
def test_ends_of_every_kind_around_a_fold(length, ahead):
    """Zipage invariant 22: an end by length, by a stop token and by an abort at every token before, at and after a fold
    at 16 and its window, from 13 on."""
    policy, prompt = fold_policy(SIZE, [3], lag=1), list(range(length))
    whole = expected_output(prompt, policy, SIZE, 12)
    for end in range(1, 10):
        for kind in ("length", "stop", "abort"):
            world = World(windows=1, pages=20, ahead=ahead)
            stop = (whole[end - 1],) if kind == "stop" else ()
            seq = world.add(prompt, policy, end if kind == "length" else 12, stop=stop)
            while not seq.finished and world.step():
                if kind == "abort" and len(seq.output) == end:
                    world.scheduler.finish(seq, FinishReason.ABORT)
            world.run()
            last = whole.index(stop[0]) + 1 if stop else end
            assert seq.output == whole[:last] and seq.error is None


def test_a_request_that_can_never_fit_is_refused_with_the_largest_that_fits():
    world = World(pages=11)
    with pytest.raises(InputError, match=r"prompt: got 50 tokens, the largest that fits is 39.*10 in the pool"):
        world.add([1] * 50, fold_policy(SIZE, [1], scorer=None), 1)
    with pytest.raises(InputError, match=r"max_tokens: got 40, at most 32 fit"):
        world.add([1] * 9, fold_policy(SIZE, [1], scorer=None), 40)
    with pytest.raises(InputError, match="kv_budget"):
        world.add([1] * 9, fold_policy(SIZE, [9]), 400)
    seq = world.add([1] * 9, fold_policy(SIZE, [1], scorer=None), 32)
    world.run()
    assert len(seq.output) == 32


@pytest.mark.parametrize("short", [0, 1])
def test_alone_a_request_begins_early_only_where_its_bound_fits(short):
    """It counts itself among those that grow."""
    kv = World(pages=100).manager._blank(fold_policy(SIZE, [8]), 3, 200)
    kv.reserve, kv.reserved = [0, 0], False
    assert fits_in_time(kv, [], kv.bound[0] - short) == (not short)


def test_who_may_not_begin_early_is_asked_again_after_a_page_of_steps_or_when_somebody_left(monkeypatch):
    asked = []
    monkeypatch.setattr("pagefold.kv.manager.fits_in_time", lambda *_: bool(asked.append(0)))
    world = World(pages=60, seqs=9, windows=4)
    policy = fold_policy(SIZE, [8])
    seqs = [world.add([i] * 3, policy, 60) for i in range(9)]
    world.run()
    assert len(asked) < world.scheduler.stats.steps / 2
    for seq in seqs:
        assert_right(seq)

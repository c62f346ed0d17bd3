"""Turns of a chat: a request resumes from what an earlier one left, and its tokens follow from that alone."""

import random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from pagefold.core.types import FinishReason, InputError
from pagefold.engine.sequence import Sequence
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
        pages=data.draw(st.integers(24, 50)) * groups,
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
    for _ in range(data.draw(st.integers(2, 4))):
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
        whole = [seq for seq in seqs if seq.finish_reason is not FinishReason.ABORT or seq.error]
        for seq in whole:
            if trunk := trunk_of(seq):
                event(f"resumed, the trunk is in {'host memory' if trunk.on_host else 'the pool'}")
            assert_right(seq, world.runner.unsound, world.start_of(seq))
        ended += [seq for seq in whole if not seq.error]
    world.manager.forget_all()
    assert all(pool.num_free == pool.num_pages - 1 for pool in [*world.manager.pools, *world.manager.host_pools])

"""A step is launched before the last one's tokens are read: the host works while the device does. No token differs.

That neighbours, preemptions, pools and aborts change nothing either is tested in `test_invariance`, ahead or not.
"""

import pytest
import torch

from pagefold.core.types import Request, SamplingParams
from pagefold.engine.engine import Engine
from pagefold.engine.outputs import CompletionOutput
from tests.engine.tiny import (
    EOS,
    alone,
    assert_drained,
    drain,
    greedy,
    prompt_of,
    run,
    seeded,
    tiny_engine,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()
LETTERS = TOKENIZER.encode("abcdefgh", add_special_tokens=False)


def ahead(**options) -> Engine:
    return tiny_engine(plan_ahead=True, **options)


def facts(choice: CompletionOutput) -> tuple:
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, choice.kv.tokens


class Watched:
    """A runner that writes down what is asked of it, and may be told to fail: a step whose result fails never ran."""

    def __init__(self, engine: Engine):
        self.runner, self.log, self.plans = engine.runner, [], []
        self.fail_at: tuple[str, int] | None = None
        engine.runner = self  # type: ignore[assignment]

    def note(self, what: str, step: int) -> None:
        self.log.append((what, step))
        if self.fail_at == (what, step):
            raise ZeroDivisionError

    def launch(self, plan) -> "Read":
        self.note("launch", plan.step)
        self.plans.append(plan)
        return Read(self, plan.step, None if self.fail_at == ("read", plan.step) else self.runner.launch(plan))


class Read:
    def __init__(self, watched: Watched, step: int, launched):
        self.watched, self.step, self.launched = watched, step, launched

    def result(self):
        self.watched.note("read", self.step)
        return self.launched.result()


@pytest.mark.parametrize("on", [False, True])
def test_a_step_is_read_after_the_next_one_is_launched_and_nothing_is_computed_for_nothing(on):
    engine = tiny_engine(plan_ahead=on)
    watched = Watched(engine)
    run(engine, [prompt_of(9), prompt_of(5)], [greedy(6), greedy(4)])
    order = [("launch", 1)]
    for step in range(1, 6):
        order += [("launch", step + 1), ("read", step)] if on else [("read", step), ("launch", step + 1)]
    assert watched.log == [*order, ("read", 6)]
    assert sum(plan.num_tokens for plan in watched.plans) == (9 + 5) + (4 + 2) + 4 - 2
    assert all((plan.tokens < 0).sum() == on * len(plan.chunks) for plan in watched.plans[1:])
    assert_drained(engine)


STOPS = {
    "stop id": greedy(30, stop_token_ids=[LETTERS[2]], allowed_token_ids=LETTERS),
    "eos": greedy(30, ignore_eos=False, allowed_token_ids=[*LETTERS, EOS], logit_bias={EOS: 2.0}),
    "stop string": greedy(30, stop=["aa", "cb", "h"], allowed_token_ids=LETTERS),
    "after min_tokens": greedy(30, stop_token_ids=LETTERS[:4], min_tokens=11, allowed_token_ids=LETTERS),
    "both at once": greedy(3, stop=["aa", "bb", "a", "b"], allowed_token_ids=LETTERS[:2]),
    "one token": greedy(1),
    "none": greedy(0, prompt_logprobs=0),
}


@pytest.mark.parametrize("scorer", ["none", "snapkv"])
def test_ends_that_are_found_a_step_late_are_the_ends(scorer):
    params = list(STOPS.values())
    prompts = [prompt_of(9 + i, i) for i in range(len(params))]
    engine = ahead(kv_eviction=scorer)
    for prompt, sampling, output in zip(prompts, params, run(engine, prompts, params), strict=True):
        expected = alone(prompt, sampling, kv_eviction=scorer)
        assert facts(output.outputs[0]) == facts(expected.outputs[0])
        for ours, theirs in zip(output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
            if ours is None or theirs is None:
                assert ours is theirs
            else:
                assert (ours.ids, ours.ranks) == (theirs.ids, theirs.ranks)
                assert ours.logprobs == pytest.approx(theirs.logprobs)
    assert_drained(engine)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"bad_words": ["ab", "ba", "aaa"], "allowed_token_ids": LETTERS[:2]},
        {"min_tokens": 9, "stop_token_ids": LETTERS[:6], "allowed_token_ids": LETTERS},
        {"n": 3, "top_k": 5, "presence_penalty": 1.0},
        {"logprobs": 3, "prompt_logprobs": 2},
    ],
)
def test_draws_that_depend_on_the_token_before_them_know_it(params):
    params = seeded(20, 3, **params)
    (output,) = run(ahead(), [prompt_of(9)], [params])
    expected = alone(prompt_of(9), params)
    assert [facts(choice) for choice in output.outputs] == [facts(choice) for choice in expected.outputs]
    assert [choice.logprobs for choice in output.outputs] == [choice.logprobs for choice in expected.outputs]
    assert output.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("scorer", ["none", "recency", "snapkv"])
def test_the_next_turn_finds_as_much_of_the_last_one_as_without(scorer, lag):
    """A page is a prefix once the ids of its tokens are known; pages that a fold gives back are told of before."""
    options = {"kv_eviction": scorer, "kv_budget": 16, "kv_buffer": 8, "kv_lag": lag}
    cached = {}
    for on in (False, True):
        engine = tiny_engine(plan_ahead=on, **options)
        turns, cached[on] = prompt_of(24), []
        for i in range(3):
            output = run(engine, [turns], [greedy(5)])[0]
            cached[on].append(output.num_cached_tokens)
            turns = turns + output.outputs[0].token_ids + prompt_of(3, i)[1:]
        assert_drained(engine)
    assert cached[True] == cached[False] and cached[True][1] >= 16


@pytest.mark.parametrize("what", ["launch", "read"])
@pytest.mark.parametrize("step", range(1, 6))
def test_a_step_that_fails_ends_every_request_and_leaves_a_working_engine(what, step):
    """The prompt is folded in its last chunk: its pages are told of, and given back, before the step's result is read.
    They may not be found once it failed."""
    options = {"kv_eviction": "recency", "kv_budget": 16, "kv_buffer": 8}
    engine = ahead(max_num_batched_tokens=16, **options)
    watched = Watched(engine)
    watched.fail_at = what, step
    prompts = [prompt_of(40), prompt_of(9, 1)]
    with pytest.raises(ZeroDivisionError):
        run(engine, prompts, [greedy(9)] * 2)
    assert_drained(engine)
    watched.fail_at = None
    outputs = run(engine, prompts, [greedy(9)] * 2)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert facts(output.outputs[0]) == facts(alone(prompt, greedy(9), **options).outputs[0])
    assert_drained(engine)


def test_logits_that_are_not_finite_end_their_request_although_it_went_on():
    engine = ahead()
    engine.add(Request("bad", tuple(prompt_of(9)), greedy(8)))
    engine.add(Request("good", tuple(prompt_of(9, 1)), greedy(8)))
    engine.step()
    bad = next(seq for seq in engine.scheduler.running if seq.request.id == "bad")
    engine.runner.kv.tiers[0].poison(torch.tensor(bad.kv.pages[0, :1].tolist()))
    done = drain(engine)
    (choice,) = done["bad"].outputs
    assert choice.finish_reason == "abort" and "finite" in (choice.error or "")
    expected = alone(prompt_of(9), greedy(8)).outputs[0].token_ids
    assert choice.token_ids == expected[: len(choice.token_ids)] and len(choice.token_ids) < 8
    assert facts(done["good"].outputs[0]) == facts(alone(prompt_of(9, 1), greedy(8)).outputs[0])
    assert_drained(engine)


def test_a_request_that_takes_the_slot_of_one_aborted_in_flight_gets_tokens_of_its_own():
    engine = ahead(max_num_seqs=1)
    for id in ("a", "b"):
        engine.add(Request(id, tuple(prompt_of(9, ord(id))), greedy(8)))
    engine.step()
    engine.step()
    slot = engine.scheduler.running[0].kv.slot
    engine.abort("a")
    outputs = engine.step()  # plans b, and reads what a drew
    assert outputs == [] and engine.scheduler.running[0].kv.slot == slot
    done = drain(engine)
    assert set(done) == {"b"}
    assert facts(done["b"].outputs[0]) == facts(alone(prompt_of(9, ord("b")), greedy(8)).outputs[0])
    assert_drained(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("after", range(1, 8))
def test_a_request_preempted_in_flight_loses_nothing(after, preemption):
    """Neither the token that it was drawing nor the log-probabilities of its prompt. Two change places in the slots."""
    params = [greedy(4, prompt_logprobs=0, logprobs=0), greedy(1, prompt_logprobs=0, logprobs=0)]
    prompts = [prompt_of(21), prompt_of(14, 1)]
    engine = ahead(max_num_batched_tokens=5, preemption=preemption)
    for i in range(2):
        engine.add(Request(str(i), tuple(prompts[i]), params[i]))
    done = {}
    for _ in range(after):
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for seq in list(engine.scheduler.running):
        engine.scheduler.preempt(seq)
        engine.manager.check()
    done |= drain(engine)
    lines = lambda entries: [entry and entry.logprobs[0] for entry in entries or ()]  # noqa: E731
    for i in range(2):
        got, want = done[str(i)], alone(prompts[i], params[i])
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert lines(got.prompt_logprobs)[1:] == pytest.approx(lines(want.prompt_logprobs)[1:], abs=1e-10)
        assert lines(got.outputs[0].logprobs) == pytest.approx(lines(want.outputs[0].logprobs), abs=1e-10)
    assert_drained(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("after", range(1, 9))
def test_pages_given_up_in_flight_are_no_prefix(after, preemption):
    """Whatever the step in flight filled; another request is at work when its result is read."""
    engine = ahead(max_num_seqs=1, max_num_batched_tokens=5, preemption=preemption)
    engine.add(Request("a", tuple(prompt_of(18)), greedy(9)))
    for _ in range(after):
        engine.step()
    prompts = {"a": prompt_of(18), "urgent": prompt_of(18, 1), "again": prompt_of(18)}
    engine.add(Request("urgent", tuple(prompts["urgent"]), greedy(9), priority=-1))
    engine.add(Request("again", tuple(prompts["again"]), greedy(9)))
    engine.scheduler.preempt(engine.scheduler.running[0])
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.manager.check()
    for id, prompt in prompts.items():
        assert facts(done[id].outputs[0]) == facts(alone(prompt, greedy(9)).outputs[0])
    assert_drained(engine)


def test_a_queue_longer_than_the_pool_is_served_in_order_with_preemptions_and_the_same_tokens():
    prompts = [prompt_of(16) + prompt_of(3 + seed % 3, seed)[1:] for seed in range(9)]
    params = [greedy(22), seeded(22, 1), SamplingParams(temperature=0, max_tokens=22)] * 3
    engine = ahead(num_pages=32, max_num_seqs=9, max_num_batched_tokens=24)
    outputs = run(engine, prompts, params)
    assert engine.scheduler.stats.preemptions > 0
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        assert facts(output.outputs[0]) == facts(alone(prompt, sampling).outputs[0])
    assert_drained(engine)

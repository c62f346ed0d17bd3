"""What a request may not do to the engine or to others, found by reading."""

from dataclasses import replace

import pytest
import torch

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from pagefold.engine.build import build_engine
from pagefold.engine.policy import POLICIES_KEPT
from pagefold.models.weights import load_decoder
from pagefold.runner import runner
from tests.engine.tiny import (
    OPTIONS,
    assert_drained,
    drain,
    greedy,
    prompt_of,
    run,
    tiny_engine,
    tiny_loaded,
    tiny_tensors,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()


def test_a_failed_step_ends_its_requests_and_leaves_a_working_engine_with_an_honest_prefix_cache():
    engine = tiny_engine(page_size=4, max_num_batched_tokens=16)
    prompt = tuple(prompt_of(40))
    alone = tiny_engine(page_size=4)
    alone.add(Request("a", prompt, greedy(5)))
    truth = drain(alone)["a"].outputs[0].token_ids
    engine.add(Request("a", prompt, greedy(5)))
    engine.step()
    launch, engine.runner.launch = engine.runner.launch, lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.launch = launch
    assert not engine.has_work
    assert_drained(engine)
    engine.add(Request("b", prompt, greedy(5)))
    assert drain(engine)["b"].outputs[0].token_ids == truth


@pytest.mark.parametrize("budget", [2**31, 10**400, 2**31 - 1])
def test_a_huge_budget_keeps_every_row(budget):
    engine = tiny_engine(page_size=4, kv_eviction="recency", kv_window=2, kv_budget=16)
    engine.add(Request("a", tuple(prompt_of(30)), SamplingParams(temperature=0, max_tokens=9, kv_budget=budget)))
    assert drain(engine)["a"].kv.rows_evicted == 0


def test_a_huge_pooling_kernel_is_as_wide_as_the_rows():
    engine = tiny_engine(page_size=4, kv_eviction="snapkv:kernel=1000000000000000001", kv_window=2, kv_budget=16)
    engine.add(Request("a", tuple(prompt_of(30)), greedy(20)))
    assert drain(engine)["a"].kv.compactions > 0


@pytest.mark.parametrize("field, value", [("priority", "1"), ("cache_salt", "\ud800"), ("cache_salt", 3)])
def test_odd_fields_of_a_request_are_refused_by_name(field, value):
    engine = tiny_engine()
    with pytest.raises(InputError, match=field):
        engine.add(Request("a", (1, 2, 3), greedy(2), **{field: value}))
    engine.add(Request("b", (1, 2, 3), greedy(2)))
    assert len(drain(engine)["b"].outputs[0].token_ids) == 2


@pytest.mark.parametrize("after, share, lag, pages, prompt", [(0, 0.8, 0, 3, 9), (4, 0.5, 1, 4, 16)])
def test_a_tight_cold_tier_serves_or_refuses(after, share, lag, pages, prompt):
    engine = tiny_engine(
        page_size=4,
        kv_cold_format="fp32",
        kv_cold_after=after,
        kv_cold_share=share,
        kv_lag=lag,
        kv_buffer=8,
        num_pages=pages,
    )
    try:
        engine.add(Request("a", tuple(prompt_of(prompt)), greedy(12)))
    except InputError:
        return
    assert len(drain(engine)["a"].outputs[0].token_ids) == 12


def forced(text: str, **options) -> SamplingParams:
    """Greedy, and nothing but these characters."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return SamplingParams(temperature=0, allowed_token_ids=ids, ignore_eos=True, **options)


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop():
    engine = tiny_engine()
    engine.add(Request("a", (1, 2, 3), forced("x", stop="xxx", max_tokens=3)))
    [choice] = drain(engine)["a"].outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "xxx")


def test_stop_strings_wait_for_min_tokens():
    engine = tiny_engine()
    engine.add(Request("a", (1, 2, 3), forced("x", stop="xxx", min_tokens=10, max_tokens=40)))
    [choice] = drain(engine)["a"].outputs
    assert (choice.text, len(choice.token_ids), choice.stop_reason) == ("x" * 10, 13, "xxx")


@pytest.mark.parametrize("length", [40, 43, 44, 47])
def test_a_prompt_under_pressure_in_a_pool_smaller_than_it_folds_from_the_start(length):
    engine = tiny_engine(
        page_size=4,
        kv_eviction="zipage",
        kv_evict_when="pressure",
        kv_prefill_buffer=12,
        num_pages=12,
        kv_budget=16,
        kv_window=2,
    )
    engine.add(Request("a", tuple(prompt_of(length)), greedy(6)))
    assert len(drain(engine)["a"].outputs[0].token_ids) == 6


def test_a_model_in_memory_is_not_stretched_beyond_the_positions_it_was_loaded_for():
    loaded = tiny_loaded()
    short = replace(loaded, decoder=load_decoder(loaded.spec, tiny_tensors(loaded.spec), torch.float64, 64))
    config = EngineConfig.from_options(**OPTIONS | {"max_model_len": 65})
    with pytest.raises(InputError, match="max_model_len: got 65, the model was loaded for 64"):
        build_engine(config, short)


def test_prompts_are_ranked_in_slices_as_in_one_piece(monkeypatch):
    params, prompt = greedy(2, prompt_logprobs=3), prompt_of(40)
    (whole,) = run(tiny_engine(), [prompt], [params])
    monkeypatch.setattr(runner, "RANKED_ROWS", 7)
    (sliced,) = run(tiny_engine(), [prompt], [params])
    assert len(sliced.prompt_logprobs) == len(whole.prompt_logprobs) == 40
    for ours, theirs in zip(sliced.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert (ours.ids, ours.ranks) == (theirs.ids, theirs.ranks)
        assert ours.logprobs == pytest.approx(theirs.logprobs)


def test_policies_of_passing_requests_do_not_pile_up():
    engine = tiny_engine(kv_eviction="recency")
    for budget in range(8, 8 + 3 * POLICIES_KEPT):
        engine.policies.policy(greedy(1, kv_budget=budget))
    assert len(engine.policies._cache) <= POLICIES_KEPT


def test_a_request_preempted_before_its_last_token_is_read_still_says_what_became_of_its_rows():
    engine = tiny_engine(plan_ahead=True)
    engine.add(Request("a", tuple(prompt_of(20)), greedy(3)))
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert drain(engine)["a"].outputs[0].kv.tokens == 22

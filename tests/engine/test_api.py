"""The offline API: what may be passed, what comes back, and what is refused and how."""

import json
import re

import numpy as np
import pytest
import torch

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams
from tests.engine.dense import dense_logits
from tests.engine.tiny import (
    BOS,
    EOS,
    IM_START,
    alone,
    assert_drained,
    drain,
    greedy,
    prompt_of,
    run,
    seeded,
    tiny_engine,
    tiny_llm,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()


def ids_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---- what may be passed


def test_text_ids_dicts_and_lists_of_them_are_the_same_prompt():
    llm, params = tiny_llm(), greedy(6)
    ids = TOKENIZER.encode("hello")
    numbers = np.array(ids)
    forms = ["hello", ids, tuple(ids), numbers, {"prompt": "hello"}, {"prompt_token_ids": numbers}]
    forms.append({"prompt_token_ids": ids, "prompt": "what it was"})
    singles = [llm.generate(form, params, use_tqdm=False) for form in forms]
    assert all(len(outputs) == 1 for outputs in singles)
    together = llm.generate(forms, params, use_tqdm=False)
    assert len({tuple(out) for out in [*ids_of(together), *(ids_of(single)[0] for single in singles)]}) == 1
    assert [output.prompt for output in together] == ["hello", None, None, None, "hello", None, "what it was"]
    assert all(output.prompt_token_ids == ids for output in together)
    assert llm.generate([], use_tqdm=False) == []


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first():
    prompts = [prompt_of(5, seed) for seed in range(6)]
    params = [greedy(n) for n in (30, 1, 20, 3, 9, 2)]
    outputs = tiny_llm(max_num_seqs=3).generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in ids_of(outputs)] == [30, 1, 20, 3, 9, 2]


def test_without_params_the_defaults_are_those_of_sampling_params():
    (output,) = tiny_llm().generate("x", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_a_conversation_or_a_list_of_them_goes_through_the_template():
    llm, talk = tiny_llm(), [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, greedy(5), use_tqdm=False)
    two = llm.chat([talk, talk], [greedy(5), greedy(3)], use_tqdm=False)
    assert one.prompt_token_ids == TOKENIZER.apply_chat_template(talk)
    assert ids_of(two) == [one.outputs[0].token_ids, one.outputs[0].token_ids[:3]]
    (bare,) = llm.chat(talk, greedy(1), use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt_token_ids.count(IM_START) == one.prompt_token_ids.count(IM_START) - 1


# ---- what is refused


@pytest.mark.parametrize(
    "prompts, params, match",
    [
        (["a", "b"], [SamplingParams()], "sampling_params: got 1 for 2 prompts"),
        ("a", [SamplingParams()] * 2, "sampling_params: got 2 for 1 prompts"),
        ([[]], None, "prompt: is empty"),
        ({"text": "a"}, None, r"prompt: got keys \['text'\]"),
        ([[260]], None, r"prompt: token id 260 must be in \[0, 260\)"),
        ([[1] * 513], None, "prompt: has 513 tokens; the context holds 512"),
        ("a", SamplingParams(stop_token_ids=[999]), r"stop_token_ids: token id 999 must be in \[0, 260\)"),
        ("a", SamplingParams(allowed_token_ids=[260]), r"allowed_token_ids: token id 260"),
        ("a", SamplingParams(kv_eviction="lru"), "kv_eviction: unknown scorer 'lru'; known: .*recency"),
        ("a", SamplingParams(kv_eviction="snapkv"), "kv_eviction: 'snapkv' needs the queries of recent tokens"),
        ("a", SamplingParams(kv_eviction="recency", kv_budget=4), r"kv_budget: got 4, must be more than .*\(3 \+ 1\)"),
    ],
)
def test_a_bad_prompt_starts_none_of_its_batch_and_the_llm_goes_on(prompts, params, match):
    llm = tiny_llm(eos=())
    want = ids_of(llm.generate("next", greedy(4), use_tqdm=False))
    if isinstance(prompts, list) and isinstance(params, SamplingParams | None):
        prompts = ["good", *prompts]
    with pytest.raises(InputError, match=match):
        llm.generate(prompts, params, use_tqdm=False)
    assert_drained(llm.engine)
    assert llm.engine.scheduler.stats.steps == 4, "a request of the refused batch was started"
    assert ids_of(llm.generate("next", greedy(4), use_tqdm=False)) == want


@pytest.mark.parametrize(
    "prompts", [5, [None], [3.5], ["good", 7], [["text"]], [{"prompt": None}], {"prompt_token_ids": [0.5]}]
)
def test_what_is_no_prompt_is_refused_as_such(prompts):
    llm = tiny_llm()
    with pytest.raises(InputError, match="prompt"):
        llm.generate(prompts, greedy(2), use_tqdm=False)
    assert_drained(llm.engine)


@pytest.mark.parametrize("messages", [[], "hi", [[]], ["hi"], [{"content": "x"}]])
def test_what_is_no_conversation_is_refused_or_answered_but_never_breaks_the_engine(messages):
    llm = tiny_llm()
    try:
        llm.chat(messages, greedy(2), use_tqdm=False)
    except InputError as error:
        assert error.field == "messages"
    assert_drained(llm.engine)


def test_unknown_options_are_listed():
    with pytest.raises(InputError, match="kv_budgets: unknown option; known: .*kv_budget, .*page_size"):
        tiny_llm(kv_budgets=3)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"page_size": 3}, "page_size: got 3, must be a power of two"),
        ({"kv_format": "int9"}, "kv_format: unknown format 'int9'; known: .*int4"),
        ({"kv_cold_format": "k=int4"}, "kv_cold_format: "),
        ({"kv_layout": "clustered"}, "kv_layout: .*profile"),
        ({"kv_layout": "none"}, "kv_layout: unknown layout 'none'; known: .*uniform"),
        ({"kv_eviction": "zipage:lam=2"}, r"kv_eviction: .*lam.*\[0, 1\]"),
        ({"kv_eviction": "zipage:lamda=2"}, "kv_eviction: .*unknown option 'lamda'"),
        ({"kv_eviction": "recency", "kv_budget": 4}, "kv_budget: got 4, must be more than"),
        ({"num_pages": None, "kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes: got 10, two pages a tier take"),
        ({"num_pages": 1 << 31}, "num_pages: makes 2147483649 pages of .* 2147483647 rows fit"),
        ({"max_model_len": 1 << 20}, "max_model_len: got 1048576, the model's context holds"),
        (
            {"kv_eviction": "snapkv", "kv_lag": 2},
            r"kv_window: 3 queries, one every 1 tokens, span 3; with kv_lag \(2\) that must be at most kv_buffer",
        ),
    ],
)
def test_options_that_cannot_be_had_are_refused_by_name(options, match):
    with pytest.raises(InputError, match=match):
        tiny_llm(**options)


def test_an_id_that_is_being_served_is_not_taken_twice():
    engine = tiny_engine()
    engine.add(Request("a", (1, 2), greedy(3)))
    with pytest.raises(InputError, match="request_id: 'a' is already being served"):
        engine.add(Request("a", (1, 2), greedy(3)))
    drain(engine)
    engine.add(Request("a", (1, 2), greedy(3)))
    assert drain(engine)["a"].finished


# ---- what comes back


def test_outputs_tell_what_became_of_the_request():
    engine = tiny_engine(kv_eviction="recency")
    (output,) = run(engine, [prompt_of(30)], [greedy(20)])
    (choice,) = output.outputs
    assert (choice.index, choice.finish_reason, choice.stop_reason, choice.error) == (0, "length", None, None)
    assert choice.text == TOKENIZER.decode(choice.token_ids) and choice.logprobs is None
    assert output.finished and output.prompt_logprobs is None
    kv = output.kv
    assert kv.tokens == 30 + 20 - 1 and kv.rows_kept + kv.rows_evicted == kv.tokens
    assert 12 <= kv.rows_kept <= 12 + 4 and kv.preemptions == 0
    assert kv.compactions == 5  # at 32, 36, ..., 48
    page = 4 * 2 * 2 * 16 * 2 * 8  # rows, layers, heads, channels, K and V, float64
    assert kv.bytes == page * 4 and kv.peak_bytes == page * 8


def test_compactions_are_counted_by_time_not_by_head(layout_of):
    layout = layout_of("clustered:profile={profile},heads_per_page=1")
    output = alone(prompt_of(30), greedy(20), kv_eviction="recency", kv_layout=layout)
    assert output.kv.compactions <= 7


def test_a_short_request_with_a_large_budget_needs_no_room_to_fold():
    """It ends before it is over budget, so the pool need not hold a budget's worth of fresh pages."""
    output = alone(prompt_of(10), greedy(10), kv_eviction="recency", kv_budget=400, num_pages=6)
    assert len(output.outputs[0].token_ids) == 10


@pytest.mark.parametrize("chunk", [5, 64])
def test_logprobs_are_those_of_dense_attention(chunk):
    prompt, params = prompt_of(21), greedy(12, logprobs=3, prompt_logprobs=2)
    output = alone(prompt, params, max_num_batched_tokens=chunk)
    tokens = prompt + output.outputs[0].token_ids
    want = torch.log_softmax(dense_logits(tokens), -1)
    assert output.prompt_logprobs and output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs[1:] + (output.outputs[0].logprobs or [])
    assert len(entries) == len(tokens) - 1
    for i, entry in enumerate(entries):
        best = want[i].topk(2 if i + 1 < len(prompt) else 3).indices.tolist()
        assert entry and list(entry.ids) == [tokens[i + 1], *best]
        np.testing.assert_allclose(entry.logprobs, want[i][list(entry.ids)].numpy(), atol=1e-10)
        assert entry.ranks == (int((want[i] > want[i][tokens[i + 1]]).sum()) + 1, *range(1, len(best) + 1))
    total = sum(float(want[i][tokens[i + 1]]) for i in range(len(prompt) - 1, len(tokens) - 1))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("after", range(8))
def test_prompt_logprobs_survive_preemption(after, preemption):
    prompt, params = prompt_of(21), greedy(4, prompt_logprobs=0, logprobs=0)
    want = alone(prompt, params)
    engine = tiny_engine(max_num_batched_tokens=5, preemption=preemption)
    engine.add(Request("a", tuple(prompt), params))
    for _ in range(after):
        engine.step()
    for seq in list(engine.scheduler.running):
        engine.scheduler.preempt(seq)
    got = drain(engine)["a"]
    lines = lambda entries: [entry and entry.logprobs[0] for entry in entries or ()]  # noqa: E731
    assert lines(got.prompt_logprobs)[1:] == pytest.approx(lines(want.prompt_logprobs)[1:], abs=1e-10)
    assert lines(got.outputs[0].logprobs) == pytest.approx(lines(want.outputs[0].logprobs), abs=1e-10)


def test_max_tokens_zero_scores_the_prompt_and_generates_nothing():
    (output,) = run(tiny_engine(), [prompt_of(9)], [greedy(0, prompt_logprobs=1)])
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs or ()) == 9


def test_continuations_of_one_prompt_are_distinct_and_repeatable():
    engine = tiny_engine()
    first, again, other = (run(engine, [prompt_of(9)], [seeded(12, s, n=4)])[0] for s in (3, 3, 4))
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    draws = lambda output: [tuple(choice.token_ids) for choice in output.outputs]  # noqa: E731
    assert len(set(draws(first))) == 4 and draws(first) == draws(again) and not set(draws(first)) & set(draws(other))
    assert all(choice.finish_reason == "length" and choice.kv.tokens == 20 for choice in first.outputs)
    assert_drained(engine)


def test_unseeded_requests_differ_from_each_other_and_repeat_with_the_engines_seed():
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = [ids_of(run(tiny_engine(seed=seed), [prompt_of(9)] * 2, [params] * 2)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] and runs[0] != runs[2] and runs[0][0] != runs[0][1]


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_ends_the_text_before_or_after_it(included):
    whole = alone(prompt_of(9), greedy(12, allowed_token_ids=list(TOKENIZER.encode("abcdefgh")[1:]))).outputs[0]
    stop = whole.text[5:8]
    cut = whole.text.index(stop)
    params = greedy(
        12, allowed_token_ids=TOKENIZER.encode("abcdefgh")[1:], stop=[stop], include_stop_str_in_output=included
    )
    engine = tiny_engine()
    (choice,) = run(engine, [prompt_of(9)], [params])[0].outputs
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == whole.text[: cut + 3 * included] and choice.token_ids == whole.token_ids[: cut + 3]
    assert_drained(engine)


def test_stop_ids_and_eos_ids_end_the_text_and_say_which():
    whole = alone(prompt_of(9), greedy(12)).outputs[0].token_ids
    stop = next(id for id in whole[3:] if id not in whole[:3] and id != EOS)
    at = whole.index(stop)
    (by_id,) = alone(prompt_of(9), greedy(12, stop_token_ids=[stop])).outputs
    assert (by_id.finish_reason, by_id.stop_reason, by_id.token_ids) == ("stop", stop, whole[: at + 1])
    assert by_id.text == TOKENIZER.decode(whole[:at])
    (by_eos,) = alone(prompt_of(9), greedy(12, ignore_eos=False), eos=(EOS, stop)).outputs
    assert (by_eos.finish_reason, by_eos.stop_reason, by_eos.token_ids) == ("stop", None, whole[: at + 1])


def test_structured_outputs_make_the_text_and_leave_the_others_alone():
    pytest.importorskip("llguidance")
    llm = tiny_llm()
    how = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    forms = [{"regex": "[0-9]{3}"}, {"json": schema}, {"choice": ["yes", "no"]}, {"grammar": 'start: "so" "so"'}, None]
    params = [SamplingParams(structured_outputs=form, **how) for form in forms]
    texts = [output.outputs[0].text for output in llm.generate([[1, 2, 3]] * 5, params, use_tqdm=False)]
    assert re.fullmatch("[0-9]{3}", texts[0])
    assert json.loads(texts[1])["a"] in (True, False)
    assert texts[2] in ("yes", "no") and texts[3] == "soso"
    assert texts[4] == llm.generate([1, 2, 3], params[4], use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize(
    ("form", "match"),
    [
        ({"regex": "("}, "structured_outputs.regex: does not compile"),
        ({"json": {"type": "strin"}}, "structured_outputs.json: "),
        ({"choice": []}, "structured_outputs.choice: is empty"),
        ({"choice": [1]}, "structured_outputs.choice: .* a list of texts"),
        ({"json_object": "yes"}, "structured_outputs.json_object: .* true"),
    ],
)
def test_a_form_that_makes_no_sense_is_refused_and_starts_nothing(form, match):
    pytest.importorskip("llguidance")
    llm = tiny_llm()
    with pytest.raises(InputError, match=match):
        llm.generate([[1], [2]], [SamplingParams(), SamplingParams(structured_outputs=form)], use_tqdm=False)
    assert not llm.engine.has_work


def test_a_form_is_never_dropped_on_the_way():
    with pytest.raises(InputError, match="structured_outputs: .* one of json, regex"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(InputError, match="structured_outputs: needs its grammar compiled"):
        tiny_engine().add(Request("a", (1,), SamplingParams(structured_outputs={"regex": "a"})))


def test_lower_priority_values_run_first():
    engine = tiny_engine(max_num_seqs=1)
    for id, priority in (("a", 1), ("b", 1), ("c", 0), ("d", -1)):
        engine.add(Request(id, (BOS, 1), greedy(2), priority))
    assert list(drain(engine)) == ["d", "c", "a", "b"]


def test_salts_keep_prefixes_apart():
    engine, prompt = tiny_engine(), tuple(prompt_of(20))
    cached = []
    for i, salt in enumerate(("", "a", "a", "")):
        engine.add(Request(str(i), prompt, greedy(2), cache_salt=salt))
        cached.append(drain(engine)[str(i)].num_cached_tokens)
    assert cached == [0, 0, 16, 16]


def test_logits_that_are_not_finite_end_their_request_alone():
    engine = tiny_engine()
    engine.add(Request("bad", tuple(prompt_of(9)), greedy(8)))
    engine.add(Request("good", tuple(prompt_of(9, 1)), greedy(8)))
    engine.step()
    bad = next(seq for seq in engine.scheduler.running if seq.request.id == "bad")
    engine.runner.kv.tiers[0].poison(torch.tensor(bad.kv.pages[0, :1].tolist()))
    done = drain(engine)
    assert done["bad"].outputs[0].finish_reason == "abort" and "finite" in (done["bad"].outputs[0].error or "")
    assert done["good"].outputs[0].token_ids == alone(prompt_of(9, 1), greedy(8)).outputs[0].token_ids
    assert_drained(engine)


def test_every_option_is_a_leaf_of_the_configuration():
    config = tiny_llm(kv_budget=20).config
    assert config == EngineConfig.from_options(**config.options()) and config.eviction.kv_budget == 20

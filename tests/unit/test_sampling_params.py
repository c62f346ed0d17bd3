"""Every bad value of a sampling parameter is refused by name, and good ones come out in one form."""

import math

import pytest

from pagefold.core.types import InputError, SamplingParams

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "kv_budget"]
FLAGS = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"]
TEXTS = ["stop", "bad_words"]
TOKEN_IDS = ["stop_token_ids", "allowed_token_ids"]


def refuse(field: str, value: object, **others) -> str:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value, **others})
    assert caught.value.field.split("[")[0] == field
    message = str(caught.value)
    assert message.startswith(field) and ("must be" in message or "needs" in message)
    return message


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, [0.5], 10**400, -1e9, 1e9])
def test_numbers_are_finite_and_in_range(field, value):
    assert repr(value) in refuse(field, value)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", True, math.nan, [1], -(2**70)])
def test_integers_are_integers(field, value):
    assert repr(value) in refuse(field, value)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "[1, 1024]"),
        ("n", 1025, "[1, 1024]"),
        ("n", 10**6, "[1, 1024]"),
        ("temperature", -0.1, "[0, 10000]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("top_k", -2, ">= 1"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.5, "[0, 1]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -2.1, "[-2, 2]"),
        ("repetition_penalty", 0, "(0, 100]"),
        ("seed", 2**63, "64-bit"),
        ("max_tokens", -1, ">= 0"),
        ("min_tokens", -1, ">= 0"),
        ("min_tokens", 17, "max_tokens (16)"),
        ("logprobs", -1, "[0, 128]"),
        ("logprobs", 129, "[0, 128]"),
        ("prompt_logprobs", -1, "[0, 128]"),
        ("kv_budget", 0, "> 0"),
        ("kv_evict_when", "never", "always, pressure"),
        ("kv_eviction", 3, "scorer spec"),
    ],
)
def test_an_error_names_the_field_the_value_and_the_limit(field, value, limit):
    message = refuse(field, value)
    assert repr(value) in message and limit in message


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "no", None])
def test_flags_are_true_or_false(field, value):
    assert repr(value) in refuse(field, value)


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("value", ["", [""], ["a", ""], [3], 3, 1.5, b"ab", {"a": 1}, [None], True])
def test_case_15_an_empty_or_wrong_string_is_refused(field, value):
    refuse(field, value)


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize(
    ("value", "normal"),
    [(None, ()), ([], ()), ((), ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))],
)
def test_case_15_strings_become_tuples(field, value, normal):
    assert getattr(SamplingParams(**{field: value}), field) == normal


@pytest.mark.parametrize("field", TOKEN_IDS)
@pytest.mark.parametrize("value", ["12", 1.5, [1.0], [-1], [2**63], [True], [None], [[1]], {"1": 1}])
def test_case_27_token_ids_are_checked(field, value):
    refuse(field, value)


def test_token_ids_become_tuples():
    params = SamplingParams(stop_token_ids=[1, 2], allowed_token_ids=[3])
    assert params.stop_token_ids == (1, 2) and params.allowed_token_ids == (3,)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_an_empty_list_of_allowed_ids_is_refused():
    refuse("allowed_token_ids", [])


@pytest.mark.parametrize(
    "value",
    [{1: math.nan}, {1: math.inf}, {1: 101}, {1: -100.5}, {1: 10**400}, {1: "2"}, {1: True}]
    + [{"a": 1}, {1.5: 1}, {-1: 1}, {2**63: 1}, {None: 1}, {True: 1}, [1], 3, "1"],
)
def test_logit_bias_maps_token_ids_to_numbers(value):
    refuse("logit_bias", value)


def test_logit_bias_takes_the_string_keys_of_json():
    assert SamplingParams(logit_bias={"5": 100, 6: -1.5}).logit_bias == {5: 100, 6: -1.5}


def test_stop_strings_need_text():
    refuse("stop", "a", detokenize=False)


def test_case_25_a_tiny_temperature_is_greedy():
    assert all(SamplingParams(temperature=t).greedy for t in (0, 1e-10, 1e-4))
    assert not SamplingParams(temperature=0.1).greedy


def test_limits_themselves_are_allowed():
    SamplingParams(n=1024, temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(2**63), max_tokens=0)
    SamplingParams(max_tokens=None, min_tokens=10**6, logprobs=128, prompt_logprobs=0, repetition_penalty=100)

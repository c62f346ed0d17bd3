"""The text of a stream is the text of all its ids, whatever the pushes, and no stop string leaks."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.core.types import SamplingParams
from pagefold.engine.detokenize import Detokenizer

WORDS = [b"alpha ", b"beta ", b"gam", b"ma delta", b" one", b"ab", b"\n", b"Us", b"er:", "漢".encode(), "é".encode()]
SPECIALS = [b"<s>", b"<|im_end|>"]
BOS, IM_END = 256 + len(WORDS), 257 + len(WORDS)
VOCAB = 256 + len(WORDS) + len(SPECIALS)


class ByteTokenizer:
    """256 byte tokens, some words, two special tokens; `strips` is sentencepiece's way with a leading space."""

    def __init__(self, strips: bool = False):
        self._tokens = [bytes([i]) for i in range(256)] + WORDS + SPECIALS
        self._strips = strips
        self.special_ids = frozenset({BOS, IM_END})

    def token_bytes(self, id: int) -> bytes:
        return self._tokens[id]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if 0 <= i < VOCAB and not (skip_special_tokens and i in self.special_ids)]
        text = b"".join(self._tokens[i] for i in kept).decode("utf-8", "replace")
        return text[1:] if self._strips and text.startswith(" ") else text


TOKENIZER = ByteTokenizer()
PROMPT = [65]
words = lambda *texts: [256 + WORDS.index(text) for text in texts]  # noqa: E731
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=40)


def stream(ids: Sequence[int], sizes: Sequence[int] = (), tokenizer=TOKENIZER, prompt=PROMPT, **params):
    """All deltas, the last from `finish`, and the detokenizer; `sizes` cuts the ids into pushes, then one by one."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params), prompt)
    deltas, begin = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        deltas.append(detokenizer.push(ids[begin : begin + size]))
        begin += size
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer


def test_case_1_characters_of_many_tokens_come_whole():
    text = "é😀漢"
    deltas, _ = stream(list(text.encode()))
    assert [delta for delta in deltas if delta] == list(text)


def test_case_2_an_incomplete_character_is_sent_once():
    deltas, _ = stream([*b"A ", *"世".encode()[:2], *b"ab"])
    assert "".join(deltas) == "A \ufffdab"
    deltas, _ = stream([*b"A ", *"世".encode(), *b"ab"])
    assert "".join(deltas) == "A 世ab"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_case_4_an_output_cut_inside_a_character_ends_with_one_replacement(num_bytes):
    ids = list(b"x" + "😀".encode()[:num_bytes])
    for sizes in ([], [len(ids)]):
        deltas, _ = stream(ids, sizes)
        assert deltas[-1] == "\ufffd" and "".join(deltas) == "x\ufffd"


@pytest.mark.parametrize(
    "data", [b"\xe2\x82\xe2\x82\xac", b"\xff\xfe", b"\x80" * 12, b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]
)
def test_case_5_invalid_bytes_become_replacements(data):
    deltas, _ = stream(list(data))
    assert "".join(deltas) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("id", [VOCAB, -1, -VOCAB, 2**63, -(2**70), None])
def test_case_5_unknown_ids_add_nothing(id):
    deltas, _ = stream([*b"a", id, *b"b"], stop=["zz"])
    assert "".join(deltas) == "ab"


@settings(max_examples=200, deadline=None)
@given(ids=IDS, sizes=st.lists(st.integers(0, 5), max_size=9), skip=st.booleans(), stops=st.booleans())
def test_joined_deltas_are_the_decoded_whole(ids, sizes, skip, stops):
    """Random bytes: mostly invalid UTF-8. A stop string that never comes changes nothing."""
    never = {"stop": ["\x00 never", "<s>\x00 never"]} if stops else {}
    deltas, _ = stream(ids, sizes, skip_special_tokens=skip, **never)
    assert "".join(deltas) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), sizes=st.lists(st.integers(0, 5), max_size=9))
def test_valid_text_never_shows_a_replacement(text, sizes):
    deltas, _ = stream(list(text.encode()), sizes)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


# the beginning of a text


@pytest.mark.parametrize(("prompt", "expected"), [([], "one one"), ([BOS], "one one"), ([BOS, 65], " one one")])
def test_a_leading_space_is_dropped_only_where_the_text_begins(prompt, expected):
    deltas, _ = stream(words(b" one", b" one"), tokenizer=ByteTokenizer(strips=True), prompt=prompt)
    assert "".join(deltas) == expected
    deltas, _ = stream(words(b" one", b" one"), prompt=prompt)
    assert "".join(deltas) == " one one"


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.sampled_from([32, 97, 195, 169, BOS, *words(b" one")]), max_size=8))
def test_a_text_without_prompt_equals_the_decoded_whole(ids):
    tokenizer = ByteTokenizer(strips=True)
    deltas, _ = stream(ids, tokenizer=tokenizer, prompt=[BOS])
    assert "".join(deltas) == tokenizer.decode(ids)


# stop strings


def test_case_11_a_stop_string_that_is_a_special_token():
    for include, text in ((False, "alpha "), (True, "alpha <|im_end|>")):
        deltas, detokenizer = stream(
            [*words(b"alpha "), IM_END, *b"x"], stop=["<|im_end|>"], include_stop_str_in_output=include
        )
        assert "".join(deltas) == text and detokenizer.stopped == "<|im_end|>"


@pytest.mark.parametrize("stop", ["a <|im_end|>", "<|im_end|>\n", "a <|im_end|>\n"])
def test_case_11_a_stop_string_around_a_special_token(stop):
    deltas, detokenizer = stream([*words(b"alpha "), IM_END, *b"\nx"], stop=[stop])
    assert "".join(deltas) == "alpha ".removesuffix("a " if stop[0] == "a" else "") and detokenizer.stopped == stop


def test_special_tokens_in_a_stop_string_stay_hidden_when_it_does_not_come():
    deltas, detokenizer = stream([*words(b"alpha "), IM_END, *b"yx"], stop=["<|im_end|>\n"])
    assert "".join(deltas) == "alpha yx" and detokenizer.stopped is None


def test_case_12_a_stop_string_over_several_tokens_does_not_leak():
    deltas, detokenizer = stream(words(b"alpha ", b"beta ", b"gam", b"ma delta"), stop=["beta gamma"])
    assert [delta for delta in deltas if delta] == ["alpha "]
    assert detokenizer.stopped == "beta gamma"
    assert detokenizer.push(words(b"alpha ")) == "" and detokenizer.text == "alpha "


def test_case_13_held_text_is_flushed_when_the_output_ends():
    deltas, detokenizer = stream([*b"hi", *words(b"\n", b"Us"), BOS], stop=["\nUser:"])
    assert deltas[:2] == ["h", "i"] and deltas[-1] == "\nUs" and detokenizer.stopped is None


def test_case_13_a_stop_string_may_end_in_the_cut_character():
    deltas, detokenizer = stream([*b"ab", 0xE2], stop=["b\ufffd"])
    assert "".join(deltas) == "a" and detokenizer.stopped == "b\ufffd"


def test_the_stop_string_that_is_complete_first_wins():
    text = list(b"xabcdy")
    for stops, stopped, expected in (
        (["abcd", "bc"], "bc", "xa"),
        (["c", "bc", "abc"], "abc", "x"),
        (["y", "d"], "d", "xabc"),
        (["abce", "cd"], "cd", "xab"),
    ):
        for sizes in ([], [len(text)]):
            deltas, detokenizer = stream(text, sizes, stop=stops)
            assert detokenizer.stopped == stopped and "".join(deltas) == expected


def test_stop_strings_are_included_on_request():
    deltas, detokenizer = stream(list(b"xabcdy"), stop=["bc"], include_stop_str_in_output=True)
    assert [delta for delta in deltas if delta] == ["x", "a", "bc"] and detokenizer.stopped == "bc"


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab漢", max_size=30),
    stops=st.lists(st.text("ab漢", min_size=1, max_size=6), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 7), max_size=9),
    include=st.booleans(),
)
def test_stop_strings_equal_the_oracle_and_never_leak(text, stops, sizes, include):
    """What is shown before the end holds no beginning of the stop string, however the bytes are pushed."""
    deltas, detokenizer = stream(list(text.encode()), sizes, stop=stops, include_stop_str_in_output=include)
    expected, stopped = oracle(text, stops, include)
    assert ("".join(deltas), detokenizer.stopped) == (expected, stopped)

    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=tuple(stops)), PROMPT)
    for end in range(1, len(text) + 1):
        detokenizer.push(list(text[end - 1].encode()))
        if detokenizer.stopped is None:
            held = max(n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n]))
            assert detokenizer.text == text[: end - held]


def test_without_detokenize_there_is_no_text():
    deltas, _ = stream(list(b"abc"), detokenize=False)
    assert set(deltas) == {""}


@pytest.mark.parametrize("stops", [(), ("a" * 2000 + "b", "a" * 1500 + "c", "zz")])
def test_the_cost_of_a_push_does_not_grow(stops):
    """Long stop strings that almost match are the worst case."""
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=stops), PROMPT)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(5000):
            detokenizer.push([97])
        times.append(time.perf_counter() - begin)
    assert min(times[2:]) < 5 * min(times[:2])
    assert min(times) / 5000 < 1e-4

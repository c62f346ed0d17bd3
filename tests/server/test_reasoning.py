"""Thinking is told from the answer, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.server.reasoning import ReasoningSplitter, ends_thinking, prefix_at_end
from tests.server.fake import FakeClient, events, running

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", " ", "\n", "a", "b c", "é"]), max_size=12)


def split(pieces, **options):
    splitter = ReasoningSplitter(**options)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nI see.\n</think>\n\nYes.", False, ("I see.", "Yes.")),
        ("I see.\n</think>\n\nYes.", True, ("I see.", "Yes.")),
        ("Yes.", False, ("", "Yes.")),
        (" Yes. <think>x</think>", False, ("", " Yes. <think>x</think>")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("<think>cut o", False, ("cut o", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<thi", False, ("", "<thi")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_and_content_are_told_apart(text, thinking, expected):
    assert split([text], thinking=thinking) == expected
    assert split(text, thinking=thinking) == expected  # one character at a time


@given(PIECES, st.booleans(), st.data())
def test_the_split_does_not_depend_on_how_the_text_is_cut(pieces, thinking, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(parts, thinking=thinking) == split([text], thinking=thinking)


@given(PIECES)
def test_without_a_parser_nothing_is_touched(pieces):
    assert split(pieces, enabled=False) == ("", "".join(pieces))


def test_what_is_held_back_is_the_longest_beginning_of_a_mark():
    assert [prefix_at_end(text, "</t>") for text in ("a", "a<", "a</", "a<<", "a</t>")] == [0, 1, 2, 1, 0]


def test_only_a_prompt_that_ends_in_an_open_mark_begins_with_thinking():
    assert ends_thinking("assistant\n<think>\n")
    assert not ends_thinking("what is <think>?<|im_end|>assistant\n")
    assert not ends_thinking("assistant\n<think>\n\n</think>\n\n")


def test_reasoning_content_is_a_field_of_its_own_in_both_modes():
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with running(FakeClient("<think>\nhm é\n</think>\n\nyes"), reasoning_parser="qwen3") as http:
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm é"}
        deltas = [
            c["choices"][0]["delta"] for c in events(http.post("/v1/chat/completions", json=body | {"stream": True}))
        ]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == message[name]


def test_an_answer_with_a_form_is_all_content():
    """A grammar leaves no room for thinking, even when the template has begun it."""
    client = FakeClient('{"a":1}')
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
    with running(client, reasoning_parser="deepseek_r1") as http:
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": '{"a":1}'}
        del body["response_format"]
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["reasoning_content"] == '{"a":1}'


def test_reasoning_in_the_history_is_accepted_under_both_names():
    client = FakeClient()
    with running(client) as http:
        for name in ("reasoning", "reasoning_content"):
            turns = [{"role": "assistant", "content": "a", name: "because"}, {"role": "user", "content": "b"}]
            assert http.post("/v1/chat/completions", json={"messages": turns}).status_code == 200

"""Tool calls are read out of the text, however it is cut, and asked for by a grammar."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.engine.grammar import GrammarCompiler
from pagefold.server.tools import call_grammar, choose_parser, make_parser
from tests.engine.tiny import EOS, tiny_tokenizer
from tests.server.fake import FakeClient, events, running

NAMES = ["weather", "now"]
WEATHER = '{"name": "weather", "arguments": {"city": "Köln {\\"x\\"}", "days": [1, 2]}}'
ARGUMENTS = '{"city": "Köln {\\"x\\"}", "days": [1, 2]}'
HERMES = f'Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>'
V3 = (
    "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
V31 = (
    f"Let me see.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


WEATHER_CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'


def admits(grammar, text):
    """Whether the whole of `text` is an answer that `grammar` allows."""
    compiler = GrammarCompiler(tiny_tokenizer(), 260, [EOS])
    matcher = compiler.submit(grammar.kind, grammar.text).result(timeout=10)
    ids = [*tiny_tokenizer().encode_plain(text), EOS]
    for id in ids:
        matcher.accept(id)
    return matcher.error is None


def parse(form, pieces):
    """(content, [(name, arguments)]); checks what every stream of calls must be like."""
    parser = make_parser(form, NAMES)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    calls, ids = [], set()
    for delta in [delta for _, deltas in parts for delta in deltas]:
        if delta.name is not None:
            assert delta.index == len(calls) and delta.id not in ids
            ids.add(delta.id)
            calls.append([delta.name, ""])
        else:
            assert delta.id is None
        calls[delta.index][1] += delta.arguments
    return "".join(content for content, _ in parts), [tuple(call) for call in calls]


CASES = [
    ("hermes", HERMES, "Let me see.", [("weather", ARGUMENTS), ("now", "{}")]),
    ("hermes", "no call", "no call", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", f"<tool_call>{WEATHER.replace('arguments', 'parameters')}", "", [("weather", ARGUMENTS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    ("hermes", "<tool_call>\nnot json\n</tool_call> so", "<tool_call>\nnot json\n</tool_call> so", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("llama3_json", WEATHER, "", [("weather", ARGUMENTS)]),
    (
        "llama3_json",
        f'<|python_tag|>{WEATHER}; {{"name": "now", "parameters": {{}}}}',
        "",
        [("weather", ARGUMENTS), ("now", "{}")],
    ),
    ("llama3_json", '{"name": "Bob", "parameters": 1}', '{"name": "Bob", "parameters": 1}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", " Hello {", " Hello {", []),
    ("llama3_json", "<|pyt", "<|pyt", []),
    ("llama3_json", '{"name": "now"} and so on', " and so on", [("now", "{}")]),
    ("list", f'[{WEATHER},\n{{"name":"now","arguments":{{}}}}]', "", [("weather", ARGUMENTS), ("now", "{}")]),
    ("list", f"[{WEATHER[:33]}", "", [("weather", "")]),
    ("deepseek_v3", V3, "Let me see.", [("weather", ARGUMENTS), ("now", "{}")]),
    ("deepseek_v31", V31, "Let me see.", [("weather", ARGUMENTS), ("now", "{}")]),
    ("deepseek_v3", V3[: V3.index("days")], "Let me see.", [("weather", ARGUMENTS[: ARGUMENTS.index("days")])]),
    ("deepseek_v3", "```json\n{}\n``` <｜tool", "```json\n{}\n``` <｜tool", []),
    ("deepseek_v31", "a<｜tool▁calls▁begin｜> b", "a<｜tool▁calls▁begin｜> b", []),
    ("deepseek_v31", V31 + " so", "Let me see. so", [("weather", ARGUMENTS), ("now", "{}")]),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>",
        "",
        [("now", "{}")],
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜>",
        [],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_case_34_calls_are_read_whole_and_by_the_character(form, text, content, calls):
    assert parse(form, [text]) == (content, calls)
    assert parse(form, text) == (content, calls)


MARKS = re.findall(r"<｜[^｜]*｜>", V3[: V3.index("now")]) + [
    "<｜tool▁calls▁end｜>",
    "function",
    "```json",
    "\n",
    "```",
]


@given(
    st.sampled_from(["hermes", "llama3_json", "list", "deepseek_v3", "deepseek_v31"]),
    st.lists(
        st.sampled_from(
            [WEATHER, "<tool_call>", "</tool_call>", '{"name": "now"', "}", '"', "[", ",", " ", "a", *MARKS]
        ),
        max_size=8,
    ),
    st.data(),
)
def test_case_34_calls_do_not_depend_on_how_the_text_is_cut(form, pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, parts) == parse(form, [text])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tool_call_parser": "hermes"}, HERMES),
        ({"tool_call_parser": "llama3_json"}, f'{WEATHER};{{"name": "now", "parameters": {{}}}}'),
        ({"tool_call_parser": "deepseek_v3"}, V3),
        ({"tool_call_parser": "deepseek_v31"}, V31),
    ],
)
def test_case_34_streamed_calls_have_id_type_and_name_once_and_end_with_tool_calls(settings, said):
    with running(FakeClient(said), enable_auto_tool_choice=True, **settings) as http:
        choice = http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]
        chunks = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    whole = choice["message"]["tool_calls"]
    assert [(call["type"], call["function"]["name"]) for call in whole] == [("function", name) for name in NAMES]
    assert json.loads(whole[0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    joined: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            assert ("id" in call) == ("name" in call["function"]) == ("type" in call) == (call["index"] not in joined)
            joined[call["index"]] = joined.get(call["index"], "") + call["function"]["arguments"]
    assert list(joined.values()) == [call["function"]["arguments"] for call in whole]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "tool_calls"


def test_one_call_is_all_that_is_passed_on_without_parallel_calls():
    with running(FakeClient(HERMES), enable_auto_tool_choice=True, tool_call_parser="hermes") as http:
        message = http.post("/v1/chat/completions", json=CHAT | {"parallel_tool_calls": False}).json()["choices"][0]
    assert [call["function"]["name"] for call in message["message"]["tool_calls"]] == ["weather"]


def test_required_and_named_choices_are_made_by_a_grammar():
    client = FakeClient('[{"name":"now","arguments":{}}]')
    with running(client) as http:

        def grammar(choice, **more):
            answer = http.post("/v1/chat/completions", json=CHAT | {"tool_choice": choice} | more).json()
            assert answer["choices"][0]["finish_reason"] == "tool_calls", answer
            assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
            return client.requests[-1].grammar

        required = grammar("required")
        assert admits(required, f'[{WEATHER_CALL}, {{"name": "now", "arguments": {{}}}}]')
        assert not admits(required, "[]") and not admits(required, "It is sunny.")
        assert not admits(required, WEATHER_CALL.replace("weather", "fly"))
        one = grammar("required", parallel_tool_calls=False)
        assert admits(one, f"[{WEATHER_CALL}]") and not admits(one, f"[{WEATHER_CALL}, {WEATHER_CALL}]")
        named = grammar({"type": "function", "function": {"name": "now"}})
        assert admits(named, '[{"name": "now", "arguments": {}}]') and not admits(named, f"[{WEATHER_CALL}]")


@pytest.mark.parametrize(
    ("body", "settings", "param"),
    [
        ({}, {}, "tool_choice"),
        ({}, {"enable_auto_tool_choice": True}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, {}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, {}, "tool_choice"),
        ({"tool_choice": "maybe"}, {}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, {}, "tools[0].function.name"),
        ({"tools": None, "tool_choice": "required"}, {}, "tool_choice"),
    ],
)
def test_choices_that_cannot_be_had_are_refused(body, settings, param):
    with running(FakeClient(), **settings) as http:
        response = http.post("/v1/chat/completions", json=CHAT | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_without_a_choice_of_tools_calls_are_plain_text():
    with running(FakeClient(HERMES), enable_auto_tool_choice=True, tool_call_parser="hermes") as http:
        choice = http.post("/v1/chat/completions", json=CHAT | {"tool_choice": "none"}).json()["choices"][0]
    assert choice["message"]["content"] == HERMES and choice["finish_reason"] == "stop"


def test_the_template_shows_the_form_of_calls():
    assert choose_parser(None, "... <tool_call> ...") == "hermes"
    assert choose_parser(None, "no tools") is None
    assert choose_parser("llama3_json", "<tool_call>") == "llama3_json"
    assert choose_parser(None, "'<｜tool▁calls▁begin｜>' ... '```json'") == "deepseek_v3"
    assert choose_parser(None, "'<｜tool▁calls▁begin｜>' + name") == "deepseek_v31"


def test_r17_deepseeks_templates_get_arguments_as_text_and_no_empty_content():
    """They put the text between marks, and tell a turn of calls by its content of none."""
    template = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}<｜tool▁calls▁begin｜>"
        "{{ c.function.name + '\n```json\n' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    client = FakeClient()
    client.tokenizer = tiny_tokenizer.__wrapped__()  # one of its own
    client.tokenizer.chat_template = template
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"in": "Köln"}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "noon"}]
    with running(client) as http:
        assert http.post("/v1/chat/completions", json={"messages": turns}).status_code == 200
    text = client.tokenizer.decode(client.requests[-1].prompt[1:])
    assert text == '<｜tool▁calls▁begin｜>now\n```json\n{"in": "Köln"}noon'


def test_references_inside_a_tools_schema_stay_inside_it():
    integer = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    null = json.loads(json.dumps(integer).replace("integer", "null"))
    grammar = call_grammar([{"name": "f", "parameters": integer}, {"name": "g", "parameters": null}], True)
    assert admits(grammar, '[{"name": "f", "arguments": {"a": 7}}]')
    assert admits(grammar, '[{"name": "g", "arguments": {"a": null}}]')
    assert not admits(grammar, '[{"name": "g", "arguments": {"a": 7}}]')

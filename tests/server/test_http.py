"""Routes, errors, limits and streams of the HTTP front, over an engine that says what it is told to."""

import concurrent.futures
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.core.types import InputError
from pagefold.server.limits import OPEN_PATHS, Queue
from pagefold.server.messages import Generate
from pagefold.server.protocol import REFUSED, ChatBody, CompletionBody
from tests.engine.tiny import BOS
from tests.server.fake import FakeClient, events, running, wait_until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server():
    client = FakeClient()
    with running(client) as http:
        http.engine = client
        yield http


@pytest.fixture
def http(server):
    server.engine.reset()
    return server


def refusal(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- what may be asked


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperatur", 1, "temperatur"),
        ("suffix", "x", "suffix"),
        ("best_of", 3, "best_of"),
        ("kv_window", 8, "kv_window"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("temperature", "warm", "temperature"),
        ("temperature", -1, "temperature"),
        ("n", 1.5, "n"),
        ("n", True, "n"),
        ("max_tokens", -1, "max_tokens"),
        ("logit_bias", {"65": "x"}, "logit_bias"),
        ("response_format", {"type": "yaml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("structured_outputs", {"jsn": {}}, "structured_outputs.jsn"),
        ("kv_evict_when", "never", "kv_evict_when"),
        ("guided_choice", [], "guided_choice"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_r19_a_field_that_is_not_honoured_is_refused_by_name(http, path, field, value, param):
    base = CHAT if "chat" in path else {"prompt": "hi"}
    error = refusal(http.post(path, json=base | {field: value}))
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert http.engine.requests == []


def test_fields_that_ask_for_nothing_are_accepted(http):
    nothing = {"user": "me", "metadata": {"a": "b"}, "suffix": None, "best_of": 1, "store": False, "unheard_of": None}
    assert http.post("/v1/completions", json={"prompt": "hi"} | nothing).status_code == 200


def test_sampling_fields_reach_the_engine_and_defaults_of_the_model_fill_in(http):
    http.engine.facts["defaults"] = {"temperature": 0.6, "top_k": 20}
    asked = {"top_k": 3, "stop": "x", "seed": 7, "kv_eviction": "snapkv:kernel=5", "kv_budget": 64, "cache_salt": "s"}
    http.post("/v1/completions", json={"prompt": [1, 2], "priority": -2, "logit_bias": {"65": 1}} | asked)
    http.engine.facts["defaults"] = {}
    request = http.engine.requests[0]
    sampling = {key: value for key, value in asked.items() if key != "cache_salt"}
    assert request.prompt == [1, 2] and request.cache_salt == "s" and request.priority == -2
    assert request.sampling == sampling | {"temperature": 0.6, "max_tokens": 16, "n": 1, "logit_bias": {"65": 1.0}}


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
            "json_schema",
            '{"type": "null"}',
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"choice": ["a.", "b"]}}, "regex", "a\\.|b"),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
    ],
)
def test_every_way_to_ask_for_a_form_becomes_a_grammar(http, asked, kind, text):
    assert http.post("/v1/chat/completions", json=CHAT | asked).status_code == 200
    grammar = http.engine.requests[0].grammar
    assert (grammar.kind, grammar.text) == (kind, text)


def test_two_forms_at_once_are_refused(http):
    two = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    assert refusal(http.post("/v1/chat/completions", json=CHAT | two))["param"] == "guided_regex"


def test_a_refusal_of_the_engine_names_the_field_that_the_client_wrote(http):
    http.engine.refuse = InputError("response_format", "does not compile")
    error = refusal(http.post("/v1/completions", json={"prompt": "a", "guided_json": {"type": "x"}, "stream": True}))
    assert error["param"] == "guided_json"
    assert error["message"] == "guided_json: does not compile"


def test_bodies_that_are_no_json_object_are_refused(http):
    for body in (b'{"a', b"[1]", b"", b"null"):
        refusal(http.post("/v1/completions", content=body))


def test_messages_are_checked_to_the_part(http):
    def param(*messages):
        return refusal(http.post("/v1/chat/completions", json={"messages": list(messages)}))["param"]

    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert param(CHAT["messages"][0], image) == "messages[1].content"
    assert param({"role": "king", "content": "x"}) == "messages[0].role"
    assert param({"role": "user"}) == "messages[0]"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert param({"role": "assistant", "tool_calls": [call]}) == "messages[0].tool_calls[0].function.arguments"


def test_parts_of_text_and_the_developer_role_reach_the_template(http):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]}
    http.post("/v1/chat/completions", json=body)
    text = http.engine.tokenizer.decode(http.engine.requests[0].prompt, skip_special_tokens=False)
    assert "system\nd" in text and "user\na\nb" in text


# ---- answers


def test_usage_tells_cached_tokens_and_what_became_of_the_rows(http):
    usage = http.post("/v1/completions", json={"prompt": "abc", "n": 2}).json()["usage"]
    kv = usage.pop("kv")
    assert usage == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (kv["rows_kept"], kv["rows_evicted"], kv["compactions"], kv["bytes"]) == (12, 8, 2, 1280)


def test_a_request_that_fails_in_the_engine_is_told_so_in_both_modes(http):
    http.engine.fail = "out of luck"
    assert "out of luck" in refusal(http.post("/v1/completions", json={"prompt": "a"}), 500)["message"]
    assert refusal(http.post("/v1/completions", json={"prompt": "a", "stream": True}), 500)


def test_an_error_in_the_middle_of_a_stream_is_an_event(http):
    http.engine.delay = 0.02
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 6}) as response:
        lines = response.iter_lines()
        next(lines)
        http.engine.fail = "out of luck"
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert "out of luck" in json.loads(rest[-2])["error"]["message"]


def test_abort_ends_a_request_by_its_id(http):
    http.engine.delay, http.engine.say = 0.01, "x" * 400
    body = {"prompt": ["a", "b"], "stream": True, "max_tokens": 400}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        id = json.loads(next(lines))["id"]
        assert http.post("/abort", json={"request_id": [id, "nobody"]}).json() == {"aborted": [id]}
        *_, error, done = lines
    assert json.loads(error)["error"]["code"] == "aborted" and done == "[DONE]"


def test_tokenize_and_detokenize_are_inverse(http):
    answer = http.post("/tokenize", json={"prompt": "a😀", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 6
    assert answer["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": answer["tokens"][1:]}).json() == {"prompt": "a😀"}
    assert refusal(http.post("/detokenize", json={"tokens": [-1]}))["param"] == "tokens"
    refusal(http.post("/tokenize", json={"prompt": "a", "messages": CHAT["messages"]}))


def test_tokenize_renders_a_conversation_as_chat_does(http):
    http.post("/v1/chat/completions", json=CHAT)
    assert http.post("/tokenize", json=CHAT).json()["tokens"] == http.engine.requests[0].prompt


def test_token_ids_come_when_asked_for_in_both_modes(http):
    """Those of a continuation bit by bit, of the prompt once; text held back is no reason to hold them back."""
    http.engine.say = "é😀"
    body = {"prompt": [BOS, 1], "return_token_ids": True, "n": 2}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    ids = http.engine.tokenizer.encode_plain("é😀")
    assert [choice["token_ids"][:-1] for choice in whole] == [ids, ids]
    assert [choice["prompt_token_ids"] for choice in whole] == [[BOS, 1]] * 2
    chunks = [
        c for chunk in events(http.post("/v1/completions", json=body | {"stream": True})) for c in chunk["choices"]
    ]
    for i in range(2):
        own = [chunk for chunk in chunks if chunk["index"] == i]
        assert [id for chunk in own for id in chunk["token_ids"]] == whole[i]["token_ids"]
        assert len(own) == len(ids) + 1
        assert [chunk.get("prompt_token_ids") for chunk in own] == [[BOS, 1]] + [None] * len(ids)
    assert "token_ids" not in http.post("/v1/completions", json={"prompt": [1]}).json()["choices"][0]


def test_a_model_without_a_tokenizer_is_served_by_ids():
    client = FakeClient()
    client.tokenizer = None
    with running(client) as http:
        answer = http.post("/v1/completions", json={"prompt": [1, 2], "logprobs": 0, "max_tokens": 1}).json()
        assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT), ("/tokenize", CHAT)):
            assert "no tokenizer" in refusal(http.post(path, json=body))["message"]


def test_behind_a_proxy_that_strips_a_path_the_same_routes_are_open():
    with running(FakeClient(), root_path="/llm", api_key="k") as http:
        assert http.get("/health").status_code == 200
        refusal(http.get("/v1/models"), 401)
        assert http.get("/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_browsers_of_allowed_origins_may_call():
    with running(FakeClient(), allowed_origins="https://a.example", api_key="k") as http:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        answer = http.options("/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = http.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_models_are_served_under_their_names_only():
    with running(FakeClient(), served_model_name=("first", "second/x")) as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["first", "second/x"]
        assert http.get("/v1/models/second/x").json()["id"] == "second/x"
        assert http.post("/v1/completions", json={"prompt": "a", "model": "second/x"}).json()["model"] == "second/x"
        assert refusal(http.post("/v1/completions", json={"prompt": "a", "model": "tiny"}), 404)["param"] == "model"


def test_paths_and_methods_that_do_not_exist_are_error_objects(http):
    refusal(http.get("/v1/nothing"), 404)
    refusal(http.get("/v1/completions"), 405)


def test_the_openapi_document_describes_every_body(http):
    document = http.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["$ref"].rsplit("/", 1)[-1] in document["components"]["schemas"]


def test_metrics_have_vllms_names_under_either_prefix(http):
    http.post("/v1/completions", json={"prompt": "a"})
    text = http.get("/metrics").text
    for line in (
        "pagefold:num_requests_running{",
        "pagefold:num_requests_waiting{",
        'pagefold:kv_cache_usage_perc{model_name="tiny"} 0.3',
        'pagefold:prefix_cache_hits_total{model_name="tiny"} 8.0',
        'pagefold:num_preemptions_total{model_name="tiny"} 1.0',
        'pagefold:request_success_total{finished_reason="stop",model_name="tiny"} 2.0',
        "pagefold:time_to_first_token_seconds_bucket{",
        "pagefold:inter_token_latency_seconds_bucket{",
        "pagefold:e2e_request_latency_seconds_count{",
        "pagefold:cache_config_info{",
        'pagefold:kv_evicted_tokens_total{model_name="tiny"} 4.0',
        'pagefold:kv_compactions_total{model_name="tiny"} 2.0',
        'pagefold:kv_tokens_kept{model_name="tiny"} 6.0',
        'pagefold:iteration_tokens_total_bucket{le="8.0",model_name="tiny"} 6.0',
        'pagefold:iteration_tokens_total_count{model_name="tiny"} 7.0',
        'pagefold:kv_compaction_seconds_sum{model_name="tiny"} 0.25',
        'pagefold:kv_blocks_freed_by_eviction_total{model_name="tiny"} 3.0',
        'pagefold:kv_cow_copies_total{model_name="tiny"} 1.0',
        'pagefold:num_requests_waiting_by_reason{model_name="tiny",reason="grammar"} 0.0',
        "pagefold:request_queue_time_seconds_bucket{",
        "pagefold:request_prefill_time_seconds_bucket{",
    ):
        assert line in text, line
    with running(FakeClient(), metrics_prefix="vllm") as other:
        assert "vllm:num_requests_running{" in other.get("/metrics").text


def test_the_page_and_its_state(http):
    assert "<html" in http.get("/ui").text
    state = http.get("/ui/state").json()
    assert state["pool"]["tiers"] == [{"name": "hot", "codes_base64": "AgIBAA=="}]
    assert state["stats"]["page_size"] == 4
    assert http.post("/reset_prefix_cache").json() == {"reset": True}
    with running(FakeClient(), disable_ui=True) as other:
        assert other.get("/ui").status_code == 404


# ---- limits


def test_a_full_queue_is_429_and_says_when_to_come_back():
    client = FakeClient("x" * 300)
    client.delay = 0.01
    with running(client, max_queue=1) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 300}) as first:
            lines = first.iter_lines()  # kept: without it the response is closed
            next(lines)
            response = http.post("/v1/completions", json={"prompt": "b"})
            assert refusal(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        wait_until(lambda: not client.running)
        client.delay = 0
        assert http.post("/v1/completions", json={"prompt": "b"}).status_code == 200


def test_a_request_with_more_continuations_than_the_queue_holds_still_gets_in():
    queue = Queue(2)
    with queue.enter(5):
        assert queue.num_inside == 5
    assert queue.num_inside == 0


def test_a_body_beyond_the_limit_is_413_with_and_without_its_length():
    with running(FakeClient(), max_request_bytes=1000) as http:
        body = json.dumps({"prompt": "a" * 2000}).encode()
        refusal(http.post("/v1/completions", content=body), 413)
        refusal(http.post("/v1/completions", content=iter([body[:900], body[900:]])), 413)
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_large_prompts_do_not_hold_up_others(http):
    """A megabyte is tokenised in a thread: health checks go on meanwhile."""
    big = {"prompt": "word " * 400_000}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(http.post, "/v1/completions", json=big)
        answered = 0
        while not slow.done():
            assert http.get("/health").status_code == 200
            answered += 1
        assert refusal(slow.result())["code"] == "context_length_exceeded"
    assert answered > 2


# ---- the engine dies


def test_death_of_the_engine_reaches_everyone():
    client = FakeClient("x" * 400)
    client.delay = 0.01
    with running(client) as http:
        assert http.get("/health").status_code == 200
        waiting: list = []
        ask = lambda: waiting.append(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 400}))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(client.running) == 3)
        client.dead = "it fell over"
        assert "it fell over" in refusal(http.get("/health"), 503)["message"]
        for thread in threads:
            thread.join(timeout=5)
        assert [refusal(response, 503)["code"] for response in waiting] == ["engine_dead"] * 3
        refusal(http.post("/v1/completions", json={"prompt": "a"}), 503)
        assert "time_to_first_token" in http.get("/metrics").text


def test_an_error_that_nobody_foresaw_is_an_error_object_without_its_words(http, monkeypatch):
    def fail(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr("pagefold.server.app.token_text", fail)
    error = refusal(http.post("/tokenize", json={"prompt": "a", "return_token_strs": True}), 500)
    assert error["code"] == "internal_error" and "secret" not in error["message"]


def test_open_paths_are_few():
    assert OPEN_PATHS == ("/health", "/ping", "/version", "/ui")


def test_events_of_a_stream_share_id_model_and_object(http):
    chunks = events(http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert {(c["id"], c["model"], c["object"]) for c in chunks} == {(chunks[0]["id"], "tiny", "chat.completion.chunk")}
    assert [c["choices"][0]["delta"].get("role") for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert isinstance(http.engine.requests[0], Generate)


FIELDS = sorted(set(ChatBody.model_fields) | set(CompletionBody.model_fields) | set(REFUSED) | {"stream_option"})
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content"]), inner),
    max_leaves=6,
)


@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.dictionaries(st.sampled_from(FIELDS), JUNK))
def test_r16_no_body_makes_the_server_fail(server, path, body):
    server.engine.reset()
    base = CHAT if "chat" in path else {"prompt": "hi"}
    response = server.post(path, content=json.dumps(base | body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]

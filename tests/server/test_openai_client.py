"""The `openai` package against a whole server with a real engine: what its strict users rely on."""

import asyncio
import json

import openai
import pytest

from tests.server.live import live

# choices only: what a random model writes into free text never ends
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "deep": {"type": "boolean"}},
    "required": ["unit", "deep"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of today.", "parameters": SCHEMA}}]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live(tmp_path_factory.mktemp("openai"), api_key="secret", served_model_name="tiny") as server:
        server.http.headers["Authorization"] = "Bearer secret"
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_wrong_key_is_an_authentication_error(server):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="guess", max_retries=0).models.list()


def test_streamed_chat_equals_whole_chat(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, usages = ["", ""], [None, None], []
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(usages) == 1
    assert usages[0].completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_async_clients_are_served_side_by_side(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            ask = lambda i: client.completions.create(model="tiny", prompt=[i + 1, 2, 3], max_tokens=5, temperature=0)  # noqa: E731
            return await asyncio.gather(*(ask(i) for i in range(6)))

    assert [answer.usage.prompt_tokens for answer in asyncio.run(ask())] == [3] * 6


def test_logprobs_have_the_shape_of_the_package(client):
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
    )
    content = chat.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [2, 2, 2]
    assert all(token.logprob <= 0 and token.bytes is not None for token in content)
    text = client.completions.create(model="tiny", prompt="ab", max_tokens=0, echo=True, logprobs=1)
    assert text.choices[0].logprobs.token_logprobs[0] is None
    assert len(text.choices[0].logprobs.tokens) == 3 and text.choices[0].text == "ab"


def test_json_schema_makes_json(client):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form, temperature=0)
    assert set(json.loads(answer.choices[0].message.content)) == {"unit", "deep"}
    assert answer.choices[0].finish_reason == "stop"


def test_required_tools_are_called_in_both_modes(client):
    options = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "temperature": 0,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    choice = client.chat.completions.create(**options).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"unit", "deep"}
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"
    history = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=2).choices


def test_errors_are_the_packages_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_p=3)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_folding_is_asked_for_per_request_and_told_in_the_usage(server, client):
    fold = {"kv_eviction": "keydiff", "kv_budget": 16, "ignore_eos": True}
    options = {"model": "tiny", "prompt": "a", "max_tokens": 60, "temperature": 0}
    kept = client.completions.create(**options, extra_body=fold).usage.kv
    assert kept["rows_evicted"] > 0 and kept["compactions"] > 0
    assert kept["rows_kept"] + kept["rows_evicted"] == kept["tokens"]
    assert client.completions.create(**options, extra_body={"ignore_eos": True}).usage.kv["rows_evicted"] == 0
    with pytest.raises(openai.BadRequestError, match="query windows") as caught:  # the engine was started without
        client.completions.create(**options, extra_body={"kv_eviction": "snapkv"})
    assert caught.value.param == "kv_eviction"


# ---- cases that need the real engine, with the same server


def error(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_case_22_after_an_empty_prompt_the_next_request_works(server):
    for body in ({"prompt": []}, {"prompt": [[]]}):
        assert error(server.http.post("/v1/completions", json=body))["param"] == "prompt"
    assert server.http.post("/v1/completions", json={"prompt": [""], "max_tokens": 1}).status_code == 200  # from BOS


def test_case_23_the_context_is_filled_to_the_last_token_and_no_further(server):
    ask = lambda length: server.http.post("/v1/completions", json={"prompt": [7] * length, "max_tokens": 10**9})  # noqa: E731
    answer = ask(255).json()
    assert answer["usage"]["completion_tokens"] == 1
    for length in (256, 257):
        refused = error(ask(length))
        assert refused["code"] == "context_length_exceeded"
        assert str(length) in refused["message"] and "256" in refused["message"]


@pytest.mark.parametrize(
    "body", [{"prompt": [260]}, {"prompt": [-1]}, {"prompt": [2**63]}, {"prompt": "a", "logit_bias": {"999999": 1}}]
)
def test_case_27_ids_outside_of_the_vocabulary_leave_the_engine_alive(server, body):
    assert error(server.http.post("/v1/completions", json=body))["param"] == next(reversed(body))
    assert server.http.get("/health").status_code == 200


def test_case_28_more_continuations_than_run_at_once_come_in_waves(server):
    answer = server.http.post("/v1/completions", json={"prompt": "a", "n": 9, "max_tokens": 3}).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(9))
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_case_36_nothing_goes_on_when_the_client_has_left(server, stream):
    import httpx

    from tests.server.fake import wait_until

    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 8, "stream": stream}  # four run, four wait
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, headers=headers) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.05)

    def idle():
        stats = server.stats()
        return stats["running"] == stats["waiting"] == stats["kv"][0]["used"] == 0

    wait_until(idle)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
            "response_format",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * (2 << 20)]}}, "guided_json"),
    ],
)
def test_cases_38_39_a_bad_grammar_is_refused_and_never_let_go(server, form, param):
    body = {"messages": MESSAGES, "max_tokens": 5} | form
    assert error(server.http.post("/v1/chat/completions", json=body))["param"] == param
    assert server.http.get("/health").status_code == 200


def test_case_39_a_pattern_with_a_needless_escape_is_kept(server):
    body = {"messages": MESSAGES, "guided_json": {"type": "string", "pattern": "^a\\!$"}}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == '"a!"'


@pytest.mark.smollm2
def test_a_real_model_answers_in_words_in_a_form_and_folded(smollm2, tmp_path):
    """Both with every row kept and with few it knows the answer, and the usage tells the two apart."""
    options = {"num_pages": 2000, "max_model_len": 512, "kv_eviction": "snapkv", "kv_evict_when": "pressure"}
    question = [{"role": "user", "content": "Name the capital of France, and tell me a little about it."}]
    with (
        live(tmp_path, "smollm2", **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client,
    ):

        def ask(**more):
            return client.chat.completions.create(
                model="smollm2", messages=question, temperature=0, max_tokens=40, **more
            )

        full, folded = ask(), ask(extra_body={"kv_budget": 32, "kv_evict_when": "always"})
        assert "Paris" in full.choices[0].message.content and "Paris" in folded.choices[0].message.content
        assert full.usage.kv["rows_evicted"] == 0 < folded.usage.kv["rows_evicted"]
        assert folded.usage.prompt_tokens_details.cached_tokens > 0
        city = {"city": {"type": "string", "maxLength": 20}}
        schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        assert "city" in json.loads(ask(response_format=form).choices[0].message.content)
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": schema}}]
        (call,) = ask(tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "look_up" and "city" in json.loads(call.function.arguments)

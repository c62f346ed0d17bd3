"""What clients may send, field by field. Types are checked here; ranges of sampling fields by `SamplingParams`.

A field that is accepted is honoured. One that cannot be is refused by name: see `REFUSED`. `INERT` ones say nothing
about the answer and are taken without effect. A null means that the field is not there.
"""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

INERT = ("user", "metadata", "safety_identifier", "prompt_cache_key")

# What a field is refused for, and the values that ask for nothing
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "suffix": ("text cannot be filled in before a suffix", ()),
    "best_of": ("is not supported; ask for n answers and choose", (1,)),
    "functions": ("is superseded by tools", ()),
    "function_call": ("is superseded by tool_choice", ("none",)),
    "audio": ("only text is produced", ()),
    "modalities": ("only text is produced", (["text"],)),
    "prediction": ("is not supported", ()),
    "web_search_options": ("is not supported", ()),
    "verbosity": ("is not supported", ("medium",)),
    "store": ("nothing is stored", (False,)),
    "service_tier": ("there is one tier", ("auto", "default")),
    "use_beam_search": ("is not supported", (False,)),
    "length_penalty": ("belongs to beam search, which is not supported", (1, 1.0)),
    "truncate_prompt_tokens": ("prompts are never cut silently; send a shorter one", ()),
    "chat_template": ("is set for the whole server by --chat-template", ()),
    "kv_buffer": ("is set for the whole engine by --kv-buffer", ()),
    "kv_window": ("is set for the whole engine by --kv-window", ()),
    "kv_window_stride": ("is set for the whole engine by --kv-window-stride", ()),
    "kv_sink_tokens": ("is set for the whole engine by --kv-sink-tokens", ()),
    "kv_format": ("is set for the whole engine by --kv-format", ()),
}


def refused(field: str, why: str) -> PydanticCustomError:
    """For validators of a whole model: `field` is one of it, which pydantic cannot know."""
    return PydanticCustomError("refused", "{why}", {"why": why, "below": [field]})


class Body(BaseModel):
    """A request's body. Unknown fields are errors that name the closest known ones."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _sift(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a JSON object")
        known = {field.alias or name for name, field in cls.model_fields.items()}
        sifted = {}
        for name, value in data.items():
            if value is None or name in INERT:
                continue
            if name in known:
                sifted[name] = value
            elif name not in REFUSED:
                near = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
                hint = f"did you mean {' or '.join(near)}?" if near else "it would be ignored"
                raise refused(name, f"unknown field; {hint}")
            elif value not in REFUSED[name][1]:
                raise refused(name, REFUSED[name][0])
        return sifted


Number = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Body):
    """One way to say what the answer must look like."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")  # a structural tag has further fields

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """What chats and completions share. Defaults of None mean: the server's, from the model's generation_config."""

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    prompt_logprobs: int | None = None

    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None

    kv_eviction: str | None = None
    kv_budget: int | None = None
    kv_budget_ratio: Number | None = None
    kv_evict_when: str | None = None
    kv_keep_turns: bool | None = None

    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "is only for stream: true")
        return self


def _one_kind(prompt: Any) -> Any:
    """A clearer error than those of all branches of the union."""
    kinds = {type(item) for item in prompt} if isinstance(prompt, list) else {type(prompt)} - {int, list}
    if len(kinds) > 1 or not kinds <= {str, int, list} or not isinstance(prompt, (str, list)):
        raise ValueError("must be text, a list of token ids, or a list of either")
    return prompt


class CompletionBody(GenerationBody):
    prompt: Annotated[str | list[int] | list[str] | list[list[int]], BeforeValidator(_one_kind)]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    return_token_ids: bool = False


def _one_text(content: Any) -> Any:
    """Parts of text joined by line breaks; whatever else is in the list is refused."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"only parts of type 'text' are understood, got {kind!r}")
        if not isinstance(part.get(part["type"]), str):
            raise ValueError(f"a part of type {part['type']!r} needs the field {part['type']!r}")
    return "\n".join(part[part["type"]] for part in content)


class FunctionCall(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One turn. Further fields are the chat template's business."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_one_text)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        other = self.tool_calls or self.reasoning_content or self.reasoning
        if self.content is None and not (self.role == "assistant" and other):
            raise ValueError("content is missing")
        return self


class Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class TemplateBody(Body):
    """What a chat template takes besides the messages."""

    tools: list[Tool] | None = Field(None, max_length=128)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


class ChatBody(TemplateBody, GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True


class TokenizeBody(TemplateBody):
    """Either text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


class AbortBody(Body):
    """`request_id` is the `id` of an answer, or of its chunks."""

    request_id: str | list[str]

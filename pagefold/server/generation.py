"""From a checked request to an answer, the same way for chats and completions.

body -> Job (prompts as ids, sampling, one Choice per continuation) -> engine -> deltas -> Choice -> chunks or answer
"""

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pagefold.core.types import InputError, SamplingParams
from pagefold.engine.grammar import FIELDS, form_of
from pagefold.models.tokenizer import Tokenizer
from pagefold.server.client import EngineClient, EngineDead
from pagefold.server.errors import ApiError, as_api_error
from pagefold.server.limits import Queue
from pagefold.server.logs import log_event
from pagefold.server.messages import Delta, Generate, Grammar
from pagefold.server.metrics import Metrics, Timeline
from pagefold.server.protocol import GenerationBody, ResponseFormat
from pagefold.server.settings import ServerSettings
from pagefold.server.stream import Departure, EventStream, event, merge

T = TypeVar("T")
B = TypeVar("B", bound=GenerationBody)
Batch = list[tuple[int, Delta]]  # what came at once: (index of the choice, delta)

MAX_CONTINUATIONS = 4096  # of one request: prompts times n
THREAD_ABOVE = 4096  # characters; less is done before a thread has started


class Choice(Protocol):
    """One continuation, as its route shows it."""

    def push(self, delta: Delta) -> dict[str, Any] | None:
        """Take what is new; returns a chunk's choice, None if there is nothing to show yet."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer's choice, when all has been pushed."""
        ...


class Usage:
    """Counts tokens; each prompt once, however many continuations it has."""

    def __init__(self, prompts: Sequence[Sequence[int]]):
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        self._cached = [0] * len(prompts)
        self.kv: dict[str, float] = {}

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    def add(self, prompt: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self._cached[prompt] = max(self._cached[prompt], delta.num_cached_tokens)
        if delta.kv is not None:
            for name, value in delta.kv.items():
                self.kv[name] = self.kv.get(name, 0) + value

    def as_openai(self) -> dict[str, Any]:
        """`kv` sums over the continuations that have ended."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        } | ({"kv": self.kv} if self.kv else {})


@dataclass
class Job:
    """What one call of the API asks of the engine.

    kind      prefix of the id
    prompts   token ids; `n` continuations of each
    grammar   with the field that asked for it
    choices   n of the first prompt, then n of the next one, ...
    objects   how OpenAI calls the answer, and a chunk of it
    """

    kind: str
    body: GenerationBody
    prompts: list[list[int]]
    sampling: dict[str, Any]
    grammar: tuple[str, Grammar] | None
    choices: list[Choice]
    objects: tuple[str, str]

    def __post_init__(self):
        self.id = f"{self.kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.usage = Usage(self.prompts)
        self.timelines: list[Timeline] = []

    @property
    def engine_ids(self) -> list[str]:
        return [self.id] if len(self.prompts) == 1 else [f"{self.id}-{i}" for i in range(len(self.prompts))]

    def summary(self) -> dict[str, Any]:
        """For the log: nothing of what was said."""
        first, usage = self.timelines[0], self.usage
        return {
            "id": self.id,
            "finish": ",".join(sorted({timeline.finish_reason for timeline in self.timelines})),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "first_token_s": first.first_token_s,
            "total_s": time.perf_counter() - first.start,
            **{f"kv_{name}": value for name, value in usage.kv.items()},
        }


@dataclass
class Front:
    """What all routes share. `tokenizer` may be None: then only token ids are served.

    jobs   that are being served, by id
    """

    client: EngineClient
    settings: ServerSettings
    tokenizer: Tokenizer | None
    models: tuple[str, ...]
    metrics: Metrics
    jobs: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self):
        self.queue = Queue(self.settings.max_queue)

    # ---- what a request asks for

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"model: {model!r} is not served here, only {known}", "model", "model_not_found")

    def sampling(self, body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        """Fields of `SamplingParams`, the model's defaults filled in. Raises InputError for one out of range."""
        asked = {f.name: getattr(body, f.name, None) for f in dataclasses.fields(SamplingParams)}
        asked |= {"logprobs": logprobs, "structured_outputs": None}  # forms have many fields: see `grammar_of`
        defaults = self.client.facts["defaults"] if self.settings.generation_config == "auto" else {}
        values = defaults | {k: v for k, v in asked.items() if v is not None}
        values["max_tokens"] = max_tokens
        SamplingParams(**values)
        return values

    def check_count(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > MAX_CONTINUATIONS:
            message = f"{num_prompts} prompts times {n} are {num_prompts * n} continuations"
            raise InputError("n", f"{message}, must be at most {MAX_CONTINUATIONS}")

    def check_prompts(self, prompts: Sequence[Sequence[int]], param: str, max_tokens: int | None) -> None:
        """Empty ones, ids that are none, and those that leave the context no room."""
        limit = self.client.facts["max_model_len"]
        for prompt in prompts:
            if not prompt:
                raise InputError(param, "is empty: there must be at least one token")
            self.check_ids(prompt, param)
            if len(prompt) + (max_tokens != 0) > limit:
                message = f"{param}: has {len(prompt)} tokens; the context holds {limit}, one of them generated"
                raise ApiError(400, message, param, "context_length_exceeded")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        vocab = self.client.facts["vocab_size"]
        if not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(id for id in ids if not 0 <= id < vocab)
            raise InputError(param, f"token id {wrong} must be in [0, {vocab})")

    async def in_thread(self, size: int, work: Callable[[], T]) -> T:
        """`work` without holding up the event loop, if its input is large."""
        return work() if size < THREAD_ABOVE else await asyncio.to_thread(work)

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(param, "is text, and this model has no tokenizer; send token ids to /v1/completions")
        return self.tokenizer

    # ---- the answer

    async def answer(self, request: Request, body: B, make_job: Callable[["Front", B], Awaitable[Job]]) -> Response:
        """Serve what `make_job` makes of `body`. If there is no room, ApiError 429 comes before that costs anything."""
        arrival = time.perf_counter()
        self.queue.check()
        job = await make_job(self, body)
        job.timelines = [Timeline(arrival) for _ in job.choices]
        return await self._serve(request, job)

    async def _serve(self, request: Request, job: Job) -> Response:
        """The stack holds what has to be undone however it ends."""
        if self.client.dead is not None:
            raise EngineDead(self.client.dead)
        async with AsyncExitStack() as stack:
            stack.enter_context(self.queue.enter(len(job.choices)))
            stack.enter_context(self._registered(job))
            departure = await stack.enter_async_context(Departure(request.receive))
            batches = await stack.enter_async_context(aclosing(self._batches(job)))
            if not job.body.stream:
                answer = await departure.race(self._collect(job, batches))
                return Response(msgspec.json.encode(answer), media_type="application/json")
            first = await departure.race(anext(batches))  # a refusal comes before it, and then the status is not 200
            return EventStream(self._events(job, first, batches), departure, stack.pop_all())

    @contextmanager
    def _registered(self, job: Job) -> Iterator[None]:
        self.jobs[job.id] = job
        try:
            yield
        finally:
            del self.jobs[job.id]
            for timeline in job.timelines:
                self.metrics.finished(timeline)
            self.metrics.counted(job.usage, job.body)
            if not self.settings.disable_log_requests:
                log_event("request", **job.summary())

    async def _batches(self, job: Job) -> AsyncGenerator[Batch]:
        """What comes of the choices. Raises InputError, EngineDead, or ApiError if a continuation failed."""
        n = len(job.choices) // len(job.prompts)
        body = job.body
        requests = [
            Generate(id, prompt, job.sampling, body.priority, body.cache_salt, job.grammar and job.grammar[1])
            for id, prompt in zip(job.engine_ids, job.prompts, strict=True)
        ]
        async with _blaming(job), aclosing(merge([self.client.generate(r) for r in requests])) as stream:
            async for i, deltas in stream:
                batch = []
                for delta in deltas:
                    if delta.finish_reason == "abort":
                        if batch:
                            yield batch
                        raise _aborted(delta)
                    job.usage.add(i, delta)
                    self.metrics.observe(job.timelines[i * n + delta.index], delta)
                    batch.append((i * n + delta.index, delta))
                yield batch

    async def _collect(self, job: Job, batches: AsyncGenerator[Batch]) -> dict[str, Any]:
        async for batch in batches:
            for i, delta in batch:
                job.choices[i].push(delta)
        choices = [choice.whole() for choice in job.choices]
        return self._frame(job, job.objects[0], choices) | {"usage": job.usage.as_openai()}

    async def _events(self, job: Job, first: Batch, batches: AsyncGenerator[Batch]) -> AsyncGenerator[bytes]:
        """Of each batch, the events that it makes."""
        options = job.body.stream_options
        always = options is not None and options.continuous_usage_stats
        wanted = options is not None and (options.include_usage or always)
        # of all chunks of an answer only the choices differ: the rest is put into JSON once
        empty = msgspec.json.encode(self._frame(job, job.objects[1], []))
        start, end = empty.removesuffix(b"]}"), b',"usage":null}' if wanted else b"}"

        def chunk(choices: bytes, with_usage: bool) -> bytes:
            usage = b',"usage":' + msgspec.json.encode(job.usage.as_openai()) + b"}" if with_usage else end
            return event(start + choices + b"]" + usage)

        try:
            batch: Batch | None = first
            while batch is not None:
                shown = [job.choices[i].push(delta) for i, delta in batch]
                if events := [chunk(msgspec.json.encode(choice), always) for choice in shown if choice is not None]:
                    yield b"".join(events)
                batch = await anext(batches, None)
        except Exception as error:
            yield event(msgspec.json.encode(as_api_error(error).body()))
            return
        if options is not None and options.include_usage:
            yield chunk(b"", True)

    def _frame(self, job: Job, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = job.body.model or self.models[0]
        return {"id": job.id, "object": object, "created": job.created, "model": model, "choices": choices}


def _aborted(delta: Delta) -> ApiError:
    if delta.error is not None:
        return ApiError(500, f"the engine could not go on with this request: {delta.error}")
    return ApiError(499, "the request was aborted", code="aborted")


@asynccontextmanager
async def _blaming(job: Job) -> AsyncGenerator[None]:
    """The engine knows grammars by their kind; the client is told the field that asked for it."""
    try:
        yield
    except InputError as error:
        if job.grammar is None or error.field not in FIELDS.values():
            raise
        raise InputError(job.grammar[0], str(error).removeprefix(f"{error.field}: ")) from None


def grammar_of(body: GenerationBody) -> tuple[str, Grammar] | None:
    """What the answer must look like, and the field that says so. Raises InputError if two say so."""
    asked: list[tuple[str, Grammar]] = []
    if body.response_format is not None and body.response_format.type != "text":
        asked.append(("response_format", _from_response_format(body.response_format)))
    ways: list[tuple[str, str, Any]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    ]
    if (structured := body.structured_outputs) is not None:
        ways += [
            (f"structured_outputs.{way}", way, getattr(structured, attribute))
            for way, attribute in (
                *(("json", "json_"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar")),
                *(("json_object", "json_object"), ("structural_tag", "structural_tag")),
            )
        ]
    asked += [(field, Grammar(*form_of(field, way, value))) for field, way, value in ways if value not in (None, False)]
    if len(asked) > 1:
        raise InputError(asked[1][0], f"cannot be combined with {asked[0][0]}: only one can say what the answer is")
    return asked[0] if asked else None


def _from_response_format(asked: ResponseFormat) -> Grammar:
    if asked.type == "json_object":
        return Grammar("json_object", "")
    if asked.type == "structural_tag":
        return Grammar("structural_tag", json.dumps({"type": asked.type} | (asked.model_extra or {})))
    value = getattr(asked, asked.type)
    if value is None:
        raise InputError(f"response_format.{asked.type}", f"is missing, and the type is {asked.type}")
    return Grammar(asked.type, value if isinstance(value, str) else json.dumps(value.schema_))

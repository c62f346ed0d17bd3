"""An engine that says what it is told to, behind a real HTTP server in a thread."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from pagefold.core.types import InputError, SamplingParams
from pagefold.engine.detokenize import Detokenizer
from pagefold.models.tokenizer import Tokenizer
from pagefold.server.app import create_app, make_server
from pagefold.server.client import EngineDead
from pagefold.server.messages import Delta, Generate, Logprobs
from pagefold.server.settings import ServerSettings
from tests.engine.tiny import EOS, tiny_tokenizer

KV = {
    "tokens": 10,
    "rows_kept": 6.0,
    "rows_evicted": 4.0,
    "compactions": 1,
    "bytes": 640,
    "peak_bytes": 1024,
    "preemptions": 0,
}
STATS: dict[str, Any] = {
    "waiting": 0,
    "swapped": 0,
    "compiling": 0,
    "kv": [{"tier": "hot", "format": "fp32", "used": 3, "idle": 1, "total": 10, "bytes_per_page": 64}],
    "page_size": 4,
    "prefix_cache": {"queries": 20, "hits": 8, "entries": 2},
    "preemptions": 1,
    "tokens_lost": 5,
    "folds": 2,
    "compaction": {"runs": 2, "seconds": 0.25, "pages_freed": 3, "pages_copied": 1},
    "live": {"tokens": 10, "rows_kept": 6},
    "rows": {"kept": 6, "evicted": 4},
    "tokens": {"prompt": 30, "cached": 8, "generated": 40},
    "steps": 7,
    "step_tokens": {"bounds": [1, 8], "counts": [4, 2, 1], "sum": 30},
    "step_seconds": 0.5,
    "last_step_seconds": 0.01,
    "finished": {"stop": 2},
    "refused": 0,
}


class FakeClient:
    """As `EngineClient`: continues every prompt with a script, a byte a token, and then EOS.

    say        text or ids, or a function of (request, index of the continuation) that gives them
    delay      seconds between tokens
    requests   what was asked for so far
    left       ids of requests whose client left before the end
    """

    def __init__(self, say: Any = "hello"):
        self.tokenizer: Tokenizer | None = tiny_tokenizer()
        self.facts: dict[str, Any] = {"max_model_len": 512, "vocab_size": 260, "options": [], "memory": []}
        self.facts["defaults"] = {}
        self.reset(say)

    def reset(self, say: Any = "hello") -> None:
        self.say, self.delay = say, 0.0
        self.refuse: InputError | None = None
        self.fail: str | None = None
        self.dead: str | None = None
        self.requests: list[Generate] = []
        self.left: list[str] = []
        self.running: set[str] = set()
        self._aborted: set[str] = set()

    async def generate(self, request: Generate) -> AsyncIterator[list[Delta]]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        sampling = SamplingParams(**request.sampling)
        choices = [_Choice(self, request, sampling, index) for index in range(sampling.n)]
        self.running.add(request.id)
        try:
            while choices:
                for choice in list(choices):
                    await asyncio.sleep(self.delay)
                    if self.dead is not None:
                        raise EngineDead(self.dead)
                    if self.fail is not None:
                        yield [Delta(request.id, choice.index, finish_reason="abort", error=self.fail, last=True)]
                    if request.id in self._aborted:
                        self.running.discard(request.id)
                        yield [Delta(request.id, choice.index, finish_reason="abort", last=True)]
                    delta = choice.step()
                    if delta.finish_reason is not None:
                        choices.remove(choice)
                        delta.last = not choices
                        if delta.last:
                            self.running.discard(request.id)
                    yield [delta]
        finally:
            if request.id in self.running:
                self.running.discard(request.id)
                self.left.append(request.id)

    def abort(self, ids: list[str]) -> None:
        self._aborted |= set(ids)

    async def ask(self, what: str) -> Any:
        if self.dead is not None:
            raise EngineDead(self.dead)
        if what == "stats":
            return STATS | {"running": len(self.running)}
        return [{"tier": "hot", "codes": bytes([2, 2, 1, 0])}] if what == "pool" else True


class _Choice:
    def __init__(self, client: FakeClient, request: Generate, sampling: SamplingParams, index: int):
        said = client.say(request, index) if callable(client.say) else client.say
        self.ids = [*(tiny_tokenizer().encode_plain(said) if isinstance(said, str) else said), EOS]
        self.request, self.sampling, self.index = request, sampling, index
        self.text = Detokenizer(tiny_tokenizer(), sampling, request.prompt)
        self.num_tokens = 0

    def step(self) -> Delta:
        params, first = self.sampling, self.num_tokens == 0
        delta = Delta(self.request.id, self.index, num_cached_tokens=4)
        if first and self.index == 0 and params.prompt_logprobs is not None:
            ids = self.request.prompt
            delta.prompt_logprobs = [None, *(_logprobs(id, params.prompt_logprobs) for id in ids[1:])]
        if params.max_tokens != 0:
            id = self.ids[self.num_tokens]
            self.num_tokens += 1
            delta.token_ids = [id]
            delta.text = self.text.push([id])
            delta.logprobs = None if params.logprobs is None else [_logprobs(id, params.logprobs)]
            if self.text.stopped is not None:
                delta.finish_reason, delta.stop_reason = "stop", self.text.stopped
            elif id == EOS:
                delta.finish_reason = "stop"
        if delta.finish_reason is None and self.num_tokens == params.max_tokens:
            delta.finish_reason = "length"
        if delta.finish_reason is not None:
            delta.text += self.text.finish()
            delta.kv = dict(KV)
        return delta


def _logprobs(id: int, most: int) -> Logprobs:
    return Logprobs([id, *range(65, 65 + most)], [-0.5, *(-1.0 - i for i in range(most))], [1, *range(1, most + 1)])


@contextmanager
def running(client: Any, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a server over `client`; its `base_url` is the server's."""
    options = {"disable_log_requests": True, "drain_timeout": 1.0} | settings
    app = create_app(client, ServerSettings(**options), client.tokenizer, "tiny")
    server, listener = make_server(app), socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as http:
            yield http
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with `[DONE]`."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def wait_until(true: Callable[[], bool], seconds: float = 2.0) -> None:
    """Fails if it does not come true in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)

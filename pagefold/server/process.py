"""The engine process: `python -m pagefold.server.process ADDRESS`, with the options as a line of JSON on stdin.

One thread steps the engine and talks to the front between steps; it sleeps only when there is nothing to do. Signals
are the front's business, and the process ends when its stdin does, so it cannot outlive the front.
"""

import dataclasses
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError, Request, SamplingParams, TokenLogprobs
from pagefold.engine.build import build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.grammar import FIELDS, GrammarCompiler, Matcher
from pagefold.engine.outputs import CompletionOutput, RequestOutput
from pagefold.models.sources import resolve
from pagefold.server.logs import setup_logs
from pagefold.server.messages import (
    Abort,
    Answer,
    Ask,
    Delta,
    Deltas,
    Fatal,
    Generate,
    Logprobs,
    Ready,
    Refused,
    ToFront,
    decode_to_engine,
    encode,
)
from pagefold.server.stats import Counters, as_text, engine_stats, option_table, pool_map

logger = logging.getLogger("pagefold.server")

COMPILE_S = 10.0  # a grammar that takes longer is refused
COMPILING_POLL_MS = 2
SAMPLING_FIELDS = frozenset(leaf.name for leaf in dataclasses.fields(SamplingParams))


@dataclass
class _Seen:
    """What the front knows of one continuation: how many characters and ids, and whether it ended."""

    chars: int = 0
    tokens: int = 0
    ended: bool = False


@dataclass
class _Open:
    """A request that the engine serves, which came at `since`. `output` is known from its first result on."""

    since: float
    seen: list[_Seen]
    output: RequestOutput | None = None


@dataclass
class _Compiling:
    """A request that waits for its grammar."""

    request: Request
    kind: str
    matcher: "Future[Matcher]"
    since: float = field(default_factory=time.perf_counter)


class EngineServer:
    """Steps an engine for whoever is at the other end of a socket.

    compiler   of grammars; None: the model has no tokenizer
    """

    def __init__(self, engine: Engine, socket: zmq.Socket, compiler: GrammarCompiler | None):
        self.engine = engine
        self._socket = socket
        self._compiler = compiler
        self._open: dict[str, _Open] = {}
        self._compiling: dict[str, _Compiling] = {}
        self._counters = Counters()
        self._now = 0.0  # when the last step was over
        self._draining: list[int] = []  # questions to answer when all requests have ended
        self._send = lambda message: socket.send(encode(message))

    def run(self) -> None:
        """Serve until the process ends, or the device fails."""
        while True:
            if not self.engine.has_work:
                self._socket.poll(COMPILING_POLL_MS if self._compiling else None)
            self._take_messages()
            if self._compiling:
                self._add_compiled()
            if self.engine.has_work:
                self._step()
            if self._draining and not self._open and not self._compiling:
                for seq in self._draining:
                    self._send(Answer(seq, True))
                self._draining.clear()

    # ---- from the front

    def _take_messages(self) -> None:
        while self._socket.poll(0):
            match decode_to_engine(self._socket.recv()):
                case Generate() as wanted:
                    with self._refusing(wanted.id):
                        self._generate(wanted)
                case Abort(ids):
                    self._abort(ids)
                case Ask(seq, "drain"):
                    self._draining.append(seq)
                case Ask(seq, what):
                    self._send(self._answer(seq, what))

    @contextmanager
    def _refusing(self, id: str) -> Iterator[None]:
        """Refuse a request that raises: whatever is wrong with it must not end the others."""
        try:
            yield
            return
        except InputError as error:
            refused = Refused(id, error.field, str(error))
        except BaseException as error:  # a panic of the grammar's compiler is no Exception
            logger.exception("request %s cannot be added", id)
            refused = Refused(id, "request", f"cannot be served: {error!r}")
        self._counters.refused += 1
        self._send(refused)

    def _generate(self, wanted: Generate) -> None:
        if self._draining:
            raise InputError("server", "is shutting down")
        if unknown := sorted(set(wanted.sampling) - SAMPLING_FIELDS):
            raise InputError(unknown[0], "unknown sampling parameter")
        sampling = SamplingParams(**wanted.sampling)
        request = Request(wanted.id, tuple(wanted.prompt), sampling, wanted.priority, wanted.cache_salt)
        if wanted.grammar is None:
            self._add(request, None, time.perf_counter())
            return
        kind = wanted.grammar.kind
        if self._compiler is None:
            raise InputError(FIELDS.get(kind, "response_format"), "needs a tokenizer, and this model has none")
        compiling = self._compiler.submit(kind, wanted.grammar.text)
        self._compiling[request.id] = _Compiling(request, kind, compiling)

    def _add(self, request: Request, matcher: Matcher | None, since: float) -> None:
        self.engine.add(request, grammar=matcher)
        self._open[request.id] = _Open(since, [_Seen() for _ in range(request.sampling.n)])

    def _add_compiled(self) -> None:
        for id, waiting in list(self._compiling.items()):
            if not waiting.matcher.done() and time.perf_counter() - waiting.since <= COMPILE_S:
                continue
            del self._compiling[id]
            with self._refusing(id):
                if waiting.matcher.done():
                    self._add(waiting.request, waiting.matcher.result(), waiting.since)
                    continue
                waiting.matcher.cancel()
                raise InputError(FIELDS.get(waiting.kind, "response_format"), f"takes over {COMPILE_S:g} s to compile")

    def _abort(self, ids: list[str], error: str | None = None) -> None:
        """Stop requests, and tell the front so: it may still wait for some of them."""
        deltas = []
        for id in ids:
            if waiting := self._compiling.pop(id, None):
                waiting.matcher.cancel()
                last = [Delta(id, i, finish_reason="abort", error=error) for i in range(waiting.request.sampling.n)]
            elif entry := self._open.pop(id, None):
                self.engine.abort(id)
                last = self._last_words(id, entry, error)
            else:
                continue
            last[-1].last = True
            deltas += last
        if deltas:
            self._send(Deltas(deltas))

    def _last_words(self, id: str, entry: _Open, error: str | None) -> list[Delta]:
        deltas = []
        for i, seen in enumerate(entry.seen):
            if not seen.ended:
                choice = entry.output.outputs[i] if entry.output else CompletionOutput(i)
                choice.error = error
                self._counters.count_end(choice)
                deltas.append(Delta(id, i, finish_reason="abort", error=error, kv=dict(vars(choice.kv))))
        return deltas

    def _answer(self, seq: int, what: str) -> Answer:
        value: Any = True
        try:
            match what:
                case "ping":
                    pass
                case "stats":
                    value = engine_stats(self.engine, self._counters, len(self._compiling))
                case "pool":
                    value = pool_map(self.engine)
                case "reset_prefix_cache":
                    self.engine.manager.forget_all()
                case _:
                    raise ValueError(f"{what!r} is no question")
        except Exception as error:  # a question must not end the requests
            logger.exception("no answer to %s", what)
            return Answer(seq, None, str(error))
        return Answer(seq, value)

    # ---- to the front

    def _step(self) -> None:
        start, planned = time.perf_counter(), self.engine.scheduler.stats.tokens
        try:
            outputs = self.engine.step()
        except Exception as error:
            logger.exception("a step failed")
            self._abort(list(self._open), f"a step of the engine failed: {error}")
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises if the device is beyond repair
            return
        self._now = time.perf_counter()
        self._counters.count_step(self._now - start, self.engine.scheduler.stats.tokens - planned)
        if outputs:
            self._send(Deltas([delta for output in outputs for delta in self._deltas(output)]))

    def _deltas(self, output: RequestOutput) -> list[Delta]:
        """What is new of a request."""
        id, entry = output.request_id, self._open[output.request_id]
        if entry.output is None:
            entry.output = output
            self._counters.prompt_tokens += len(output.prompt_token_ids)
            self._counters.cached_tokens += output.num_cached_tokens
        deltas = []
        for choice, seen in zip(output.outputs, entry.seen, strict=True):
            new = choice.token_ids[seen.tokens :]
            if seen.ended or not (new or choice.finish_reason):
                continue
            delta = Delta(id, choice.index, choice.text[seen.chars :], new, num_cached_tokens=output.num_cached_tokens)
            if seen.tokens == 0 and choice.started is not None:
                delta.queue_s, delta.prefill_s = choice.started - entry.since, self._now - choice.started
            if choice.logprobs is not None:
                delta.logprobs = [_as_logprobs(entry) for entry in choice.logprobs[seen.tokens :]]
            if seen.tokens == 0 and choice.index == 0 and output.prompt_logprobs is not None:
                delta.prompt_logprobs = [entry and _as_logprobs(entry) for entry in output.prompt_logprobs]
            seen.chars, seen.tokens = len(choice.text), len(choice.token_ids)
            self._counters.generated_tokens += len(new)
            if choice.finish_reason:
                seen.ended = True
                delta.finish_reason, delta.stop_reason = choice.finish_reason, choice.stop_reason
                delta.error, delta.kv = choice.error, dict(vars(choice.kv))
                self._counters.count_end(choice)
            deltas.append(delta)
        if output.finished:
            deltas[-1].last = True
            del self._open[id]
        return deltas


def _as_logprobs(entry: TokenLogprobs) -> Logprobs:
    return Logprobs(list(entry.ids), list(entry.logprobs), list(entry.ranks))


# ---- start and end


class _Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def build(options: dict[str, Any]) -> tuple[Engine, GrammarCompiler | None, dict[str, Any]]:
    """The engine, its compiler of grammars, and the facts to tell the front."""
    config = EngineConfig.from_options(**options)
    listener, build_logger = _Listener(), logging.getLogger("pagefold")
    build_logger.addHandler(listener)
    engine = build_engine(config)
    build_logger.removeHandler(listener)
    compiler = None
    if engine.tokenizer and engine.eos_token_ids:
        compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size, sorted(engine.eos_token_ids))
    defaults = resolve(config.model.model).generation_config()
    facts = {
        "max_model_len": engine.max_model_len,
        "vocab_size": engine.vocab_size,
        "eos_token_ids": sorted(engine.eos_token_ids),
        "options": option_table(config, engine),
        "memory": listener.lines,
        "defaults": {name: value for name, value in defaults.items() if name in SAMPLING_FIELDS},
    }
    return engine, compiler, facts


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(address: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    setup_logs(**start["logs"])
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)

    def say(message: ToFront) -> None:
        socket.send(encode(message))

    try:
        engine, compiler, facts = build(start["options"])
        logger.info("options:\n%s", as_text(facts["options"]))
        gc.freeze()  # what is there by now stays: full collections, which delay a step, need not look at it
        say(Ready(facts))
        EngineServer(engine, socket, compiler).run()
    except InputError as error:
        say(Fatal(str(error), error.field))
    except BaseException as error:
        logger.exception("the engine cannot go on")
        say(Fatal(f"the engine failed: {type(error).__name__}: {error}"))
    socket.close(linger=1000)
    context.term()
    return 1


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))  # at once: compiling threads may be busy

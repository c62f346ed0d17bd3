"""The front's view of the engine process: start it, stream requests through it, notice at once when it is gone."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.server.messages import (
    Abort,
    Answer,
    Ask,
    Delta,
    Deltas,
    Fatal,
    Generate,
    Ready,
    Refused,
    ToEngine,
    ToFront,
    decode_to_front,
    encode,
)

LAST_WORDS_S = 0.05  # for what a process that has ended said before
EXIT_S = 5.0  # for an engine that was told to end
CLOSING = "the server is shutting down"


class EngineDead(RuntimeError):
    """The engine process is not there, and will not come back; the message says why."""


class _Inbox:
    """What has come of one request, for the one who waits for it: all of it at once, unlike from `asyncio.Queue`."""

    def __init__(self):
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing will come any more, and why."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[Delta]:
        """All that has come since the last time, at least one delta. Raises the error when no delta is left."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        return deltas

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine process and the requests it serves. Everything happens in the event loop that `start` ran in.

    config                of the engine
    log_level, log_json   how the process logs, on stderr like this one
    facts                 what the engine said of itself when it was ready, see `Ready`
    dead                  why the engine is gone; None while it serves
    """

    def __init__(self, config: EngineConfig, log_level: str = "info", log_json: bool = False):
        self.config = config
        self.logs = {"level": log_level, "as_json": log_json}
        self.facts: dict[str, Any] = {}
        self.dead: str | None = None
        self._closing = False
        self._streams: dict[str, _Inbox] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._seq = count()
        self._tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        """Start the process and wait until it serves.

        Raises InputError for an option that it refuses, EngineDead if it ends.
        """
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._directory = tempfile.TemporaryDirectory(prefix="pagefold-")  # nobody else may connect
        address = f"ipc://{Path(self._directory.name) / 'engine'}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pagefold.server.process", address),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process
        )
        assert self._process.stdin is not None
        # It stays open for as long as this process lives: the engine ends with it.
        start = {"options": self.config.options(), "logs": self.logs}
        self._process.stdin.write(json.dumps(start).encode() + b"\n")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        try:
            self.facts = await self._ready
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def generate(self, request: Generate) -> AsyncIterator[list[Delta]]:
        """The continuations of a prompt as they come; the delta that is `last` ends the iterator.

        A list holds all that has come since the one before, so whoever falls behind has fewer of them to deal with.

        Raises InputError if the request is refused, EngineDead if the engine is gone. Whoever leaves early, by `break`
        or because he is cancelled, aborts the request.
        """
        if request.id in self._streams:
            raise InputError("request_id", f"{request.id!r} is already being served")
        self._check_alive()
        if self._closing:
            raise EngineDead(CLOSING)
        try:
            message = encode(request)
        except (OverflowError, ValueError, TypeError) as error:
            raise InputError("request", f"cannot be sent to the engine: {error}") from None
        inbox = self._streams[request.id] = _Inbox()
        self._socket.send(message)
        ended = False
        try:
            while not ended:
                try:
                    deltas = await inbox.take()
                except (InputError, EngineDead):
                    ended = True
                    raise
                ended = deltas[-1].last
                yield deltas
        finally:
            del self._streams[request.id]
            if not ended:
                self.abort([request.id])

    def abort(self, ids: Iterable[str]) -> None:
        """Stop these requests; their iterators end with `finish_reason` "abort". Unknown ids are ignored."""
        if self.dead is None:
            self._send(Abort(list(ids)))

    async def ask(self, what: str) -> Any:
        """The answer to a question, see `Ask`. Raises EngineDead, or RuntimeError if there is no answer."""
        self._check_alive()
        seq = next(self._seq)
        answer = self._answers[seq] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(seq, what))
            return await answer
        finally:
            del self._answers[seq]

    async def wait_dead(self) -> str:
        """Wait until the engine is gone. Returns why."""
        return await asyncio.shield(self._death)

    async def close(self, drain_s: float = 0.0) -> None:
        """End the engine. What runs may go on for `drain_s` seconds; nothing new is taken, and the rest is aborted."""
        self._closing = True
        if self.dead is None and drain_s > 0:
            with suppress(TimeoutError, EngineDead):
                await asyncio.wait_for(self.ask("drain"), drain_s)
        if self.dead is None and self._streams:
            self.abort(self._streams)
            with suppress(TimeoutError, EngineDead):  # it answers in order: the streams have ended then
                await asyncio.wait_for(self.ask("ping"), EXIT_S)
        self._die(CLOSING)
        if self._socket.closed:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()
        self._directory.cleanup()

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)

    def _send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))  # at once: the queue has no limit

    async def _receive(self) -> None:
        try:
            while True:
                self._hear(decode_to_front(await self._socket.recv()))
        except Exception as error:
            self._die(f"the engine cannot be understood: {error!r}")
            raise

    def _hear(self, message: ToFront) -> None:
        match message:
            case Deltas(items):
                for delta in items:
                    if inbox := self._streams.get(delta.id):
                        inbox.put(delta)
            case Refused(id, field, reason):
                if inbox := self._streams.get(id):
                    inbox.fail(refusal(field, reason))
            case Answer(seq, value, error):
                if (answer := self._answers.get(seq)) and not answer.done():
                    answer.set_result(value) if error is None else answer.set_exception(RuntimeError(error))
            case Ready(facts):
                if not self._ready.done():
                    self._ready.set_result(facts)
            case Fatal(reason, field):
                if field is not None and not self._ready.done():
                    self._ready.set_exception(refusal(field, reason))
                self._die(reason)

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.sleep(LAST_WORDS_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._die(f"the engine process {how}")

    def _die(self, reason: str) -> None:
        """Everyone who waits is told; the first reason counts."""
        if self.dead is not None:
            return
        self.dead = reason
        self._death.set_result(reason)
        for inbox in self._streams.values():
            inbox.fail(EngineDead(reason))
        for future in [self._ready, *self._answers.values()]:
            if not future.done():
                future.set_exception(EngineDead(reason))


def refusal(field: str, message: str) -> InputError:
    """The error again, from its message, which begins with the field."""
    return InputError(field, message.removeprefix(f"{field}: "))

"""Answers that come bit by bit, and clients that leave before they have it all."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagefold.server.errors import ApiError

T = TypeVar("T")


class Departure:
    """Notices that the client of a request, whose body has been read, has gone."""

    def __init__(self, receive: Receive):
        self._receive = receive

    async def __aenter__(self) -> "Departure":
        self._left = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left.cancel()
        await asyncio.wait({self._left})

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def race(self, work: Awaitable[T]) -> T:
        """The result of `work`. If the client leaves first, `work` is cancelled and ApiError 499 raised."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(499, "the client has gone")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """What `events` gives, one or more server-sent events at a time, and `[DONE]` at the end.

    open   what has to be closed when the last event is out or the client has left
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], departure: Departure, open: AsyncExitStack):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._departure, self._open = events, departure, open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._open, aclosing(self._events):
            try:
                await self._departure.race(self._send(send))
            except (ApiError, OSError):  # nobody is there to be told
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for events in self._events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": event(b"[DONE]"), "more_body": False})


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of all streams as they come, each with its stream's index. The first error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:  # type: ignore[type-var]
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for item in stream:
                    queue.put_nowait((index, item, None))
            queue.put_nowait((index, None, None))
        except Exception as error:
            queue.put_nowait((index, None, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""What keeps the server up: keys, the size of bodies, the length of the queue."""

import contextlib
import hmac
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagefold.server.errors import ApiError

OPEN_PATHS = ("/health", "/ping", "/version", "/ui")  # need no key, for they tell nothing of requests


class Guard:
    """ASGI middleware: 401 without a key on all but `OPEN_PATHS`, 413 for a body that is too large.

    keys        none: everybody may call everything
    max_bytes   of a body; what comes beyond is not read
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_bytes: int):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, seen = Headers(scope=scope), 0
        path = scope["path"].removeprefix(scope.get("root_path", ""))

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large()
            return message

        try:
            if self._keys and path not in OPEN_PATHS:
                self._check_key(headers.get("authorization", ""))
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) > self._max_bytes:
                raise self._too_large()
        except ApiError as error:
            return await error.response()(scope, receive, send)
        await self._app(scope, limited, send)

    def _check_key(self, authorization: str) -> None:
        kind, _, token = authorization.partition(" ")
        given = token.strip().encode("latin-1")  # the bytes as they came
        # every key is compared, in constant time: how long it takes tells nothing of them
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _too_large(self) -> ApiError:
        message = f"the request's body is larger than {self._max_bytes} bytes"
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class Queue:
    """Counts the continuations that run or wait, so that no more come in than can be served in sensible time.

    A request with many continuations gets in whole as long as there is room for one.
    """

    RETRY_AFTER_S = 1

    def __init__(self, most: int):
        self.most = most
        self.num_inside = 0

    def check(self) -> None:
        """Raises ApiError 429 when the queue is full."""
        if self.num_inside >= self.most:
            message = f"{self.num_inside} requests are running or waiting, of at most {self.most}; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(self.RETRY_AFTER_S)})

    @contextlib.contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Raises ApiError 429 when the queue is full."""
        self.check()
        self.num_inside += count
        try:
            yield
        finally:
            self.num_inside -= count

"""Every failure as OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from pagefold.core.types import InputError
from pagefold.server.client import EngineDead
from pagefold.server.logs import log_event

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}

_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_FIELDS = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)}},
    "required": ["error"],
}
SCHEMA_REF = {"$ref": "#/components/schemas/Error"}


class ApiError(Exception):
    """What goes wrong with one call of the API.

    status    HTTP status
    param     the field of the request to blame, as the user wrote it
    code      a word for programs, where there is one ("context_length_exceeded")
    headers   of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def as_api_error(error: BaseException) -> ApiError:
    """What to tell the client of any exception; the unforeseen ones are logged, and named by their class only."""
    match error:
        case ApiError():
            return error
        case InputError():
            return ApiError(400, str(error), error.field)
        case ValidationError():
            return ApiError(400, *explain(error))
        case EngineDead():
            return ApiError(503, f"the engine has died: {error}", code="engine_dead")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    log_event("request failed", level="error", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def explain(error: ValidationError) -> tuple[str, str | None]:
    """(message, field) of the first thing that is wrong; a choice of types in a union is no part of the name."""
    found = error.errors(include_url=False)
    # of a union every branch complains: the one that got furthest into the value knows best what was meant
    first = max((e for e in found if e["loc"][:1] == found[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    field = ""
    for part in (*first["loc"], *(first.get("ctx", {}).get("below", ()))):
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            field += f".{part}" if field else part
    text = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in _SAY_IT_ALL else f", got {_short(first['input'])}"
    return (f"{field}: {text}{got}" if field else f"{text}{got}"), field or None


_BRANCHES = {"str", "int", "float", "bool", "list", "dict"}
_SAY_IT_ALL = {"missing", "value_error", "json_invalid", "refused"}  # no need to show what was got


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Route(APIRoute):
    """Answers whatever its handler raises. Starlette's own way for unforeseen errors would cut the connection too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                return as_api_error(error).response()

        return answer


def install(app: FastAPI) -> None:
    """Have `app` answer all errors with the error object; before its routes are added."""

    async def no_route(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    app.router.route_class = _Route
    app.add_exception_handler(HTTPException, no_route)

"""The HTTP front: OpenAI's routes and our own over one engine process."""

import asyncio
import gc
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema

from pagefold import __version__
from pagefold.core.config import EngineConfig
from pagefold.core.types import InputError
from pagefold.models.tokenizer import Tokenizer
from pagefold.server import errors
from pagefold.server.chat import chat_job, reasoning_enabled, render
from pagefold.server.client import EngineClient, EngineDead
from pagefold.server.completions import completion_job
from pagefold.server.generation import THREAD_ABOVE, Front
from pagefold.server.limits import OPEN_PATHS, Guard
from pagefold.server.logs import log_event, setup_logs
from pagefold.server.metrics import Metrics
from pagefold.server.protocol import AbortBody, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pagefold.server.settings import ServerSettings
from pagefold.server.tokens import token_text
from pagefold.server.tools import choose_parser

B = TypeVar("B", bound=Body)
Handler = Callable[[Request, B], Awaitable[Any]]

ASK_S = 5.0  # for an answer of the engine that nobody's tokens wait for
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, AbortBody)
KEEP_ALIVE_S = 75  # of an idle connection; longer than clients keep theirs, so that none is closed as it is taken
DEAD_S = 2.0  # that the server goes on after its engine, so that probes and clients are told


def create_app(client: EngineClient, settings: ServerSettings, tokenizer: Tokenizer | None, model: str) -> FastAPI:
    """The app over an engine that has been started.

    tokenizer   None: only token ids are served, on /v1/completions
    model       its name, unless `settings` has others

    Raises InputError for settings that do not fit the model.
    """
    models = settings.served_model_name or (model,)
    front = Front(client, settings, tokenizer, models, Metrics(settings.metrics_prefix, models[0]))
    app = FastAPI(title="Pagefold", version=__version__, docs_url=None, redoc_url=None)
    app.state.front = front
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    errors.install(app)
    _add_openai_routes(app, front)
    _add_tokenizer_routes(app, front)
    _add_state_routes(app, front)
    if not settings.disable_ui:
        _add_page(app, front)
    app.add_middleware(Guard, keys=settings.api_key, max_bytes=settings.max_request_bytes)
    if settings.allowed_origins:  # outside of the guard: browsers ask for leave without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def read(request: Request, kind: type[B]) -> B:
    """The body as `kind`. Large ones are parsed in a thread."""
    data = await request.body()
    if len(data) < THREAD_ABOVE:
        return kind.model_validate_json(data)
    return await asyncio.to_thread(kind.model_validate_json, data)


def _post(app: FastAPI, path: str, kind: type[B], streams: bool = False) -> Callable[[Handler[B]], Handler[B]]:
    """Decorator for a POST route whose handler takes the body as `kind`, and may answer with a stream of events."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    answers: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}} if streams else {}

    def register(handler: Handler[B]) -> Handler[B]:
        async def endpoint(request: Request) -> Any:
            return await handler(request, await read(request, kind))

        app.post(path, name=handler.__name__, openapi_extra=extra, response_model=None, responses=answers)(endpoint)
        return handler

    return register


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the schemas of all bodies and of errors: FastAPI does not read or write these."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(
            [(kind, "validation") for kind in BODIES], ref_template="#/components/schemas/{model}"
        )
        document["components"] = {"schemas": schemas["$defs"] | {"Error": errors.SCHEMA}}
        failed = {"description": "An error", "content": {"application/json": {"schema": errors.SCHEMA_REF}}}
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            operation["responses"] = {"200": operation["responses"]["200"], "default": failed}
        app.openapi_schema = document
    return app.openapi_schema


# ---- routes


def _add_openai_routes(app: FastAPI, front: Front) -> None:
    @_post(app, "/v1/chat/completions", ChatBody, streams=True)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await front.answer(request, body, chat_job)

    @_post(app, "/v1/completions", CompletionBody, streams=True)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await front.answer(request, body, completion_job)

    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        length = front.client.facts["max_model_len"]
        return {"id": name, "object": "model", "created": started, "owned_by": "pagefold", "max_model_len": length}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in front.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        front.check_model(name)
        return card(name)


def _add_tokenizer_routes(app: FastAPI, front: Front) -> None:
    @_post(app, "/tokenize", TokenizeBody)
    async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("prompt", "either this or messages must be there")
        tokenizer = front.need_tokenizer("prompt")
        if body.messages is not None:
            ids = await render(front, body.messages, body, body.tools)
        else:
            text = body.prompt or ""
            ids = await front.in_thread(len(text), lambda: tokenizer.encode(text, body.add_special_tokens))
        texts = {"token_strs": [token_text(tokenizer, id) for id in ids]} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": front.client.facts["max_model_len"], "tokens": ids} | texts

    @_post(app, "/detokenize", DetokenizeBody)
    async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
        front.check_model(body.model)
        tokenizer = front.need_tokenizer("tokens")
        if body.tokens:
            front.check_ids(body.tokens, "tokens")
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _add_state_routes(app: FastAPI, front: Front) -> None:
    client = front.client

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        if client.dead is not None:
            raise EngineDead(client.dead)
        return Response()

    app.get("/ping", name="ping", response_class=Response)(health)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        stats = None
        with suppress(EngineDead, TimeoutError):
            stats = await asyncio.wait_for(client.ask("stats"), ASK_S)
        return Response(front.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        return {"reset": await client.ask("reset_prefix_cache")}

    @_post(app, "/abort_request", AbortBody)
    @_post(app, "/abort", AbortBody)
    async def abort(request: Request, body: AbortBody) -> dict[str, Any]:
        """Ids that are not being served are left out of the answer."""
        asked = [body.request_id] if isinstance(body.request_id, str) else body.request_id
        served = [id for id in asked if id in front.jobs]
        client.abort([engine_id for id in served for engine_id in front.jobs[id].engine_ids])
        return {"aborted": served}


def _add_page(app: FastAPI, front: Front) -> None:
    page = (files("pagefold.server") / "static" / "ui.html").read_text(encoding="utf-8")

    @app.get("/ui", response_class=HTMLResponse)
    async def ui() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/ui/state")
    async def ui_state() -> Response:
        """What the page shows. `codes_base64` holds a byte for each page of a tier; see `stats.pool_map`."""
        stats, pool = await asyncio.gather(front.client.ask("stats"), front.client.ask("pool"))
        tiers = [{"name": tier["tier"], "codes_base64": tier["codes"]} for tier in pool]
        state = {"model": front.models[0], "facts": front.client.facts, "stats": stats, "pool": {"tiers": tiers}}
        return Response(msgspec.json.encode(state), media_type="application/json")


# ---- the process


def serve(settings: ServerSettings, config: EngineConfig) -> int:
    """Start the engine, serve until SIGTERM or SIGINT or until the engine dies; returns the exit code.

    The port is taken first, so that a taken one costs no loading of weights. Raises InputError for options that cannot
    be had. After a signal no connection is accepted, and requests have `drain_timeout` seconds to finish.
    """
    setup_logs(settings.log_level, settings.log_json)
    with _listen(settings) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_serve(settings, config, listener))
        except asyncio.CancelledError:
            return 0
        except EngineDead as error:
            log_event("engine did not start", level="error", reason=str(error))
            return 1


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on these only
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InputError("port", f"{settings.host}:{settings.port} cannot be listened on: {error}") from None
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.new_event_loop


async def _serve(settings: ServerSettings, config: EngineConfig, listener: socket.socket) -> int:
    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert main is not None
    client = EngineClient(config, settings.log_level, settings.log_json)
    _on_signal(lambda *_: loop.call_soon_threadsafe(main.cancel))
    tokenizer, _ = await asyncio.gather(asyncio.to_thread(load_tokenizer, settings, config), client.start())
    _on_signal(lambda *_: None)  # uvicorn listens now, and raises the signal again when it has ended
    try:
        app = create_app(client, settings, tokenizer, config.model.model)
        gc.freeze()  # what is there by now stays: full collections, which delay every stream, need not look at it
        announce(app.state.front, listener.getsockname())
        return await run(app, listener)
    finally:
        await client.close()


def _on_signal(handler: Callable[..., Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


async def run(app: FastAPI, listener: socket.socket) -> int:
    """Serve `app` until a signal, or until its engine is dead and everybody has been told. Returns the exit code."""
    front: Front = app.state.front
    server = make_server(app)

    async def follow_engine() -> None:
        reason = await front.client.wait_dead()
        log_event("engine died", level="error", reason=reason)
        await asyncio.sleep(DEAD_S)
        server.should_exit = True

    follower = asyncio.create_task(follow_engine())
    try:
        await server.serve(sockets=[listener])
    finally:
        follower.cancel()
    return 0 if front.client.dead is None else 1


def make_server(app: FastAPI) -> uvicorn.Server:
    """What `app` runs in."""
    settings: ServerSettings = app.state.front.settings
    drain = math.ceil(settings.drain_timeout)
    options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "server_header": False}
    options["timeout_keep_alive"] = KEEP_ALIVE_S
    config = uvicorn.Config(app, timeout_graceful_shutdown=drain, root_path=settings.root_path, **options)
    return uvicorn.Server(config)


def load_tokenizer(settings: ServerSettings, config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that the engine uses, with the template of `settings`; None for a model that has none."""
    from pagefold.models.sources import resolve

    source = resolve(config.model.model)
    tokenizer = None
    if config.model.tokenizer is not None:
        tokenizer = resolve(config.model.tokenizer).tokenizer()
    elif source.has_tokenizer:
        tokenizer = source.tokenizer()
    if settings.chat_template is not None:
        if tokenizer is None:
            raise InputError("chat_template", "needs a tokenizer, and this model has none")
        tokenizer.chat_template = Path(settings.chat_template).read_text(encoding="utf-8")
    return tokenizer


def announce(front: Front, address: tuple[Any, ...]) -> None:
    """Say what is served, and who may call without a key. The engine has told of itself already."""
    facts, settings = front.client.facts, front.settings
    template = front.tokenizer.chat_template if front.tokenizer else None
    automatic = settings.enable_auto_tool_choice
    log_event(
        "serving",
        address=f"http://{address[0]}:{address[1]}",
        models=",".join(front.models),
        max_model_len=facts["max_model_len"],
        tools=(choose_parser(settings.tool_call_parser, template) or "required and named only") if automatic else "off",
        reasoning="apart" if reasoning_enabled(front) else "in the content",
        open_paths=",".join(OPEN_PATHS) if settings.api_key else "all",
    )

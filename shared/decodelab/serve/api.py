"""The engine behind HTTP, as OpenAI's clients know it. Needs the extra `serve`.

A client that goes away cancels its request, a full queue answers 429, and what can't be served is
refused in a sentence while the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from decodelab import __version__

from .asgi import EventStream, Gate, Json, error, unless_gone
from .async_engine import AsyncEngine
from .engine import Engine
from .prometheus import Metrics
from .protocol import ChatCall, CompletionCall, ErrorBody
from .reply import STATUS, Reply, Tokenizer, encode
from .token_stream import QueueFullError

ERRORS = {status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503)}
ANSWERS = {**ERRORS, 200: {"content": {"application/json": {}, "text/event-stream": {}}}}

NO_PAGES = {"docs_url": None, "redoc_url": None}  # they would fetch scripts from a CDN


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model: str,
    api_key: str | None = None,
    max_waiting: int = 256,
    max_body_bytes: int = 1 << 20,
    max_tokens: int = 4096,
) -> FastAPI:
    """An ASGI app that serves `engine` under the name `model`; it alone may touch the engine.

    At most `max_waiting` requests wait, beside a full batch; a body has at most `max_body_bytes`
    and an answer `max_tokens`. With `api_key`, /v1 asks for it.
    """
    metrics = Metrics(model)
    serving = AsyncEngine(engine, max_waiting=max_waiting, observer=metrics)
    metrics.watch(serving)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await serving.start()
        yield
        await serving.shutdown()

    app = FastAPI(
        title="decodelab",
        version=__version__,
        lifespan=lifespan,
        **NO_PAGES,
        redirect_slashes=False,
    )
    app.state.engine = serving
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes)
    add_error_handlers(app, metrics)
    add_status_routes(app, serving, metrics, model)

    async def answer(call: CompletionCall | ChatCall, http: HttpRequest) -> Response:
        if call.model not in (None, model):
            raise HTTPException(404, f"There is no model {call.model!r} here, only {model!r}.")
        serving.check_room(len(call.prompts))  # before any work is done for it
        prompts = await encode(call, tokenizer)
        reply = Reply(call, prompts, serving, tokenizer, model, max_tokens)
        if call.stream:
            return EventStream(reply)
        try:
            return await unless_gone(http, reply.whole())
        finally:
            reply.close()

    @app.post("/v1/completions", responses=ANSWERS)
    async def completions(call: CompletionCall, http: HttpRequest) -> Response:
        """Continue a prompt, or several."""
        return await answer(call, http)

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat_completions(call: ChatCall, http: HttpRequest) -> Response:
        """Answer the last message of a conversation."""
        return await answer(call, http)

    return app


def run(
    app: FastAPI, host: str = "127.0.0.1", port: int = 8000, *, drain_seconds: float = 10.0
) -> None:
    """Serve until SIGINT or SIGTERM; then newcomers are refused, and after `drain_seconds` all."""
    allow_open_files()
    config = uvicorn.Config(app, host=host, port=port, access_log=False)
    with suppress(KeyboardInterrupt):
        Server(config, drain_seconds).run()


def allow_open_files() -> None:
    """As many as the system lets us: a connection is one, and 1,024 are soon used up."""
    with suppress(ImportError, OSError, ValueError):  # not everywhere
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Server(uvicorn.Server):
    """Tells the engine of a shutdown at once, so that what is in flight ends in good order."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float = 10.0) -> None:
        # What the engine has ended is to be written out; a reader that doesn't read isn't awaited.
        config.timeout_graceful_shutdown = drain_seconds + 5
        super().__init__(config)
        self.drain_seconds = drain_seconds

    async def shutdown(self, sockets: list | None = None) -> None:
        """Both at the same time: the engine drains, and connections close as they get done."""
        engine: AsyncEngine = self.config.app.state.engine
        draining = asyncio.create_task(engine.shutdown(self.drain_seconds))
        await super().shutdown(sockets)
        await draining


def add_status_routes(app: FastAPI, engine: AsyncEngine, metrics: Metrics, model: str) -> None:
    """What says how the server is, and what it serves."""
    card = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "decodelab",
        "max_model_len": engine.context,
    }

    @app.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Response:
        """200 while requests are taken and the latest step went well, else 503."""
        if engine.healthy:
            return Json({"status": "ok"})
        reason = "is shutting down" if engine.closing else f"failed: {engine.failure!r}"
        return error(503, f"The engine {reason}.")

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Prometheus' text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Which engine this is."""
        return {"version": __version__, "engine": "decodelab"}

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        """The one model."""
        return Json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str) -> Response:
        """The model of this name."""
        if name != model:
            raise HTTPException(404, f"There is no model {name!r} here, only {model!r}.")
        return Json(card)


def add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Every error has a status of its own and a body of the same shape."""

    async def refused(http: HttpRequest, failure: Exception) -> Response:
        if isinstance(failure, QueueFullError):
            metrics.rejections.inc()
        return error(STATUS[type(failure)], str(failure))

    async def invalid(http: HttpRequest, failure: RequestValidationError) -> Response:
        first, *_ = failure.errors()
        if "json" not in http.headers.get("content-type", ""):
            return error(400, "Send JSON, with the header Content-Type: application/json.")
        if first["type"] == "json_invalid":
            return error(400, f"The body is no JSON: {first['ctx']['error']}.")
        field = first["loc"][1:2]  # all that is wrong with it, since it may be of several types
        alike = [found["msg"] for found in failure.errors() if found["loc"][1:2] == field]
        wrong = ", or: ".join(dict.fromkeys(alike)).replace("Value error, ", "")
        name = str(*field) or "body"
        return error(400, f"{name}: {wrong}.", name)

    async def http_error(http: HttpRequest, failure: HTTPException) -> Response:
        return error(failure.status_code, failure.detail, headers=failure.headers)

    async def broken(http: HttpRequest, failure: Exception) -> Response:
        return error(500, "The server failed; its log says how.")

    for kind in STATUS:
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, broken)

"""Where HTTP meets the engine: who may come in, how answers leave, and who has gone away."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from .protocol import error_body
from .reply import Reply

RETRY_SECONDS = "1"
OPEN_PATHS = ("/health", "/metrics", "/version", "/openapi.json")  # to all, key or not


class Json(JSONResponse):
    """JSON in ASCII, so that whatever a client sent can be quoted, half surrogates too."""

    def render(self, content: Any) -> bytes:
        """As every response."""
        return json.dumps(content, separators=(",", ":")).encode()


def error(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An OpenAI-shaped answer; a client may try again where it isn't its own fault."""
    retry = {"Retry-After": RETRY_SECONDS} if status in (429, 503) else {}
    return Json(error_body(status, message, param), status, {**retry, **(headers or {})})


class EventStream(StreamingResponse):
    """Server-sent events; when it ends, however it ends, so does its request."""

    def __init__(self, reply: Reply) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(reply.events(), headers=headers, media_type="text/event-stream")
        self.reply = reply

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As every ASGI response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reply.close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, dict]) -> Response:
    """The result of `work`, which is cancelled when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return Json(working.result()) if working.done() else Response(status_code=499)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Gate:
    """Before anything is parsed: the key, compared in constant time, and the size of the body."""

    def __init__(self, app: Any, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As every ASGI middleware."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.expected and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                headers = {"WWW-Authenticate": "Bearer"}
                answer = error(401, "The API key is missing or wrong.", headers=headers)
                return await answer(scope, receive, send)
        return await self.app(scope, self._limited(receive), send)

    def _limited(self, receive: Any) -> Any:
        """`receive`, which fails once the body has become too long."""
        received = 0

        async def limited() -> dict:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                limit = f"more than the {self.max_body_bytes} bytes that this server takes"
                raise HTTPException(413, f"The body has {limit}.")
            return message

        return limited

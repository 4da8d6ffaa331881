"""Between HTTP and the service: streams that end when their client goes, and one form of errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from expertly.core.errors import ExpertlyError
from expertly.serve.errors import ApiError, failed
from expertly.serve.settings import Access, host_of, is_loopback

OPEN_PATHS = ("/", "/health", "/ready")
"""Paths that need no key, as they reveal nothing of requests."""

Result = TypeVar("Result")

log = logging.getLogger("expertly.serve")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`. Where the client closes the connection, cancels it and raises ClientDisconnect. The
    body must have been read.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. `closed` is called once when the stream has ended, however it ended."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], closed: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect, OSError):
                await unless_gone(receive, self.stream_response(send))
        finally:
            self._closed()


def as_event(value: Any) -> bytes:
    """One server-sent event, named by its type where it has one."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Guard:
    """The outermost layer: checks keys and host names."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._error(scope["path"], Headers(scope=scope))
        await (self._app if error is None else error_response(error))(scope, receive, send)

    def _error(self, path: str, headers: Headers) -> ApiError | None:
        access, hosts = self._access, headers.getlist("host")
        host = host_of(hosts[0]) if len(hosts) == 1 else None
        if access.checks_host and (host is None or not is_loopback(host)):
            return ApiError(403, "Host: accepted without a key: localhost or its address", code="wrong_host")
        if not access.keys or path in OPEN_PATHS:
            return None
        keys = headers.getlist("authorization")
        scheme, _, key = (keys[0] if len(keys) == 1 else "").partition(" ")
        if scheme.lower() == "bearer" and access.knows(key.strip()):
            return None
        sentence, challenge = "Authorization: accepted: Bearer and a key of this server", {"WWW-Authenticate": "Bearer"}
        return ApiError(401, sentence, kind="authentication_error", code="invalid_api_key", headers=challenge)


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Errors of the framework: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    return error_response(ApiError(error.status_code, said, code=code, headers=error.headers))


async def on_bug(request: Request, error: Exception) -> Response:
    return error_response(as_told(error))


def as_told(error: Exception) -> ApiError:
    """An exception as an ApiError: the model's errors are told to the client, a bug of ours only to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ExpertlyError):
        return failed(str(error))
    log.error("a request failed", exc_info=error)
    return failed("the server has a bug: its log says more")


async def on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it

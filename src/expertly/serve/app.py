"""The paths of the server over HTTP: who may ask, streams that end when their client goes, one form of errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from expertly.core.errors import ExpertlyError
from expertly.serve.answers import ChatAnswer, CompletionAnswer, Json
from expertly.serve.errors import ApiError, failed
from expertly.serve.messages import CountRequest, MessagesAnswer, MessagesRequest
from expertly.serve.reading import Bodies
from expertly.serve.responses import ResponsesAnswer, ResponsesRequest
from expertly.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from expertly.serve.service import Service
from expertly.serve.settings import host_of, is_key, is_loopback
from expertly.serve.view import View, dashboard_page

OPEN_PATHS = ("/", "/health", "/ready")  # paths that need no key, as they reveal nothing of requests
COMMENT_S = 10.0  # how long a stream may be silent: while its request waits, its prompt is read, or a call is written

Answer = ChatAnswer | CompletionAnswer | ResponsesAnswer | MessagesAnswer
Result = TypeVar("Result")

log = logging.getLogger("expertly.serve")


def make_app(service: Service, view: View, keys: Sequence[str], bodies: Bodies, root_path: str = "") -> ASGIApp:
    """The ASGI application. `root_path`: what a proxy puts before its paths, whether or not it is cut off before."""
    app = FastAPI(openapi_url=None)
    for kind in (HTTPException, ClientDisconnect, ApiError, ExpertlyError, Exception):
        app.add_exception_handler(kind, _on_error)
    _add_state(app, service, view)
    _add_texts(app, service, bodies)
    return Guard(app, keys, root_path)


def _add_state(app: FastAPI, service: Service, view: View) -> None:
    scheduler = service.scheduler
    html, headers = dashboard_page()
    get = partial(app.api_route, methods=["GET", "HEAD"])

    @get("/health")
    async def health() -> Response:
        if scheduler.problem is not None:
            return JSONResponse({"status": "stopped", "reason": scheduler.problem}, 503)
        return JSONResponse({"status": "ok"})

    @get("/ready")
    async def ready() -> Response:
        if scheduler.problem is not None or scheduler.is_draining:
            return JSONResponse({"status": "draining" if scheduler.is_draining else "stopped"}, 503)
        return JSONResponse({"status": "ready"})

    @get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.about | {"id": name} for name in service.names]})

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.about | {"id": name})

    get("/")(lambda: HTMLResponse(html, headers=headers))
    get("/v1/experts")(lambda: JSONResponse(view.experts()))
    get("/v1/state")(lambda: JSONResponse(view.state()))
    get("/metrics")(lambda: Response(view.metrics(), media_type=CONTENT_TYPE_LATEST))


def _add_texts(app: FastAPI, service: Service, bodies: Bodies) -> None:
    def add(path: str, model: type[Any], make: Callable[[Any], Awaitable[Answer | Json]]) -> None:
        @app.post(path)
        async def endpoint(request: Request) -> Response:
            async with bodies.read(request, model) as asked:
                answer = await make(asked)
                if isinstance(answer, dict):
                    return JSONResponse(answer)
                is_stream = asked.stream
                del asked  # its texts are tokens by now
            service.start(answer.request)
            gone = partial(service.scheduler.cancel, answer.request)
            if is_stream:
                return EventStream(_events(answer), gone)
            try:
                return JSONResponse(await _unless_gone(request.receive, answer.whole()))
            finally:
                gone()

    add("/v1/chat/completions", ChatRequest, service.chat)
    add("/v1/completions", CompletionRequest, service.complete)
    add("/v1/responses", ResponsesRequest, service.respond)
    add("/v1/messages", MessagesRequest, service.message)
    add("/v1/messages/count_tokens", CountRequest, service.count)
    add("/tokenize", TokenizeRequest, service.tokenize)
    add("/detokenize", DetokenizeRequest, service.detokenize)


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    """The stream of an answer. What fails comes too late for another status: the last event says it."""
    try:
        async for delta in answer.request:
            for chunk in answer.chunks(delta):
                yield _as_event(chunk)
        for chunk in answer.last_chunks():
            yield _as_event(chunk)
        yield answer.done
    except Exception as error:
        yield _as_event(answer.failure(_as_told(error)))


async def _with_comments(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, and a comment wherever none came for a while: proxies and clients give a silent stream up."""
    coming = asyncio.ensure_future(anext(events, b""))
    try:
        while True:
            while not (await asyncio.wait((coming,), timeout=COMMENT_S))[0]:
                yield b": keep-alive\n\n"
            if not (event := coming.result()):
                return
            yield event
            coming = asyncio.ensure_future(anext(events, b""))
    finally:
        coming.cancel()


def _as_event(value: Any) -> bytes:
    """One server-sent event, named by its type where it has one."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. `closed` is called once when the stream has ended, however it ended."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], closed: Callable[[], None]) -> None:
        super().__init__(_with_comments(events), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect, OSError):
                await _unless_gone(receive, self.stream_response(send))
        finally:
            self._closed()


async def _unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`; ClientDisconnect where the client closes the connection. The body must have been read."""

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


class Guard:
    """The outermost layer: checks keys and host names."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str) -> None:
        self._app, self._keys, self._root_path = app, keys, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        error = self._error(scope) if scope["type"] == "http" else None
        await (self._app if error is None else _error_response(error, scope["path"]))(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        headers, server = Headers(scope=scope), scope.get("server")
        hosts = headers.getlist("host")
        if not self._keys:  # any web page could use the server under another name
            if server is not None and server[1] is None:  # a Unix socket, which no browser reaches
                return None
            host = host_of(hosts[0]) if len(hosts) == 1 else None
            if host is None or not is_loopback(host):
                return ApiError(403, "Host: accepted without a key: localhost or its address", code="wrong_host")
            return None
        shown = headers.getlist("authorization")
        scheme, _, key = (shown[0] if len(shown) == 1 else "").partition(" ")
        shown = [key.strip()] if scheme.lower() == "bearer" else []
        is_open = scope["path"].removeprefix(self._root_path) in OPEN_PATHS
        if is_open or any(is_key(key, self._keys) for key in [*shown, *headers.getlist("x-api-key")]):
            return None
        sentence = "Authorization: accepted: Bearer and a key of this server, or x-api-key with it"
        challenge = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, sentence, kind="authentication_error", code="invalid_api_key", headers=challenge)


def _error_response(error: ApiError, path: str) -> Response:
    if "/v1/messages" in path:  # where an overloaded server is 529
        return JSONResponse(MessagesAnswer.failure(error), {503: 529}.get(error.status, error.status), error.headers)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):  # the framework's: unknown paths and methods
        said = f"{request.method} {path}: {str(error.detail).lower()}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
        error = ApiError(error.status_code, said, code=code, headers=error.headers)
    return _error_response(_as_told(error), path)


def _as_told(error: Exception) -> ApiError:
    """An exception as an ApiError: the model's errors are told to the client, a bug of ours only to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ExpertlyError):
        return failed(str(error))
    log.error("a request failed", exc_info=error)
    return failed("the server has a bug: its log says more")

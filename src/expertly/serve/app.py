"""The paths of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from expertly.core.errors import ExpertlyError
from expertly.serve.answers import ChatAnswer, CompletionAnswer
from expertly.serve.errors import ApiError
from expertly.serve.http import EventStream, Guard, as_event, as_told, on_bug, on_gone, on_http_error, unless_gone
from expertly.serve.reading import Bodies
from expertly.serve.request import ServedRequest
from expertly.serve.responses import ResponsesAnswer
from expertly.serve.schema import ChatRequest, CompletionRequest, ResponsesRequest
from expertly.serve.service import Service
from expertly.serve.settings import Access
from expertly.serve.view import View, dashboard_page

Answer = ChatAnswer | CompletionAnswer | ResponsesAnswer


def make_app(service: Service, view: View, access: Access, bodies: Bodies) -> Any:
    """The ASGI application. It accepts requests once `service.scheduler` has been started."""
    app = FastAPI(openapi_url=None)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_gone)
    for bug in (ApiError, ExpertlyError, Exception):
        app.add_exception_handler(bug, on_bug)
    _add_state(app, service, view)
    _add_texts(app, service, bodies)
    return Guard(app, access)


def _add_state(app: FastAPI, service: Service, view: View) -> None:
    scheduler = service.scheduler
    html, headers = dashboard_page()

    @app.get("/")
    async def dashboard() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/health")
    async def health() -> Response:
        if scheduler.problem is not None:
            return JSONResponse({"status": "stopped", "reason": scheduler.problem}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if scheduler.problem is not None or scheduler.is_draining:
            return JSONResponse({"status": "draining" if scheduler.is_draining else "stopped"}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.about.as_dict()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.about.as_dict())

    @app.get("/v1/experts")
    async def experts() -> Response:
        return JSONResponse(await asyncio.to_thread(view.experts))

    @app.get("/v1/state")
    async def state() -> Response:
        return JSONResponse(await asyncio.to_thread(view.state))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(view.metrics), media_type=CONTENT_TYPE_LATEST)


def _add_texts(app: FastAPI, service: Service, bodies: Bodies) -> None:
    def add(path: str, model: type[Any], make: Callable[[Any], Awaitable[Answer]]) -> None:
        @app.post(path)
        async def endpoint(request: Request) -> Response:
            async with bodies.read(request, model) as asked:
                answer, is_stream = await make(asked), asked.stream
                del asked  # its texts are tokens by now
            service.start(answer.request)
            gone = partial(service.scheduler.cancel, answer.request)
            if is_stream:
                return EventStream(_events(answer), gone)
            try:
                return JSONResponse(answer.whole(await unless_gone(request.receive, _all(answer.request))))
            finally:
                gone()

    add("/v1/chat/completions", ChatRequest, service.chat)
    add("/v1/completions", CompletionRequest, service.complete)
    add("/v1/responses", ResponsesRequest, service.respond)


async def _all(request: ServedRequest) -> list[Any]:
    return [delta async for delta in request]


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    """The stream of an answer. What fails comes too late for another status: the last event says it."""
    try:
        async for delta in answer.request:
            for chunk in answer.chunks(delta):
                yield as_event(chunk)
        for chunk in answer.last_chunks():
            yield as_event(chunk)
        yield answer.done
    except Exception as error:
        yield as_event(answer.failure(as_told(error)))

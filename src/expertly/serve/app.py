"""The paths of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from expertly.core.errors import ExpertlyError
from expertly.serve.answers import ChatAnswer, CompletionAnswer
from expertly.serve.errors import ApiError, ErrorObject
from expertly.serve.http import ClientGone, EventStream, Guard, as_event, on_bug, on_gone, on_http_error, unless_gone
from expertly.serve.reading import Bodies
from expertly.serve.request import ServedRequest
from expertly.serve.responses import ResponsesAnswer, ResponsesRequest
from expertly.serve.schema import ChatRequest, CompletionRequest, ModelName
from expertly.serve.service import Service
from expertly.serve.settings import Access
from expertly.serve.view import View, dashboard_page

_REFUSALS = {
    400: "cannot work as it is",
    401: "no key of this server",
    403: "a host name that is not this machine's",
    404: "not here",
    408: "too slow",
    413: "too large",
    415: "no JSON",
    429: "as many wait as may",
    503: "shutting down, or stopped",
}

Answer = ChatAnswer | CompletionAnswer | ResponsesAnswer


def make_app(service: Service, view: View, access: Access, bodies: Bodies) -> Any:
    """The ASGI application. It accepts requests once `service.scheduler` has been started."""
    app = FastAPI(title="expertly", version=version("expertly"), docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, on_http_error)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, on_gone)
    for bug in (ApiError, ExpertlyError, Exception):
        app.add_exception_handler(bug, on_bug)
    _add_state(app, service, view)
    _add_texts(app, service, bodies)
    app.openapi = partial(_openapi, app.openapi)  # type: ignore[method-assign]
    guarded: Any = Guard(app, access)
    if access.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return guarded


def _add_state(app: FastAPI, service: Service, view: View) -> None:
    scheduler = service.scheduler
    html, headers = dashboard_page()

    @app.get("/", response_class=HTMLResponse, summary="The dashboard")
    async def dashboard() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/health", summary="Is the server alive?", responses=_refusals(503))
    async def health() -> Response:
        if scheduler.problem is not None:
            return JSONResponse({"status": "stopped", "reason": scheduler.problem}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready", summary="Does it take requests?", responses=_refusals(503))
    async def ready() -> Response:
        if scheduler.problem is not None or scheduler.is_draining:
            return JSONResponse({"status": "draining" if scheduler.is_draining else "stopped"}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/v1/models", summary="The model that is served", responses=_refusals(401, 403))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.about.as_dict()]})

    @app.get("/v1/models/{name:path}", summary="The same, by its name", responses=_refusals(401, 403, 404))
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.about.as_dict())

    @app.get("/v1/experts", summary="Which experts are in memory", responses=_refusals(401, 403))
    async def experts() -> Response:
        return JSONResponse(await asyncio.to_thread(view.experts))

    @app.get("/v1/state", summary="What the dashboard shows beside it", responses=_refusals(401, 403))
    async def state() -> Response:
        return JSONResponse(await asyncio.to_thread(view.state))

    @app.get("/metrics", summary="For Prometheus", responses=_refusals(401, 403))
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(view.shown_metrics), media_type=CONTENT_TYPE_LATEST)


def _add_texts(app: FastAPI, service: Service, bodies: Bodies) -> None:
    refusals = _refusals(400, 401, 403, 404, 408, 413, 415, 429, 503)

    def add(path: str, summary: str, model: type[Any], make: Callable[[Any], Awaitable[Answer]]) -> None:
        @app.post(path, name=make.__name__, summary=summary, openapi_extra=_takes(model), responses=refusals)
        async def endpoint(request: Request) -> Response:
            async with bodies.read(request, model) as asked:
                told, is_stream = await make(asked), asked.stream
                del asked  # its texts are tokens by now
            service.start(told.request)
            gone = partial(service.scheduler.cancel, told.request)
            if is_stream:
                return EventStream(_events(told), gone, told.done, told.failure)
            try:
                return JSONResponse(told.whole(await unless_gone(request.receive, _all(told.request))))
            finally:
                gone()

    add("/v1/chat/completions", "Answer a conversation", ChatRequest, service.chat)
    add("/v1/completions", "Continue a text", CompletionRequest, service.complete)
    add("/v1/responses", "Answer a conversation, as items", ResponsesRequest, service.respond)
    asked_by = "Is this model loaded? Asked by `transformers chat`; none is loaded for it"

    @app.post("/load_model", summary=asked_by, openapi_extra=_takes(ModelName), responses=refusals)
    async def load_model(request: Request) -> Response:
        async with bodies.read(request, ModelName) as asked:
            service.check_model(asked.model)
        ready = as_event({"status": "ready", "model": service.about.name, "cached": True})
        return Response(ready, media_type=EventStream.media_type)


async def _all(request: ServedRequest) -> list[Any]:
    return [delta async for delta in request]


async def _events(told: Answer) -> AsyncIterator[Any]:
    async for delta in told.request:
        for chunk in told.chunks(delta):
            yield chunk
    for chunk in told.last_chunks():
        yield chunk


# -- the schema: bodies are read by us, so that everything wrong with one is told in one shape -----------------------


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": _REFUSALS[status], "model": ErrorObject} for status in statuses}


def _openapi(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    made = make()
    taken: Any = [(one, "validation") for one in (ChatRequest, CompletionRequest, ResponsesRequest, ModelName)]
    _, definitions = models_json_schema(taken, ref_template="#/components/schemas/{model}")
    made.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    return made

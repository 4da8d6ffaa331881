"""From a loaded model to a listening server, and to its end, which lets running requests finish."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from expertly import api
from expertly.core.errors import ConfigError
from expertly.model.batching import Batch, Limits, OneAtATime, Stepper, end_tokens, why_not_together
from expertly.model.generation import stop_strings
from expertly.serve.app import make_app
from expertly.serve.connection import Connection
from expertly.serve.memory import MAX_BATCH_TOKENS, PAGE_TOKENS, cache_for, memory_of, room_for
from expertly.serve.metrics import RequestMetrics
from expertly.serve.prompts import Prompts
from expertly.serve.reading import MIN_VALUES, Bodies
from expertly.serve.sampling import Sampler
from expertly.serve.scheduler import RequestScheduler, Room
from expertly.serve.schema import MAX_CHOICES
from expertly.serve.service import About, Service
from expertly.serve.settings import Access, ServeOptions
from expertly.serve.view import View

_LAST_WORDS_S = 5.0
"""Time for finished answers to reach their clients."""

_FORCED_LAST_WORDS_S = 1.0
"""The same where a second signal ends the server."""

SILENT_S = 30.0
"""A connection that has brought no request for so long is closed, also one that sends its headers byte by byte."""

log = logging.getLogger("expertly.serve")


@dataclass(frozen=True)
class Assembled:
    """A server without its socket."""

    model: Any
    app: Any
    service: Service
    view: View
    bodies: Bodies
    start: Callable[[], None]
    """Accept requests from now on, in the running loop."""
    close: Callable[[], None]


def open_server(options: ServeOptions, access: Access, progress: api.Progress | None = None) -> Assembled:
    """Load the model and make its server; `api.unload` of the model frees both. Raises ExpertlyError subclasses that
    name the option and what it accepts.
    """
    template = options.template()
    model, tokenizer = api.open_model(options.model, options, progress, lambda store: cache_for(options, store))
    try:
        return assemble(model, tokenizer, options, access, room_for(options, api.handle(model)), template)
    except BaseException:
        api.unload(model)
        raise


def assemble(
    model: Any, tokenizer: Any, options: ServeOptions, access: Access, room: Room, template: str | None = None
) -> Assembled:
    """A server of a model that `expertly.load` made; nothing else may run the model from now on. Tries whether requests
    can share forward passes. Raises ConfigError where there is no tokenizer.
    """
    loaded = api.handle(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = Prompts(tokenizer, vocabulary, template, model, room.context)
    memory = memory_of(loaded, room)
    why = why_not_together(model, PAGE_TOKENS)
    if why is not None:
        room = replace(room, is_one_at_a_time=True, max_running=MAX_CHOICES)
    metrics = RequestMetrics()
    scheduler = RequestScheduler(room, metrics)
    stats, own = loaded.stats.as_dict(), "the model's" if template is None else "given"
    about = About(
        name=options.served_name,
        created=int(time.time()),
        context=room.context,
        family=model.config.model_type,
        system=loaded.stats.system,
        batching="continuous" if why is None else "one at a time",
        batching_reason=why,
        chat_template="none: messages are joined" if prompts.is_plain else own,
        size_bytes=memory["dense_bytes"] + stats["expert_bytes"],
        memory=memory,
        rounding=stats["rounding"],
    )
    service = Service(about, prompts, scheduler, end_tokens(model), stop_strings(model))
    view = View(about, loaded, scheduler, metrics, time.monotonic)

    def make(sampler: Sampler, failed: Callable[..., None]) -> Stepper:
        if why is not None:
            return OneAtATime(model, sampler.choose, failed)
        limits = Limits(PAGE_TOKENS, room.num_pages, max(MAX_BATCH_TOKENS, room.max_running), room.max_running)
        return Batch(model, limits, sampler.choose, failed)

    def close() -> None:
        scheduler.close()
        service.close()

    bodies = Bodies(options.max_body, MIN_VALUES + 2 * room.context)
    app = make_app(service, view, access, bodies)
    return Assembled(model, app, service, view, bodies, lambda: scheduler.start(make), close)


def bind(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is found at once. Raises ConfigError."""
    if port > 65535:
        raise ConfigError(f"port={port}: accepted: 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)  # asyncio turns Nagle's algorithm off only where it is named
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        # Else two servers that start at once both get the port, and one fails after its model was loaded.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, OverflowError) as error:
        free = "; port 0 takes any that is free" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise ConfigError(f"host={host!r}, port={port}: cannot listen there: {error}{free}") from None
    return found


class ApiServer(uvicorn.Server):
    """Serves until SIGTERM, SIGINT or `end`, then drains. A second signal ends it at once."""

    def __init__(
        self,
        assembled: Assembled,
        drain_s: float = 600.0,
        announce: Callable[[], None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                assembled.app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(_LAST_WORDS_S),
            )
        )
        self._assembled = assembled
        self._drain_s = drain_s
        self._announce = announce
        self._silent_s = silent_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._assembled.start()
        for one in sockets or ():  # as connections inherit it, the next server gets the port at once
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        self._spawn(self._close_silent())
        self._announce()
        if self._is_ending.is_set():  # a signal came before there was a loop to drain in
            self.end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        answering = self.server_state.tasks
        if self.force_exit and answering:  # the end of the loop would cancel them, and uvicorn log each
            self._assembled.service.scheduler.abort()
            await asyncio.wait(answering, timeout=_FORCED_LAST_WORDS_S)
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._assembled.close)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """uvicorn would stop listening at once; this keeps listening, and answers 503, until all running requests have
        ended.
        """
        if self._is_ending.is_set():
            self.should_exit = self.force_exit = True
        else:
            log.info("%s: finishing what runs", signal.Signals(sig).name)
            self.end()

    def end(self) -> None:
        """Drain, then stop. Any thread and signal handlers may call."""
        self._is_ending.set()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain()))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_silent(self) -> None:
        while True:
            await asyncio.sleep(self._silent_s / 4)
            before = time.monotonic() - self._silent_s
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                if connection.is_silent and connection.since <= before:
                    connection.transport.close()

    async def _drain(self) -> None:
        scheduler = self._assembled.service.scheduler
        try:
            await asyncio.wait_for(scheduler.drained(), self._drain_s)
        except asyncio.TimeoutError:
            log.warning("%d requests did not end in time", len(scheduler.waiting) + len(scheduler.running))
            scheduler.abort()
        self.should_exit = True

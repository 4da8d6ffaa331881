"""From a loaded model to a listening server, and to its end, which lets running requests finish."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from expertly import api
from expertly.core.errors import ConfigError
from expertly.model.batching import Batch, Limits, OneAtATime, Stepper, end_tokens, why_not_together
from expertly.model.generation import stop_strings
from expertly.serve.app import make_app
from expertly.serve.memory import MAX_BATCH_TOKENS, PAGE_TOKENS, cache_for, kept_pages, memory_of, room_for
from expertly.serve.prompts import Prompts
from expertly.serve.reading import MIN_VALUES, Bodies
from expertly.serve.sampling import Sampler
from expertly.serve.scheduler import RequestScheduler, Room
from expertly.serve.schema import MAX_CHOICES
from expertly.serve.service import Service
from expertly.serve.settings import ServeOptions
from expertly.serve.view import View

_LAST_WORDS_S = 5.0  # time for finished answers to reach their clients
_FORCED_LAST_WORDS_S = 1.0  # the same where a second signal ends the server

SILENT_S = 75.0
"""A connection is closed after so long without a request's headers, or if its client reads nothing of an answer."""

MAX_WAITED_FOR = 384
"""Most connections that wait for a request, or the rest of one; the queue bounds those that are answered."""

MAX_HEAD_NBYTES = 64 << 10
"""Most bytes outside bodies: a request's headers, and what its client sends behind it before the answer."""

log = logging.getLogger("expertly.serve")


@dataclass(frozen=True)
class Assembled:
    """A server without its socket. `make(sampler, failed)` makes what runs the model and calls `failed`."""

    model: Any
    app: Any
    service: Service
    view: View
    bodies: Bodies
    make: Callable[[Sampler, Callable[..., None]], Stepper]


def open_server(options: ServeOptions, keys: Sequence[str] = (), progress: api.Progress | None = None) -> Assembled:
    """Load the model and make its server; `api.unload` of the model frees both. Raises ExpertlyError."""
    template = options.template()
    model, tokenizer = api.open_model(options.model, options, progress, lambda store: cache_for(options, store))
    try:
        return assemble(model, tokenizer, options, keys, room_for(options, api.handle(model)), template)
    except BaseException:
        api.unload(model)
        raise


def assemble(
    model: Any, tokenizer: Any, options: ServeOptions, keys: Sequence[str], room: Room, template: str | None = None
) -> Assembled:
    """A server of a model that `expertly.load` made; nothing else may run the model from now on. Tries whether requests
    can share forward passes. Raises ConfigError where there is no tokenizer.
    """
    loaded = api.handle(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    reason = why_not_together(model, PAGE_TOKENS)
    pages = kept_pages(options, model, loaded.store, reason)
    prompts = Prompts(tokenizer, vocabulary, template, room.context)
    memory, stats = memory_of(loaded, room), loaded.stats.as_dict()
    if reason is not None:
        room = replace(room, is_one_at_a_time=True, max_running=MAX_CHOICES)
    names = options.served_names
    head = {"id": names[0], "object": "model", "created": int(time.time()), "owned_by": "expertly"}
    facts = {  # what OpenAI has no field for
        "names": names,
        "context": room.context,
        "family": model.config.model_type,
        "system": stats["system"],
        "batching": "continuous" if reason is None else "one at a time",
        "batching_reason": reason,
        "chat_template": prompts.template_name,
        "size_bytes": memory["dense_bytes"] + stats["expert_bytes"],
        "memory": memory,
        "rounding": stats["rounding"],
        "kv": stats["kv"],
    }
    about = {**head, "max_model_len": room.context, "expertly": facts}
    service = Service(about, prompts, RequestScheduler(room), end_tokens(model), stop_strings(model))
    view = View(about, loaded, service.scheduler)

    def make(sampler: Sampler, failed: Callable[..., None]) -> Stepper:
        if reason is not None:
            return OneAtATime(model, sampler.choose, failed)
        limits = Limits(PAGE_TOKENS, room.num_pages, max(MAX_BATCH_TOKENS, room.max_running), room.max_running)
        return Batch(model, limits, sampler.choose, failed, pages)

    bodies = Bodies(options.max_body, MIN_VALUES + 2 * room.context)
    app = make_app(service, view, keys, bodies, options.root_path or "")
    return Assembled(model, app, service, view, bodies, make)


def bind(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a port in use is found at once. Raises ConfigError."""
    if port > 65535:
        raise ConfigError(f"port={port}: accepted: 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)  # asyncio turns Nagle's algorithm off only where it is named
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Else two servers that start at once both get the port, and one fails after its model was loaded.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, OverflowError) as error:
        free = "; port 0 takes any that is free" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise ConfigError(f"host={host!r}, port={port}: cannot listen there: {error}{free}") from None
    return listener


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, with bounds on headers, and on connections that wait for their client: the first to wait is closed."""

    cycle: Any  # the last request whose headers are there
    transport: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_outside = 0  # bytes outside bodies since the last request's headers
        self.since = time.monotonic()  # when it began, or its last request was answered
        self._unread = 0, self.since  # bytes that the client has not read, and since when

    def is_stalled(self, before: float) -> bool:
        """Whether bytes have been waiting for its client since `before`, and it read none. To be asked regularly."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread != self._unread[0]:
            self._unread = num_unread, time.monotonic()
        return num_unread > 0 and self._unread[1] <= before

    @property
    def is_silent(self) -> bool:
        """Whether no request of it is being answered or read."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_WAITED_FOR:
            waited_for = [other for other in self.connections if other.is_silent or other.cycle.more_body]
            if len(waited_for) > MAX_WAITED_FOR:
                min(waited_for, key=lambda connection: connection.since).transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        is_body = before is not None and before.more_body
        super().data_received(data)
        if is_body or self.cycle is not before:
            self._num_outside = 0
        else:
            self._num_outside += len(data)
            if self._num_outside > MAX_HEAD_NBYTES and not self.transport.is_closing():
                self.send_400_response("Too much outside a body.")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.cycle.more_body = False  # also where the answer came before the end of the body

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        super().on_response_complete()


class ApiServer(uvicorn.Server):
    """Serves until SIGTERM, SIGINT or `end`, then drains. A second signal ends it at once."""

    def __init__(
        self,
        assembled: Assembled,
        drain_s: float = 600.0,
        announce: Callable[[], None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        quiet: Any = {"lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
        ends_s: Any = {"timeout_graceful_shutdown": int(_LAST_WORDS_S), "timeout_keep_alive": math.ceil(silent_s)}
        super().__init__(uvicorn.Config(assembled.app, http=Connection, ws="none", **ends_s, **quiet))
        self._service = assembled.service
        self._make = assembled.make
        self._drain_s = drain_s
        self._announce = announce
        self._silent_s = silent_s
        self._ends_s: float | None = None  # when it stops, whatever still runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.scheduler.start(self._make)
        for listener in sockets or ():  # as connections inherit it, the next server gets the port at once
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; uvicorn asks ten times a second."""
        self._close_silent()
        if self._ends_s is not None and not self.should_exit:
            self._drain(self._ends_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        answering = self.server_state.tasks
        if self.force_exit and answering:  # the end of the loop would cancel them, and uvicorn log each
            self._service.scheduler.abort()
            await asyncio.wait(answering, timeout=_FORCED_LAST_WORDS_S)
        await super().shutdown(sockets)
        await asyncio.to_thread(self._service.close)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Keeps listening, and answers 503, until all running requests have ended; uvicorn would stop at once."""
        if self._ends_s is not None:
            self.should_exit = self.force_exit = True
        else:
            log.info("%s: finishing what runs", signal.Signals(sig).name)
            self.end()

    def end(self) -> None:
        """Drain, then stop. Any thread and signal handlers may call."""
        if self._ends_s is None:
            self._ends_s = time.monotonic() + self._drain_s

    def _close_silent(self) -> None:
        before = time.monotonic() - self._silent_s
        connections: Any = list(self.server_state.connections)
        for connection in connections:
            if connection.is_stalled(before):
                connection.transport.abort()
            elif connection.is_silent and connection.since <= before:
                connection.transport.close()

    def _drain(self, ends_s: float) -> None:
        scheduler = self._service.scheduler
        is_done = scheduler.drain()
        self.should_exit = is_done or time.monotonic() >= ends_s
        if self.should_exit and not is_done:
            log.warning("%d requests did not end in time", len(scheduler.waiting) + len(scheduler.running))
            scheduler.abort()

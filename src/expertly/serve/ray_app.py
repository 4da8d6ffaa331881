"""The server under Ray Serve: replicas on many machines, each with its own budget, which learn from each other.

`serve run expertly.serve.ray_app:app model=... replicas=2 memory=25%`; see docs/deploy.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertly.core.costs import check_codec
from expertly.core.errors import ConfigError
from expertly.options import OptionInfo, names_of_today, option
from expertly.scheduler.presets import AUTO_SYSTEM, get_system
from expertly.serve.fleet import Member, News, Pool, Report
from expertly.serve.settings import Access, ServeOptions

try:
    from ray import serve
except ImportError as error:
    raise ConfigError("ray[serve]: not installed in this Python; `pip install 'expertly[ray]'` brings it") from error

if TYPE_CHECKING:
    from prometheus_client import Metric

    from expertly.engine.learned import LearnedExchange
    from expertly.serve.server import Assembled

_SWAP_S = 5.0
_PATIENCE_S = 30.0
_SPARE_REQUESTS = 64
"""Requests that a replica accepts beyond those that run and wait: it answers them with 429 at once, and serves
/metrics.
"""

log = logging.getLogger("expertly.serve")


def _above_zero(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ValueError("a number above 0")
    return value


@dataclass(frozen=True, kw_only=True)
class RayOptions(ServeOptions):
    """The options of `app`; each replica reads files on its own machine."""

    replicas: int = option(2, "servers", metavar="N", least=1)
    no_key: bool = option(False, "requests for localhost are answered without a key, and no others")
    share_every_s: float = option(30.0, "between exchanges of what was learned", metavar="SECONDS", type=_above_zero)
    num_cpus: float = option(1.0, "that Ray counts a replica as", metavar="N")
    num_gpus: float = option(0.0, "that Ray counts a replica as", metavar="N")

    def check(self) -> None:
        """Checks what can be checked before a replica starts. Raises ConfigError."""
        if self.system != AUTO_SYSTEM:
            get_system(self.system)
        check_codec(self.codec)
        if self.api_key_file is None and not self.no_key:
            raise ConfigError(
                "api_key_file: missing; accepted: a file of keys on every machine, or no_key=true, with which requests "
                "for localhost are answered and no others"
            )
        if self.api_key_file is not None and self.no_key:
            raise ConfigError("api_key_file and no_key=true: accepted: one of the two")


class Exchange:
    """The pool of learned state, as a deployment of its own."""

    def __init__(self) -> None:
        self._pool = Pool(time.monotonic)

    async def swap(self, report: Report) -> News:
        return self._pool.swap(report)


class Replica:
    """One server: loads the model, and answers the requests that Ray's proxies pass on."""

    def __init__(self, options: RayOptions, exchange: Any) -> None:
        self._options = options
        self._exchange = exchange
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._server: Assembled | None = None
        self._sharing: LearnedExchange | None = None  # None: its system learns nothing, or keeps it nowhere
        self._tasks: list[asyncio.Task[None]] = []

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called once, before there are requests."""
        server, identity = await asyncio.to_thread(self._open)
        self._member = Member(self._name, identity, self._sharing, self._own_metrics, self._ask_pool)
        if self._sharing is not None:
            with _noted("the replicas that run could not be asked what they have learned"):
                await self._member.swap()
            self._sharing.exchange()  # before anything is predicted
        server.start()
        self._tasks = [asyncio.ensure_future(work) for work in (server.view.keep_noting(), self._swap())]
        server.view.shown_metrics = self._all_metrics
        return _named(server.app, self._name)

    def _open(self) -> tuple[Assembled, str]:
        """Load the model as `expertly serve` does, and find its identity. Imports torch only here."""
        from expertly import api
        from expertly.serve.server import open_server

        server = self._server = open_server(self._options, Access.of(self._options))
        loaded = api.handle(server.model)
        log.info("%s", loaded.stats.memory_reason)
        if (prefetching := loaded.engine.prefetching) is not None:
            self._sharing = prefetching.share(self._options.share_every_s)
        return server, loaded.store.manifest.identity

    async def check_health(self) -> None:
        """See Ray Serve: a replica that raises is replaced."""
        if self._server is not None and self._server.service.scheduler.problem is not None:
            raise RuntimeError(self._server.service.scheduler.problem)

    async def __del__(self) -> None:
        """Runs when Ray has waited for running requests: writes what was learned, and shares it."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._close, self._server)
            with _noted("what was learned last was not told to the other replicas"):
                await self._member.swap()

    def _close(self, server: Assembled) -> None:
        from expertly import api

        server.close()
        api.unload(server.model)

    async def _ask_pool(self, report: Report) -> News:
        news: News = await asyncio.wait_for(self._exchange.swap.remote(report), _PATIENCE_S)
        return news

    def _own_metrics(self) -> list[Metric]:
        from expertly.serve.metrics import of_replica

        assert self._server is not None
        num_learned = None if self._sharing is None else self._sharing.num_taken
        return of_replica(self._server.service.scheduler.metrics.registry, num_learned)

    def _all_metrics(self) -> bytes:
        from expertly.serve.metrics import together

        return together({**self._member.metrics_of_others, self._name: self._own_metrics()})

    async def _swap(self) -> None:
        while True:
            with _noted("the other replicas could not be reached"):
                await self._member.swap()
            await asyncio.sleep(min(_SWAP_S, self._options.share_every_s))


def _named(inner: ASGIApp, name: str) -> ASGIApp:
    """The same, but every answer says which replica gave it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-expertly-replica", name.encode())]}
            await send(message)

        await inner(scope, receive, send_named)

    return app


def app(options: RayOptions | dict[str, Any]) -> Any:
    """The application, for `serve run` and Ray's config files, which give strings. Raises ConfigError."""
    if not isinstance(options, RayOptions):
        options = _checked(options)
    options.check()
    pool = serve.deployment(
        name="exchange", num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )(Exchange)
    replica = serve.deployment(
        name="expertly",
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_running + options.max_queue + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=options.drain_seconds,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )(serve.ingress()(Replica))
    return replica.bind(options, pool.bind())


def _checked(told: dict[str, Any]) -> RayOptions:
    known: dict[str, OptionInfo] = {
        one.name: one.metadata["option"] for one in fields(RayOptions) if "option" in one.metadata
    }
    values: dict[str, Any] = {}
    for name, value in names_of_today(told).items():
        if name not in known:
            raise ConfigError(f"{name}={value!r}: there is no such option; accepted: {', '.join(known)}")
        if value is None:
            continue
        try:
            values[name] = _is_true(str(value)) if known[name].type is bool else known[name].parse(str(value))
        except ValueError as error:
            raise ConfigError(f"{name}={value!r}: accepted: {error}") from None
    return RayOptions(**values)


def _is_true(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


@contextlib.contextmanager
def _noted(what: str) -> Iterator[None]:
    """Log an error of the exchange; a replica serves without the others."""
    try:
        yield
    except Exception as error:  # whatever Ray has to say of an actor that is not there
        log.warning("%s: %s", what, error)

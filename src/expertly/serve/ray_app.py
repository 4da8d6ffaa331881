"""The server under Ray Serve: replicas on many machines, each with its own budget, which learn from each other.

`serve run expertly.serve.ray_app:app model=... replicas=2 memory=25%`; see docs/deploy.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.types import ASGIApp

from expertly.core.costs import check_codec
from expertly.core.errors import ConfigError
from expertly.options import names_of_today
from expertly.scheduler.presets import AUTO_SYSTEM, get_system
from expertly.serve.fleet import Member, News, Pool, Report
from expertly.serve.fleet_metrics import together
from expertly.serve.named import Named

try:
    from ray import serve
except ImportError as error:
    raise ConfigError("ray[serve]: not installed in this Python; `pip install 'expertly[ray]'` brings it") from error

if TYPE_CHECKING:
    from expertly.serve.replica import Opened

_NOTE_S = 1.0
_SWAP_S = 5.0
_PATIENCE_S = 30.0
_SPARE_REQUESTS = 64
"""That a replica takes beyond those that run and wait: it tells them 429 at once; and those for /metrics and such."""

log = logging.getLogger("expertly.serve")


class Options(BaseModel):
    """What `app` can be told, as `expertly serve` is; files are read by each replica, on its own machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = None
    name: str | None = None
    replicas: int = Field(default=2, ge=1)
    memory: str = "auto"
    total_memory: str | None = None
    system: str = AUTO_SYSTEM
    segments: int | None = Field(default=None, ge=1)
    dtype: str | None = None
    device: str | None = None
    host_memory: str = "auto"
    codec: str = "auto"
    learned: str = "auto"
    predictor: str = "auto"
    plan: str | None = None
    predict: Literal["auto", "thread", "inline"] = "auto"
    context: int | None = Field(default=None, ge=1)
    max_running: int = Field(default=16, ge=1)
    max_queue: int = Field(default=256, ge=0)
    kv_tokens: int | None = Field(default=None, ge=1)
    max_body: int = Field(default=4 << 20, ge=1)
    chat_template: str | None = None
    api_key_file: str | None = None
    no_key: bool = False
    log_prompts: bool = False
    drain_seconds: float = Field(default=600.0, ge=0)
    share_every_s: float = Field(default=30.0, gt=0)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def rename(cls, told: Any) -> Any:
        return names_of_today(told) if isinstance(told, dict) else told

    def check(self) -> None:
        """What can be known before a replica starts. Raises ConfigError."""
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
    """The pool, as a deployment of its own."""

    def __init__(self) -> None:
        self._pool = Pool(time.monotonic)

    async def swap(self, report: Report) -> News:
        return self._pool.swap(report)


class Replica:
    """One server: it loads the model, and answers what Ray's proxies pass on."""

    def __init__(self, options: Options, exchange: Any) -> None:
        self._options = options
        self._exchange = exchange
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._opened: Opened | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """See ray.serve.ingress: called once, before there are requests."""
        opened = await asyncio.to_thread(_open, self._options)
        member = Member(self._name, opened.identity, opened.sharing, opened.metrics, self._ask_pool)
        if opened.sharing is not None:
            with _noted("the replicas that run could not be asked what they have learned"):
                await member.swap()
            opened.sharing.exchange()  # before anything is predicted
        self._opened, self._member = opened, member
        opened.server.start()
        self._tasks = [asyncio.ensure_future(work()) for work in (self._note, self._swap)]
        return Named(opened.server.app, self._name, self._all_metrics)

    async def check_health(self) -> None:
        """See Ray Serve: a replica that raises is replaced."""
        if self._opened is not None and self._opened.server.scheduler.problem is not None:
            raise RuntimeError(self._opened.server.scheduler.problem)

    async def __del__(self) -> None:
        """Ray has waited for what ran. What was learned is written, and told."""
        for task in self._tasks:
            task.cancel()
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)
            with _noted("what was learned last was not told to the other replicas"):
                await self._member.swap()

    async def _ask_pool(self, report: Report) -> News:
        news: News = await asyncio.wait_for(_answer(self._exchange.swap.remote(report)), _PATIENCE_S)
        return news

    def _all_metrics(self) -> bytes:
        assert self._opened is not None
        return together({**self._member.metrics_of_others, self._name: self._opened.metrics()})

    async def _note(self) -> None:
        assert self._opened is not None
        while True:
            self._opened.server.view.note()
            await asyncio.sleep(_NOTE_S)

    async def _swap(self) -> None:
        while True:
            with _noted("the other replicas could not be reached"):
                await self._member.swap()
            await asyncio.sleep(min(_SWAP_S, self._options.share_every_s))


def app(options: Options | dict[str, Any]) -> Any:
    """The application, for `serve run` and Ray's config files, which give strings. Raises ConfigError."""
    if not isinstance(options, Options):
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


def _checked(options: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        accepted = ", ".join(Options.model_fields)
        hint = f"; accepted: {accepted}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{name}={first['input']!r}: {first['msg'].lower()}{hint}") from None


def _open(options: Options) -> Opened:
    """What needs torch is imported where a model is loaded, and by nobody else."""
    from expertly.serve.replica import open_server

    return open_server(options)


async def _answer(response: Any) -> News:
    news: News = await response
    return news


@contextlib.contextmanager
def _noted(what: str) -> Iterator[None]:
    """A replica serves on without the others."""
    try:
        yield
    except Exception as error:  # whatever Ray has to say of an actor that is not there
        log.warning("%s: %s", what, error)

"""Several servers of one model that share what they learn and count, through one pool. The caller connects them to the
pool, see `ray_app`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from prometheus_client import Metric

from expertly.core.errors import StoreError
from expertly.engine.learned import LearnedExchange

Learned = Mapping[str, npt.NDArray[Any]]

MAX_MEMBERS = 64
"""How many members the pool remembers; those that have been silent longest are forgotten first."""

SILENT_S = 60.0
"""A member that has been silent for so long is not counted any more; what it learned stays."""

log = logging.getLogger("expertly.serve")


@dataclass(frozen=True, slots=True)
class Report:
    """What a member tells the pool. `learned`: its learned state, where that has changed; `pool`, `version`: of the
    last news it got.
    """

    name: str
    identity: str
    metrics: Sequence[Metric]
    learned: Learned | None = None
    pool: str | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """What the pool tells a member: the others' new learned state, and their last metrics."""

    pool: str
    version: int
    learned: dict[str, Learned] = field(default_factory=dict)
    metrics: dict[str, Sequence[Metric]] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    identity: str
    metrics: Sequence[Metric]
    at_s: float
    version: int = 0
    learned: Learned | None = None


class Pool:
    """Lives in one place that all members reach. It may be lost: members tell a new pool everything."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._id = uuid.uuid4().hex
        self._version = 0
        self._members: dict[str, _Known] = {}  # who spoke last is last

    def swap(self, report: Report) -> News:
        """Take a member's report and return news of the others; learned state only of the same model."""
        now = self._now_s()
        one = self._members.pop(report.name, None) or _Known(report.identity, report.metrics, now)
        one.identity, one.metrics, one.at_s = report.identity, report.metrics, now
        if report.learned is not None:
            self._version += 1
            one.learned, one.version = report.learned, self._version
        self._members[report.name] = one
        if len(self._members) > MAX_MEMBERS:
            del self._members[next(iter(self._members))]
        since = report.version if report.pool == self._id else 0
        others = {name: other for name, other in self._members.items() if name != report.name}
        return News(
            self._id,
            self._version,
            {
                name: other.learned
                for name, other in others.items()
                if other.learned is not None and other.version > since and other.identity == report.identity
            },
            {name: other.metrics for name, other in others.items() if now - other.at_s < SILENT_S},
        )


class Member:
    """A server's side of the pool. `sharing` is None where it learns nothing; its metrics are shared anyway."""

    def __init__(
        self,
        name: str,
        identity: str,
        sharing: LearnedExchange | None,
        metrics: Callable[[], Sequence[Metric]],
        swap: Callable[[Report], Awaitable[News]],
    ) -> None:
        self.name = name
        self.metrics_of_others: dict[str, Sequence[Metric]] = {}
        self._identity = identity
        self._sharing = sharing
        self._metrics = metrics
        self._swap = swap
        self._pool: str | None = None
        self._version = 0
        self._learned: Learned | None = None
        self._is_told = True

    async def swap(self) -> None:
        """Report to the pool and take its news. Raises what reaching the pool raises; the next call reports the same
        again.
        """
        if self._sharing is not None and (learned := self._sharing.take()) is not None:
            self._learned, self._is_told = learned, False
        told = None if self._is_told else self._learned
        report = Report(self.name, self._identity, self._metrics(), told, self._pool, self._version)
        news = await self._swap(report)
        # A pool that is new has forgotten what it was told before.
        self._is_told = self._pool in (None, news.pool) or told is not None
        self._pool, self._version = news.pool, news.version
        self.metrics_of_others = news.metrics
        for other, arrays in news.learned.items():
            if self._sharing is None:
                break
            try:
                self._sharing.give(other, arrays)
            except StoreError as error:
                log.warning("what %s has learned was left out: %s", other, error)

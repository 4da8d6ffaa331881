"""The engine's counters as the server's threads see them: read while a forward pass may be counting."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expertly.api import Handle
from expertly.core.messages import Phase
from expertly.scheduler.counters import PhaseCounters

RECENT_S = 60.0
"""What "recent" is."""

_ATTEMPTS = 5
_FRESH_S = 0.25


@dataclass(frozen=True, slots=True)
class Tally:
    """Cumulative counts of one layer, over both phases, at a time."""

    hits: int
    partial_hits: int
    misses: int
    loaded_nbytes: int
    stall_ns: int

    def since(self, before: Tally) -> Tally:
        return Tally(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))

    @property
    def demands(self) -> int:
        return self.hits + self.partial_hits + self.misses

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.demands if self.demands else None


@dataclass(frozen=True, slots=True)
class Moment:
    """When, and what each layer had come to."""

    at_s: float
    tokens: int
    layers: tuple[Tally, ...]


class Readings:
    """Any thread may ask."""

    def __init__(self, handle: Handle, now_s: Callable[[], float] = time.monotonic) -> None:
        self._handle = handle
        self._now_s = now_s
        self._lock = threading.Lock()
        self._moments: deque[Moment] = deque()
        self._stats: tuple[float, dict[str, Any]] | None = None

    def note(self) -> None:
        """Remember the moment, once a second or so: what is recent is told from these."""
        moment = self._moment()
        with self._lock:
            self._moments.append(moment)
            while len(self._moments) > 2 and moment.at_s - self._moments[1].at_s >= RECENT_S:
                self._moments.popleft()

    def recent(self) -> tuple[float, int, list[Tally]]:
        """Seconds, tokens computed and each layer's counts over at most the last minute."""
        now = self._moment()
        with self._lock:
            first = self._moments[0] if self._moments else now
        layers = [last.since(before) for last, before in zip(now.layers, first.layers, strict=True)]
        return now.at_s - first.at_s, now.tokens - first.tokens, layers

    def stats(self) -> dict[str, Any]:
        """`expertly.stats(model).as_dict()`, not older than a quarter of a second."""
        with self._lock:
            if self._stats is not None and self._now_s() - self._stats[0] < _FRESH_S:
                return self._stats[1]
        found: dict[str, Any] = _read(self._handle.stats.as_dict)
        with self._lock:
            self._stats = (self._now_s(), found)
        return found

    def residency(self) -> list[list[int]]:
        """Of each layer, of each expert by its number in the model: how many of its segments are on a device."""
        executor = self._handle.engine.executor
        placement = getattr(executor, "placement", None)
        rows = [[0] * layer.num_experts for layer in executor.geometry.layers]
        for number, device in enumerate(executor.shards):
            geometry = device.scheduler.geometry
            resident = list(device.scheduler.slots.resident)
            for layer, row in enumerate(rows):
                first = geometry.first_expert_id(layer)
                for expert in range(geometry.layers[layer].num_experts):
                    there = expert if placement is None else placement.shares[number].experts[layer][expert]
                    row[there] = resident[first + expert].bit_count()
        return rows

    def host_memory(self) -> dict[str, int]:
        """Host memory for experts behind the devices, and what of it is taken; empty where there is none."""
        backends = (device.device for device in self._handle.engine.executor.shards)
        tiers = [backend.tier for backend in backends if hasattr(backend, "tier")]
        if not tiers:
            return {}
        return {
            "host_experts_bytes": sum(tier.memory_nbytes for tier in tiers),
            "host_resident_bytes": sum(tier.resident_nbytes for tier in tiers),
        }

    def _moment(self) -> Moment:
        engine = self._handle.engine
        layers = _read(lambda: tuple(self._tally(layer) for layer in range(engine.executor.geometry.num_layers)))
        return Moment(self._now_s(), engine.num_prefill_tokens + engine.num_decode_tokens, layers)

    def _tally(self, layer: int) -> Tally:
        counters = self._handle.engine.executor.layer_counters(layer)
        both: list[PhaseCounters] = [counters.of(phase) for phase in Phase]
        return Tally(
            sum(one.hits for one in both),
            sum(one.partial_hits for one in both),
            sum(one.misses for one in both),
            sum(one.loaded_nbytes for one in both),
            sum(one.stall_ns for one in both),
        )


def _read(read: Callable[[], Any]) -> Any:
    """A dictionary of counters may grow while it is read; the next attempt finds it still."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return read()
        except RuntimeError:
            continue
    return read()

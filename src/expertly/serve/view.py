"""A running server's state: for Prometheus, for programs, for the dashboard."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import generate_latest

from expertly.api import Handle
from expertly.core.messages import Phase
from expertly.serve.metrics import EngineMetrics, RequestMetrics, prefetch_accuracy
from expertly.serve.scheduler import RequestScheduler
from expertly.serve.service import About

RECENT_S = 60.0
"""The time that "recent" figures cover."""

_RATE_S = 5.0
"""The time that tokens per second are averaged over."""

_NOTE_S = 1.0
_ATTEMPTS = 5
_FRESH_S = 0.25

_RECENT = ("hits", "partial_hits", "misses", "loaded_nbytes", "stall_ns")
"""A layer's counters with recent figures, in the order of their columns."""


class Counted(NamedTuple):
    """What had been counted at a moment: tokens written and computed, and each layer's counters, [L, 5]."""

    at_s: float
    num_written: int
    num_computed: int
    layers: npt.NDArray[np.int64]


class View:
    """Any thread may ask. A server runs `keep_noting` while it serves."""

    def __init__(
        self,
        about: About,
        loaded: Handle,
        scheduler: RequestScheduler,
        metrics: RequestMetrics,
        now_s: Callable[[], float],
    ) -> None:
        self._about = about
        self._loaded = loaded
        self._executor = loaded.engine.executor
        self._scheduler = scheduler
        self._metrics = metrics
        self._now_s = now_s
        self._lock = threading.Lock()  # of what follows
        self._moments = deque([self._moment()])
        self._stats: tuple[float, dict[str, Any]] | None = None
        self.shown_metrics = self.metrics
        """The text of /metrics: this server's, unless something else collects that of several."""
        metrics.registry.register(EngineMetrics(self.stats, self.memory, scheduler))

    def note(self) -> None:
        """Remember the counters, from which rates are computed."""
        now = self._moment()
        with self._lock:
            self._moments.append(now)
            while now.at_s - self._moments[1].at_s >= RECENT_S:
                self._moments.popleft()

    async def keep_noting(self) -> None:
        while True:
            await asyncio.to_thread(self.note)  # a worker may let it wait
            await asyncio.sleep(_NOTE_S)

    def metrics(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._metrics.registry)

    def experts(self) -> dict[str, Any]:
        """How many segments of each expert are resident, and each layer's recent figures."""
        stats = self.stats()
        recent = self._since(RECENT_S)
        layers = []
        for number, (row, counts) in enumerate(zip(self._residency(), recent.layers, strict=True)):
            demands = int(counts[:3].sum())
            layers.append(
                {
                    "layer": number,
                    "segments_present": row,
                    "recent_hit_rate": int(counts[0]) / demands if demands else None,
                    "recent_demands": demands,
                    "recent_bytes_loaded": int(counts[3]),
                    "recent_stall_s": int(counts[4]) / 1e9,
                    "hit_rate": stats["layers"][number]["decode"]["hit_rate"],
                }
            )
        told = ("system", "segments", "memory_bytes", "expert_bytes")
        return {"object": "experts", **{name: stats[name] for name in told}, "recent_s": recent.at_s, "layers": layers}

    def state(self) -> dict[str, Any]:
        """The server's numbers now."""
        stats, scheduler = self.stats(), self._scheduler
        recent, lately = self._since(RECENT_S), self._since(_RATE_S)
        hits, partial_hits, misses, loaded_nbytes, stall_ns = (int(sum) for sum in recent.layers.sum(axis=0))
        demands = hits + partial_hits + misses
        return {
            "object": "state",
            "model": self._about.as_dict(),
            "draining": scheduler.is_draining,
            "problem": scheduler.problem,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "max_running": scheduler.room.max_running,
            "max_queue": scheduler.room.max_queue,
            "kv_pages": scheduler.room.num_pages,
            "kv_pages_free": scheduler.free_pages,
            "tokens_per_s": lately.num_written / lately.at_s if lately.at_s > 0 else None,
            "tokens_written": self._metrics.num_written,
            "recent": {
                "seconds": recent.at_s,
                "tokens_computed": recent.num_computed,
                "hit_rate": hits / demands if demands else None,
                "partial_hit_rate": partial_hits / demands if demands else None,
                "stall_share": stall_ns / 1e9 / recent.at_s if recent.at_s > 0 else None,
                "bytes_loaded": loaded_nbytes,
            },
            "history": _history_of(stats),
            "prefetch_accuracy": prefetch_accuracy(stats),
            "memory": self.memory() | {"all_experts_bytes": stats["expert_bytes"]},
            "workers": [
                {name: one[name] for name in ("device", "experts", "memory_bytes", "resident_bytes")}
                | {"hit_rate": one["decode"]["hit_rate"], "experts_s": one["decode"]["experts_s"], **one["worker"]}
                for one in stats["devices"]
                if one["worker"] is not None
            ],
        }

    def memory(self) -> dict[str, int]:
        """Bytes by use, as they were divided, and how much of the experts' room is taken; in workers also how much they
        have.
        """
        devices = self.stats()["devices"]
        here, away = ([one for one in devices if (one["worker"] is None) == is_here] for is_here in (True, False))
        found = {**self._about.memory, "experts_resident_bytes": sum(one["resident_bytes"] for one in here)}
        if away:
            found["workers_experts_bytes"] = sum(one["memory_bytes"] for one in away)
            found["workers_resident_bytes"] = sum(one["resident_bytes"] for one in away)
        return found | self.host_memory()

    def host_memory(self) -> dict[str, int]:
        """Host memory for experts behind the devices, and how much is taken; empty where there is none."""
        tiers = [shard.device.tier for shard in self._executor.shards if hasattr(shard.device, "tier")]
        if not tiers:
            return {}
        return {
            "host_experts_bytes": sum(tier.memory_nbytes for tier in tiers),
            "host_resident_bytes": sum(tier.resident_nbytes for tier in tiers),
        }

    def stats(self) -> dict[str, Any]:
        """`expertly.stats(model).as_dict()`, at most a quarter of a second old."""
        with self._lock:
            if self._stats is not None and self._now_s() - self._stats[0] < _FRESH_S:
                return self._stats[1]
        found: dict[str, Any] = _read(self._loaded.stats.as_dict)
        with self._lock:
            self._stats = (self._now_s(), found)
        return found

    def _residency(self) -> list[list[int]]:
        """For each layer and each of its experts, how many of its segments are on a device or in a worker."""
        placement = getattr(self._executor, "placement", None)
        rows = [[0] * layer.num_experts for layer in self._executor.geometry.layers]
        present = [[mask.bit_count() for mask in one.scheduler.slots.resident] for one in self._executor.shards]
        present += [worker.told()["resident"] for worker in self._executor.remotes]
        for number, of_device in enumerate(present):
            left = iter(of_device)
            for layer, row in enumerate(rows):
                for expert in range(len(row)) if placement is None else placement.shares[number].experts[layer]:
                    row[expert] = max(row[expert], next(left))  # workers may hold copies
        return rows

    def _since(self, seconds: float) -> Counted:
        """What has passed and been counted for so many seconds, or for as many as have been noted."""
        now = self._moment()
        with self._lock:
            noted = list(self._moments)
        first = next((one for one in reversed(noted) if now.at_s - one.at_s >= seconds), noted[0])
        return Counted(
            now.at_s - first.at_s,
            now.num_written - first.num_written,
            now.num_computed - first.num_computed,
            now.layers - first.layers,
        )

    def _moment(self) -> Counted:
        engine = self._loaded.engine

        def counted() -> npt.NDArray[np.int64]:
            both = (
                [self._executor.layer_counters(layer).of(phase) for phase in Phase]
                for layer in range(self._executor.geometry.num_layers)
            )
            return np.array([[sum(getattr(one, name) for one in phases) for name in _RECENT] for phases in both])

        num_computed = engine.num_prefill_tokens + engine.num_decode_tokens
        return Counted(self._now_s(), self._metrics.num_written, num_computed, _read(counted))


def _read(read: Callable[[], Any]) -> Any:
    """Read while a forward pass may be counting: a dictionary that grows while it is read is read again."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(RuntimeError):
            return read()
    return read()


def _history_of(stats: dict[str, Any]) -> str | None:
    """Whether its predictor, else its eviction, began with learned state of earlier runs; None where neither learns."""
    told = [one["history"] for one in (stats["prediction"], stats["reuse"]) if one is not None]
    return next((history for history in told if history is not None), None)


# -- the page --------------------------------------------------------------------------------------------------------


def dashboard_page() -> tuple[str, dict[str, str]]:
    """The HTML, and headers that let only its own script run, and that script ask only its own server."""
    html = resources.files("expertly").joinpath("data/dashboard/index.html").read_text(encoding="utf-8")
    script, style = (_hash_of(html, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}


def _hash_of(html: str, tag: str) -> str:
    """The hash of the page's one element of that name, as browsers compute it."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""A running server's state: for Prometheus, for programs, for the dashboard."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import resources
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from expertly.api import Handle
from expertly.serve.metrics import RequestMetrics, engine_metrics, prefetch_accuracy
from expertly.serve.scheduler import RequestScheduler
from expertly.serve.service import About

_ATTEMPTS = 5

_COUNTS = ("hits", "partial_hits", "misses", "bytes_loaded", "stall_s")


class View(Collector):
    """Any thread may ask. It keeps nothing: counts are since the start, and whoever wants rates asks twice."""

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
        metrics.registry.register(self)

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not read the counters."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self.stats()
        return engine_metrics(stats, self.memory(stats), self._scheduler)

    def metrics(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._metrics.registry)

    def experts(self) -> dict[str, Any]:
        """How many segments of each expert are resident, and each layer's counts."""
        stats = self.stats()
        layers = [
            {"layer": number, "segments_present": row, **_summed(layer["prefill"], layer["decode"])}
            for number, (row, layer) in enumerate(zip(self._residency(), stats["layers"], strict=True))
        ]
        names = ("system", "segments", "memory_bytes", "expert_bytes")
        return {"object": "experts", **{name: stats[name] for name in names}, "layers": layers}

    def state(self) -> dict[str, Any]:
        """The server's numbers now."""
        stats, scheduler = self.stats(), self._scheduler
        return {
            "object": "state",
            "now_s": self._now_s(),
            "model": self._about.as_dict(),
            "draining": scheduler.is_draining,
            "problem": scheduler.problem,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "max_running": scheduler.room.max_running,
            "max_queue": scheduler.room.max_queue,
            "kv_pages": scheduler.room.num_pages,
            "kv_pages_free": scheduler.free_pages,
            "tokens_written": self._metrics.num_written,
            **_summed(*stats["phases"].values()),
            "history": _history_of(stats),
            "prefetch_accuracy": prefetch_accuracy(stats),
            "memory": self.memory(stats) | {"all_experts_bytes": stats["expert_bytes"]},
            "workers": [
                {name: device[name] for name in ("device", "experts", "memory_bytes", "resident_bytes")}
                | {name: device["decode"][name] for name in ("hit_rate", "experts_s")}
                | device["worker"]
                for device in stats["devices"]
                if device["worker"] is not None
            ],
        }

    def memory(self, stats: dict[str, Any]) -> dict[str, int]:
        """Bytes by use, as they were divided, and how much of the experts' room is taken; in workers also how much they
        have.
        """
        here = [device for device in stats["devices"] if device["worker"] is None]
        away = [device for device in stats["devices"] if device["worker"] is not None]
        uses = {**self._about.memory, "experts_resident_bytes": sum(device["resident_bytes"] for device in here)}
        if away:
            uses["workers_experts_bytes"] = sum(device["memory_bytes"] for device in away)
            uses["workers_resident_bytes"] = sum(device["resident_bytes"] for device in away)
        return uses | self.host_memory()

    def host_memory(self) -> dict[str, int]:
        """Host memory for experts behind the device, and how much is taken; empty where there is none."""
        tier = getattr(self._executor.shard.device, "tier", None)
        return (
            {}
            if tier is None
            else {"host_experts_bytes": tier.memory_nbytes, "host_resident_bytes": tier.resident_nbytes}
        )

    def stats(self) -> dict[str, Any]:
        """`expertly.stats(model).as_dict()`; read again where a forward pass adds to what is being read."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(RuntimeError):  # a dictionary grew
                return self._loaded.stats.as_dict()
        return self._loaded.stats.as_dict()

    def _residency(self) -> list[list[int]]:
        """For each layer and each of its experts, how many of its segments are on the device or in a worker."""
        placement = getattr(self._executor, "placement", None)
        rows = [[0] * layer.num_experts for layer in self._executor.geometry.layers]
        present = [list(self._executor.shard.scheduler.slots.num_resident)]
        present += [worker.told["resident"] for worker in self._executor.remotes]
        for number, of_device in enumerate(present):
            left = iter(of_device)
            for layer, row in enumerate(rows):
                for expert in range(len(row)) if placement is None else placement.shares[number].experts[layer]:
                    row[expert] = next(left)
        return rows


def _summed(*phases: dict[str, Any]) -> dict[str, Any]:
    return {name: sum(phase[name] for phase in phases) for name in _COUNTS}


def _history_of(stats: dict[str, Any]) -> str | None:
    """Whether its predictor, else its eviction, began with learned state of earlier runs; None where neither learns."""
    learners = [stats[name] for name in ("prediction", "reuse") if stats[name] is not None]
    return next((learner["history"] for learner in learners if learner["history"] is not None), None)


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

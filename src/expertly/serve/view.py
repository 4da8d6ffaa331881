"""A running server's state: for Prometheus, for programs, for the dashboard."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import resources
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from expertly.api import Handle
from expertly.serve.scheduler import RequestScheduler

_ATTEMPTS = 5
_COUNTS = ("hits", "partial_hits", "misses", "bytes_loaded", "stall_s")


class View(Collector):
    """Any thread may ask. It keeps nothing: counts are since the start, and whoever wants rates asks twice."""

    def __init__(self, about: dict[str, Any], loaded: Handle, scheduler: RequestScheduler) -> None:
        self._about = about
        self._loaded = loaded
        self._executor = loaded.engine.executor
        self._scheduler = scheduler
        scheduler.metrics.registry.register(self)

    def metrics(self) -> bytes:
        return generate_latest(self._scheduler.metrics.registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's own counters, and the scheduler's state."""
        stats, scheduler = self.stats(), self._scheduler
        phases = stats["phases"]
        yield _gauge("requests_waiting", "Requests in the queue", {(): len(scheduler.waiting)})
        yield _gauge("texts_running", "Texts that are being written", {(): len(scheduler.running)})
        yield _gauge("kv_pages_free", "Pages of the KV cache that no running text has", {(): scheduler.free_pages})
        yield _gauge("kv_pages", "Pages of the KV cache", {(): scheduler.room.num_pages})
        text = "Times that a text gave its pages to older ones, and began again"
        yield _counter("preemptions", text, {(): scheduler.num_preempted})
        yield _counter("generated_tokens", "Written", {(): scheduler.metrics.num_written})
        yield _counter("failed_steps", "Forward passes that raised", {(): scheduler.num_failed_steps})
        for key, text in _OF_PHASES.items():
            yield _counter(key, text, {(phase,): counts[key] for phase, counts in phases.items()}, "phase")
        rates = {(phase,): counts["hit_rate"] for phase, counts in phases.items()}
        yield _gauge("hit_ratio", "Of all demands so far, those that were hits", rates, "phase")
        if workers := stats["devices"][1:]:
            alive = {(device["device"],): device["worker"]["alive"] for device in workers}
            yield _gauge("worker_alive", "1 while it computes, 0 while its experts are computed here", alive, "worker")
        uses = {(use.removesuffix("_bytes"),): nbytes for use, nbytes in self.memory(stats).items()}
        yield _gauge("memory_bytes", "By use, as it was divided", uses, "use")

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
        stats, scheduler = self.stats(), self._scheduler
        ahead, needed = (sum(counts[name] for counts in stats["phases"].values()) for name in _PREFETCHES)
        return {
            "object": "state",
            "now_s": time.monotonic(),
            "model": self._about,
            "draining": scheduler.is_draining,
            "problem": scheduler.problem,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "max_running": scheduler.room.max_running,
            "max_queue": scheduler.room.max_queue,
            "kv_pages": scheduler.room.num_pages,
            "kv_pages_free": scheduler.free_pages,
            "tokens_written": scheduler.metrics.num_written,
            **_summed(*stats["phases"].values()),
            "prefetch_accuracy": needed / ahead if ahead else None,
            "memory": self.memory(stats) | {"all_experts_bytes": stats["expert_bytes"]},
            "workers": [
                {name: device[name] for name in ("device", "experts", "memory_bytes", "resident_bytes")}
                | {name: device["decode"][name] for name in ("hit_rate", "experts_s")}
                | device["worker"]
                for device in stats["devices"][1:]
            ],
        }

    def memory(self, stats: dict[str, Any]) -> dict[str, int]:
        """Bytes by use, as divided, and what of the experts' room is taken: here, in workers, behind an accelerator."""
        home, *workers = stats["devices"]
        uses = {**self._about["expertly"]["memory"], "experts_resident_bytes": home["resident_bytes"]}
        if workers:
            uses["workers_experts_bytes"] = sum(device["memory_bytes"] for device in workers)
            uses["workers_resident_bytes"] = sum(device["resident_bytes"] for device in workers)
        if (tier := getattr(self._executor.shard.device, "tier", None)) is not None:
            uses |= {"host_experts_bytes": tier.memory_nbytes, "host_resident_bytes": tier.resident_nbytes}
        return uses

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
        present = [self._executor.shard.scheduler.cache.residency()]
        present += [worker.report["resident"] for worker in self._executor.remotes]
        for number, of_device in enumerate(present):
            left = iter(of_device)
            for layer, row in enumerate(rows):
                for expert in range(len(row)) if placement is None else placement.shares[number].experts[layer]:
                    row[expert] = next(left)
        return rows


def _summed(*phases: dict[str, Any]) -> dict[str, Any]:
    return {name: sum(phase[name] for phase in phases) for name in _COUNTS}


_PREFETCHES = {"prefetched": "Experts loaded ahead", "prefetched_needed": "Experts loaded ahead that were needed"}
_OF_PHASES = {
    "hits": "Demands for experts that were wholly there",
    "partial_hits": "Demands for experts that were there in part",
    "misses": "Demands for experts of which nothing was there",
    "bytes_loaded": "Bytes of experts loaded",
    "stall_s": "Seconds that forward passes waited for experts",
    "experts_s": "Seconds in experts, waiting included",
    **_PREFETCHES,
    "tokens": "Tokens computed",
    "iterations": "Forward passes",
}


def _metric(kind: Any, name: str, text: str, values: Mapping[Any, float | None], *labels: str) -> Any:
    """`values`: by the values of its labels; None where there is none yet."""
    family = kind("expertly_" + re.sub("_s$", "_seconds", name), text, labels=labels)
    for of_labels, value in values.items():
        if value is not None:
            family.add_metric(of_labels, value)
    return family


_counter, _gauge = partial(_metric, CounterMetricFamily), partial(_metric, GaugeMetricFamily)


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

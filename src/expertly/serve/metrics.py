"""Metrics for Prometheus: of requests, and of the engine's counters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from expertly.engine.process import peak_rss_nbytes
from expertly.serve.request import ServedRequest

if TYPE_CHECKING:
    from expertly.serve.scheduler import RequestScheduler

log = logging.getLogger("expertly.serve")

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class RequestMetrics:
    """What happened to requests, counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self._first = Histogram(
            "expertly_time_to_first_token_seconds", "From a request's arrival", buckets=_FIRST_S, **make
        )
        self._token = Histogram(
            "expertly_time_per_output_token_seconds", "Between a text's tokens", buckets=_TOKEN_S, **make
        )
        self._requests = Counter("expertly_requests", "By how they ended", ["outcome"], **make)
        self._prompt = Counter("expertly_prompt_tokens", "Of requests that ended", **make)
        self._written = Counter("expertly_generated_tokens", "Written", **make)
        self.num_written = 0

    def first_token(self, request: ServedRequest) -> None:
        assert request.first_s is not None
        self._first.observe(request.first_s - request.came_s)

    def token(self, seconds: float | None) -> None:
        """`seconds` since the text's previous token; None for its first."""
        if seconds is not None:
            self._token.observe(seconds)
        self._written.inc()
        self.num_written += 1

    def ended(self, request: ServedRequest, outcome: str) -> None:
        """`outcome`: "stop" or "length" of its last text, "cancelled" or "failed"."""
        self._requests.labels(outcome).inc()
        first = "-" if request.first_s is None else f"{request.first_s - request.came_s:.3f} s"
        log.info(
            "request %d: %s after %d tokens, the first after %s, all in %.3f s",
            request.number,
            outcome,
            request.num_tokens,
            first,
            request.now_s() - request.came_s,
        )
        self._prompt.inc(request.num_prompt_tokens)


def engine_metrics(stats: dict[str, Any], memory: dict[str, int], scheduler: RequestScheduler) -> Iterator[Metric]:
    """The engine's own counters. `memory`: bytes by use, names end in _bytes."""
    yield _gauge("requests_waiting", "Requests in the queue", {(): len(scheduler.waiting)})
    yield _gauge("texts_running", "Texts that are being written", {(): len(scheduler.running)})
    yield _gauge("kv_pages_free", "Pages of the KV cache that nobody has", {(): scheduler.free_pages})
    yield _gauge("kv_pages", "Pages of the KV cache", {(): scheduler.room.num_pages})
    yield _counter("failed_steps", "Forward passes that raised", {(): scheduler.num_failed_steps})
    phases = stats["phases"]
    for key, text in _OF_PHASES.items():
        yield _counter(key, text, {(phase,): counts[key] for phase, counts in phases.items()}, "phase")
    rates = {(phase,): counts["hit_rate"] for phase, counts in phases.items()}
    yield _gauge("hit_ratio", "Of all demands so far, those that were hits", rates, "phase")
    workers = {device["device"]: device for device in stats["devices"] if device["worker"] is not None}
    for key, text in _OF_WORKERS.items() if workers else ():
        counts = {(name,): device["worker"][key] for name, device in workers.items()}
        yield (_gauge if key == "alive" else _counter)(f"worker_{key}", text, counts, "worker")
    if workers:
        hits = {(name, phase): device[phase]["hit_rate"] for name, device in workers.items() for phase in phases}
        yield _gauge("worker_hit_ratio", "Of its demands so far", hits, "worker", "phase")
    accuracy = {(): prefetch_accuracy(stats)}
    yield _gauge("prefetch_accuracy_ratio", "Experts loaded ahead that were needed", accuracy)
    if (reuse := stats["reuse"]) is not None:
        yield _gauge("reuse_tokens", "Tokens that what it evicts by was learned from", {(): reuse["tokens"]})
        yield _gauge("reuse_tokens_read", "Of these, those of earlier runs", {(): reuse["tokens_read"]})
    uses = {(use.removesuffix("_bytes"),): nbytes for use, nbytes in memory.items()}
    yield _gauge("memory_bytes", "By use, as it was divided", uses, "use")
    yield _gauge("process_peak_resident_bytes", "Most memory the process ever had", {(): peak_rss_nbytes()})


_OF_PHASES = {
    "hits": "Demands for experts that were wholly there",
    "partial_hits": "Demands for experts that were there in part",
    "misses": "Demands for experts of which nothing was there",
    "bytes_loaded": "Bytes of experts loaded",
    "stall_s": "Seconds that forward passes waited for experts",
    "experts_s": "Seconds in experts, waiting included",
    "prefetched": "Experts loaded ahead",
    "prefetched_needed": "Experts loaded ahead that were needed",
    "tokens": "Tokens computed",
    "iterations": "Forward passes",
}

_OF_WORKERS = {
    "alive": "1 while it computes, 0 while its experts are computed here",
    "drops": "Times that it died, failed or passed its deadline",
    "calls": "Messages to it",
    "bytes_sent": "To it",
    "bytes_received": "From it",
    "call_s": "Seconds from sending rows until their outputs were here, where a layer waited",
    "link_s": "Of these, those on the way",
}


def prefetch_accuracy(stats: dict[str, Any]) -> float | None:
    """The share of prefetched experts that were needed."""
    phases = stats["phases"].values()
    prefetched = sum(phase["prefetched"] for phase in phases)
    return sum(phase["prefetched_needed"] for phase in phases) / prefetched if prefetched else None


def _metric(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    values: Mapping[Any, float | None],
    *labels: str,
) -> Metric:
    """`values`: by the values of its labels; None where there is none yet."""
    family = kind("expertly_" + re.sub("_s$", "_seconds", name), text, labels=labels)
    for of_labels, value in values.items():
        if value is not None:
            family.add_metric(of_labels, value)
    return family


_counter, _gauge = partial(_metric, CounterMetricFamily), partial(_metric, GaugeMetricFamily)

"""Metrics for Prometheus: of requests and of the engine's counters, from one server or several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from expertly.engine.process import peak_rss_nbytes
from expertly.serve.request import ServedRequest
from expertly.serve.scheduler import RequestScheduler

log = logging.getLogger("expertly.serve")

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class RequestMetrics:
    """A RequestWatcher that counts."""

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

    def token(self, request: ServedRequest, seconds: float | None) -> None:
        if seconds is not None:
            self._token.observe(seconds)
        self._written.inc()
        self.num_written += 1

    def ended(self, request: ServedRequest, outcome: str) -> None:
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


class EngineMetrics(Collector):
    """Reads the engine's own counters when Prometheus asks. `memory`: bytes by use, names end in _bytes."""

    def __init__(
        self, stats: Callable[[], dict[str, Any]], memory: Callable[[], dict[str, int]], scheduler: RequestScheduler
    ) -> None:
        self._stats = stats
        self._memory = memory
        self._scheduler = scheduler

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not read the counters."""
        return []

    def collect(self) -> Iterator[Metric]:
        scheduler, stats = self._scheduler, self._stats()
        yield _gauge("expertly_requests_waiting", "Requests in the queue", len(scheduler.waiting))
        yield _gauge("expertly_texts_running", "Texts that are being written", len(scheduler.running))
        yield _gauge("expertly_kv_pages_free", "Pages of the KV cache that nobody has", scheduler.free_pages)
        yield _gauge("expertly_kv_pages", "Pages of the KV cache", scheduler.room.num_pages)
        failed = CounterMetricFamily("expertly_failed_steps", "Forward passes that raised")
        failed.add_metric([], scheduler.num_failed_steps)
        yield failed
        yield from _of_phases(stats["phases"])
        yield from _of_layers(stats["layers"])
        yield from _of_workers([one for one in stats["devices"] if one["worker"] is not None])
        accuracy = prefetch_accuracy(stats)
        yield _gauge("expertly_prefetch_accuracy_ratio", "Experts loaded ahead that were needed", accuracy)
        if (reuse := stats["reuse"]) is not None:
            yield _gauge("expertly_reuse_tokens", "Tokens that what it evicts by was learned from", reuse["tokens"])
            yield _gauge("expertly_reuse_tokens_read", "Of these, those of earlier runs", reuse["tokens_read"])
        memory = GaugeMetricFamily("expertly_memory_bytes", "By use, as it was divided", labels=["use"])
        for use, nbytes in self._memory().items():
            memory.add_metric([use.removesuffix("_bytes")], nbytes)
        yield memory
        yield _gauge("expertly_process_peak_resident_bytes", "Most memory the process ever had", peak_rss_nbytes())


_COUNTED = {
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


def _of_phases(phases: dict[str, Any]) -> Iterator[Metric]:
    for key, text in _COUNTED.items():
        family = CounterMetricFamily(f"expertly_{_unit(key)}", text, labels=["phase"])
        for phase, counts in phases.items():
            family.add_metric([phase], counts[key])
        yield family
    rates = GaugeMetricFamily("expertly_hit_ratio", "Of all demands so far, those that were hits", labels=["phase"])
    for phase, counts in phases.items():
        if counts["hit_rate"] is not None:
            rates.add_metric([phase], counts["hit_rate"])
    yield rates


def _of_layers(layers: list[dict[str, Any]]) -> Iterator[Metric]:
    demands = CounterMetricFamily("expertly_layer_demands", "In decode, by what was there", labels=["layer", "found"])
    stall = CounterMetricFamily("expertly_layer_stall_seconds", "In decode", labels=["layer"])
    for layer in layers:
        number, decode = str(layer["layer"]), layer["decode"]
        for found, key in (("all", "hits"), ("part", "partial_hits"), ("nothing", "misses")):
            demands.add_metric([number, found], decode[key])
        stall.add_metric([number], decode["stall_s"])
    yield demands
    yield stall


_OF_WORKER: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str]] = {
    "alive": (GaugeMetricFamily, "1 while it computes, 0 while its experts are computed here"),
    "drops": (CounterMetricFamily, "Times that it died, failed or passed its deadline"),
    "calls": (CounterMetricFamily, "Messages to it"),
    "bytes_sent": (CounterMetricFamily, "To it"),
    "bytes_received": (CounterMetricFamily, "From it"),
    "call_s": (CounterMetricFamily, "Seconds from sending rows until their outputs were here, where a layer waited"),
    "link_s": (CounterMetricFamily, "Of these, those on the way"),
}


def _of_workers(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    """What a worker holds, hits and takes; nothing where there are none."""
    if not workers:
        return
    for key, (kind, text) in _OF_WORKER.items():
        family = kind(f"expertly_worker_{_unit(key)}", text, labels=["worker"])
        for one in workers:
            family.add_metric([one["device"]], one["worker"][key])
        yield family
    held = GaugeMetricFamily("expertly_worker_resident_bytes", "Experts in its memory", labels=["worker"])
    rates = GaugeMetricFamily("expertly_worker_hit_ratio", "Of its demands so far", labels=["worker", "phase"])
    for one in workers:
        held.add_metric([one["device"]], one["resident_bytes"])
        for phase in ("prefill", "decode"):
            if one[phase]["hit_rate"] is not None:
                rates.add_metric([one["device"], phase], one[phase]["hit_rate"])
    yield held
    yield rates


def _unit(key: str) -> str:
    return key.removesuffix("_s") + "_seconds" if key.endswith("_s") else key


def prefetch_accuracy(stats: dict[str, Any]) -> float | None:
    """The share of prefetched experts that were needed."""
    of_phases = stats["phases"].values()
    prefetched = sum(one["prefetched"] for one in of_phases)
    return sum(one["prefetched_needed"] for one in of_phases) / prefetched if prefetched else None


def _gauge(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family


# -- of several servers ----------------------------------------------------------------------------------------------


class _Together(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, text in sorted(self._texts.items()):
            for found in text_string_to_metric_families(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value, sample.timestamp)
        yield from families.values()


def together(texts: Mapping[str, str]) -> bytes:
    """The metrics of several servers as one text; each sample has its server's name as a label. Prometheus wants each
    metric in one piece, so the texts cannot just be joined.
    """
    registry: Any = _Together(texts)
    return generate_latest(registry)


def of_others(num_taken: int) -> str:
    """How much the server learned from other servers, as text."""
    registry = CollectorRegistry()
    counter = Counter("expertly_learned_from_others", "Maps or matrices taken from other replicas", registry=registry)
    counter.inc(num_taken)
    return generate_latest(registry).decode()

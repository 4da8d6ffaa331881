"""The metrics of several servers as one text for Prometheus, each sample with the name of who counted it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Together(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, text in sorted(self._texts.items()):
            for found in text_string_to_metric_families(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {**sample.labels, LABEL: name}, sample.value, sample.timestamp)
        yield from families.values()


def of_others(num_taken: int) -> str:
    """What a server has learned from the others, as text."""
    registry = CollectorRegistry()
    counter = Counter("expertly_learned_from_others", "Maps or matrices taken from other replicas", registry=registry)
    counter.inc(num_taken)
    return generate_latest(registry).decode()


def together(texts: Mapping[str, str]) -> bytes:
    """By the name of the server. Prometheus wants each metric in one piece, so the texts cannot just be joined."""
    registry: Any = _Together(texts)
    return generate_latest(registry)

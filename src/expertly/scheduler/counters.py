"""Counters of hits, loads, evictions and predictions, by layer and phase (docs/conventions.md, Hit)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from expertly.core.messages import Phase


@dataclass(slots=True)
class PhaseCounters:
    """One layer in one phase. Hits and misses are counted per (iteration, distinct expert)."""

    hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    demanded_nbytes: int = 0
    hit_nbytes: int = 0
    loaded_nbytes: int = 0
    evicted_nbytes: int = 0
    prefetched_nbytes: int = 0  # of the loaded bytes, those that were prefetched
    predicted: int = 0  # experts that predictions named, over all distances
    predicted_needed: int = 0
    predicted_resident: int = 0  # when the router ran
    predicted_of: int = 0  # experts that were needed, once for each prediction of their layer
    prefetched: int = 0  # experts of which segments were prefetched
    prefetched_needed: int = 0
    prefetched_in_time: int = 0  # wholly resident when the router ran
    wasted_nbytes: int = 0  # prefetched bytes of experts that were not needed
    stall_ns: int = 0
    expert_ns: int = 0  # the whole experts function, stalls included

    def add(self, other: PhaseCounters) -> None:
        for counter in _COUNTERS:
            setattr(self, counter, getattr(self, counter) + getattr(other, counter))

    @property
    def demands(self) -> int:
        return self.hits + self.partial_hits + self.misses

    def rates(self) -> dict[str, float | None]:
        """Rates (docs/conventions.md); None where they would divide by 0."""
        accuracy = _share(self.predicted_needed, self.predicted)
        fetched = _share(self.predicted_resident, self.predicted)
        would_miss = self.prefetched_in_time + self.partial_hits + self.misses
        return {
            "hit_rate": _share(self.hits, self.demands),
            "partial_hit_rate": _share(self.partial_hits, self.demands),
            "byte_hit_rate": _share(self.hit_nbytes, self.demanded_nbytes),
            "prediction_accuracy": accuracy,
            "fetch_rate": fetched,
            "goodpred": accuracy * fetched if accuracy is not None and fetched is not None else None,
            "recall": _share(self.predicted_needed, self.predicted_of),
            "coverage": _share(self.prefetched_in_time, would_miss) if self.prefetched else None,
            "accuracy": _share(self.prefetched_needed, self.prefetched),
            "timeliness": _share(self.prefetched_in_time, self.prefetched_needed),
        }


_COUNTERS = [counter.name for counter in fields(PhaseCounters)]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(slots=True)
class LayerCounters:
    """The counters of one layer, by phase."""

    prefill: PhaseCounters = field(default_factory=PhaseCounters)
    decode: PhaseCounters = field(default_factory=PhaseCounters)

    def of(self, phase: Phase) -> PhaseCounters:
        return self.phase(phase is Phase.DECODE)

    def phase(self, is_decode: bool) -> PhaseCounters:
        return self.decode if is_decode else self.prefill

    def add(self, other: LayerCounters) -> None:
        self.prefill.add(other.prefill)
        self.decode.add(other.decode)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, dict[str, int]]) -> LayerCounters:
        """The inverse of `as_dict`, also after JSON."""
        return cls(PhaseCounters(**raw["prefill"]), PhaseCounters(**raw["decode"]))

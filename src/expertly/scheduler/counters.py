"""Counters of hits, loads, evictions and predictions, by layer and phase (docs/conventions.md, Hit)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from expertly.core.messages import Phase, Prediction, RouterRan


@dataclass(slots=True)
class Correlation:
    """How two series go together, without keeping them: means and sums of products of deviations (Welford; Chan et al.
    for merging), so that nothing cancels in long runs.
    """

    count: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    sum_xx: float = 0.0
    sum_yy: float = 0.0
    sum_xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count += 1
        from_x, from_y = x - self.mean_x, y - self.mean_y
        self.mean_x += from_x / self.count
        self.mean_y += from_y / self.count
        self.sum_xx += from_x * (x - self.mean_x)
        self.sum_yy += from_y * (y - self.mean_y)
        self.sum_xy += from_x * (y - self.mean_y)

    def merge(self, other: Correlation) -> None:
        if not other.count:
            return
        count = self.count + other.count
        share = other.count / count
        apart_x, apart_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        self.mean_x += apart_x * share
        self.mean_y += apart_y * share
        self.sum_xx += other.sum_xx + apart_x * apart_x * self.count * share
        self.sum_yy += other.sum_yy + apart_y * apart_y * self.count * share
        self.sum_xy += other.sum_xy + apart_x * apart_y * self.count * share
        self.count = count

    def pearson(self) -> float | None:
        """From -1 to 1; None where either series has not varied."""
        product = self.sum_xx * self.sum_yy
        if self.count < 2 or product <= 0:
            return None
        return max(-1.0, min(1.0, self.sum_xy / math.sqrt(product)))


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
    computed_on_host: int = 0  # of the misses, experts that the host computed from its own memory
    prefetched_nbytes: int = 0  # of the loaded bytes, those that were prefetched
    predicted: int = 0  # experts that predictions named, over all distances
    predicted_needed: int = 0
    predicted_resident: int = 0  # when the router ran
    predicted_of: int = 0  # experts that were needed, once for each prediction of their layer
    prefetched: int = 0  # experts of which segments were prefetched
    prefetched_needed: int = 0
    prefetched_in_time: int = 0  # wholly resident when the router ran
    wasted_nbytes: int = 0  # prefetched bytes of experts that were not needed
    by_distance: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # experts predicted, needed, resident
    similarity_semantic: Correlation = field(default_factory=Correlation)  # see count_prediction
    similarity_trajectory: Correlation = field(default_factory=Correlation)
    stall_ns: int = 0
    expert_ns: int = 0  # the whole experts function, stalls included

    def add(self, other: PhaseCounters) -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for distance, counted in other.by_distance.items():
            self._count_distance(distance, *counted)
        self.similarity_semantic.merge(other.similarity_semantic)
        self.similarity_trajectory.merge(other.similarity_trajectory)

    def count_prediction(
        self, prediction: Prediction, needed: set[int], is_resident: Sequence[int], top_k: int
    ) -> None:
        """The router of the predicted layer ran: count named experts that are needed, and that are resident.

        A prediction's confidence is paired with the hit rate of its `top_k` surest experts (fMoE, figure 8):
        `semantic` for predictions made when the iteration began, `trajectory` for later ones. `is_resident` is by
        expert, 0 or 1.
        """
        experts = prediction.experts
        right, num = len(needed.intersection(experts)), len(experts)
        self.predicted += num
        self.predicted_needed += right
        there = sum([is_resident[expert] for expert in experts])
        self.predicted_resident += there
        self.predicted_of += len(needed)
        self._count_distance(prediction.distance, num, right, there)
        if prediction.confidence is not None and needed:
            is_first = prediction.distance == prediction.layer + 1
            similarity = self.similarity_semantic if is_first else self.similarity_trajectory
            similarity.add(prediction.confidence, len(needed.intersection(experts[:top_k])) / len(needed))

    def _count_distance(self, distance: int, predicted: int, needed: int, resident: int) -> None:
        before = self.by_distance.get(distance, (0, 0, 0))
        self.by_distance[distance] = (before[0] + predicted, before[1] + needed, before[2] + resident)

    def count_demand(self, num_experts: int, parts_there: Sequence[int], expert_nbytes: int, num_parts: int) -> None:
        """So many experts were demanded; `parts_there`: of those that were not wholly resident, the units that were."""
        hits = num_experts - len(parts_there)
        self.hits += hits
        self.demanded_nbytes += num_experts * expert_nbytes
        self.hit_nbytes += hits * expert_nbytes
        for num in parts_there:
            if num:
                self.partial_hits += 1
                self.hit_nbytes += num * expert_nbytes // num_parts
            else:
                self.misses += 1

    @property
    def demands(self) -> int:
        return self.hits + self.partial_hits + self.misses

    @property
    def coverage(self) -> float | None:
        """The share of would-be misses that prefetching served; None where nothing was prefetched."""
        would_miss = self.prefetched_in_time + self.partial_hits + self.misses
        return _share(self.prefetched_in_time, would_miss) if self.prefetched else None

    def rates_by_distance(self) -> dict[str, dict[str, float] | None]:
        """ACCURACY, FETCHRATE and GOODPRED of each distance k at which anything was predicted (ProMoE, section 4): by
        the name of the rate, then by the distance as text, rising; None where nothing was.
        """
        counted = {k: counts for k, counts in sorted(self.by_distance.items()) if counts[0]}
        accuracy = {str(k): needed / predicted for k, (predicted, needed, _) in counted.items()}
        fetched = {str(k): resident / predicted for k, (predicted, _, resident) in counted.items()}
        return {
            "accuracy_by_distance": accuracy or None,
            "fetch_rate_by_distance": fetched or None,
            "goodpred_by_distance": {k: accuracy[k] * fetched[k] for k in accuracy} or None,
        }

    def goodpred(self) -> dict[str, Any]:
        """ACCURACY, FETCHRATE and GOODPRED over all distances, and of each."""
        rates = self.rates()
        names = ("prediction_accuracy", "fetch_rate", "goodpred")
        return {name: rates[name] for name in names} | self.rates_by_distance()

    def rates(self) -> dict[str, float | None]:
        """Rates (docs/conventions.md); None where they would divide by 0."""
        accuracy = _share(self.predicted_needed, self.predicted)
        fetched = _share(self.predicted_resident, self.predicted)
        return {
            "hit_rate": _share(self.hits, self.demands),
            "partial_hit_rate": _share(self.partial_hits, self.demands),
            "byte_hit_rate": _share(self.hit_nbytes, self.demanded_nbytes),
            "prediction_accuracy": accuracy,
            "fetch_rate": fetched,
            "goodpred": accuracy * fetched if accuracy is not None and fetched is not None else None,
            "recall": _share(self.predicted_needed, self.predicted_of),
            "coverage": self.coverage,
            "accuracy": _share(self.prefetched_needed, self.prefetched),
            "timeliness": _share(self.prefetched_in_time, self.prefetched_needed),
            "similarity_correlation_semantic": self.similarity_semantic.pearson(),
            "similarity_correlation_trajectory": self.similarity_trajectory.pearson(),
        }


_NUMBERS = [one.name for one in fields(PhaseCounters) if isinstance(getattr(PhaseCounters(), one.name), int)]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class LayerCounters:
    """The counters of one layer, by phase."""

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = PhaseCounters()
        self.decode = PhaseCounters()

    def of(self, phase: Phase) -> PhaseCounters:
        return self.decode if phase is Phase.DECODE else self.prefill

    def phase(self, is_decode: bool) -> PhaseCounters:
        return self.decode if is_decode else self.prefill

    def count_demand(
        self, router: RouterRan, missing: Sequence[int], parts_there: Sequence[int], expert_nbytes: int, num_parts: int
    ) -> None:
        """Count the experts that real tokens demand, before anything is admitted. Experts that only pad tokens chose do
        not count.

        `missing`: positions in the router's list of experts that are not wholly resident; `parts_there`: how many of
        the P units of each are.
        """
        if not router.batch_tokens:
            return
        is_decode, num_tokens = router.is_decode, router.num_tokens
        if 0 not in num_tokens and not (True in is_decode and False in is_decode):  # nearly always
            phase = self.decode if True in is_decode else self.prefill
            if not any(parts_there):
                hits = len(num_tokens) - len(missing)
                phase.hits += hits
                phase.misses += len(missing)
                phase.demanded_nbytes += len(num_tokens) * expert_nbytes
                phase.hit_nbytes += hits * expert_nbytes
                return
            phase.count_demand(len(num_tokens), parts_there, expert_nbytes, num_parts)
            return
        there = dict(zip(missing, parts_there, strict=True))
        for of_decode in (True, False):
            positions = [i for i, num in enumerate(num_tokens) if num and is_decode[i] == of_decode]
            lacking = [there[i] for i in positions if i in there]
            self.phase(of_decode).count_demand(len(positions), lacking, expert_nbytes, num_parts)

    def add(self, other: LayerCounters) -> None:
        for phase in Phase:
            self.of(phase).add(other.of(phase))

    def as_dict(self) -> dict[str, Any]:
        return {phase.value: asdict(self.of(phase)) for phase in Phase}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LayerCounters:
        """The inverse of `as_dict`, also after JSON."""
        found = cls()
        for phase in Phase:
            values = dict(raw[phase.value])
            for name in ("similarity_semantic", "similarity_trajectory"):
                values[name] = Correlation(**values[name])
            values["by_distance"] = {int(k): (a, b, c) for k, (a, b, c) in values["by_distance"].items()}
            found.of(phase).add(PhaseCounters(**values))
        return found

"""Predictions of layers that have not run: the order in which they are prefetched, and how good they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.scheduler.counters import PhaseCounters

PRIORITIES: dict[str, Callable[[float, int], float]] = {
    "score": lambda score, layers_to_go: score,  # whichever layer it is of: the predictor may have weighed the distance
    "fifo": lambda score, layers_to_go: 0.0,  # first in, first out (ProMoE, section 5)
    "proximity": lambda score, layers_to_go: score / layers_to_go,  # p / (l - l_now) (fMoE, section 4.5)
}
"""The priority of a predicted expert by its score, 1 or more layers before its layer runs: the highest is loaded first,
of equal ones the one that was predicted first. No priority falls as the score rises.
"""


@dataclass(slots=True)
class Forecast:
    """What is predicted of one layer until its router runs. Experts are dense ids."""

    by_distance: dict[int, Prediction] = field(default_factory=dict)  # distance -> its newest prediction
    queued: Prediction | None = None  # the newest prediction, whose experts are queued
    position: int = 0  # in `queued`, of the next expert to prefetch
    arrival: int = 0  # of the first expert of `queued`: its number among all that were ever predicted
    likely: dict[int, None] = field(default_factory=dict)  # not evicted if resident; empty unless prefetches evict
    prefetched: dict[int, list[int]] = field(default_factory=dict)  # experts -> units prefetched, in flight or arrived


class PrefetchQueue:
    """Predicted experts by falling priority; of equal ones, what was predicted first.

    A layer's newest prediction replaces the one before; it ends when the layer's router runs.
    """

    def __init__(self, geometry: Geometry, order: str, *, evicts: bool) -> None:
        """`order`: of PRIORITIES. `evicts`: prefetches go to the cache, which evicts for them; else to free slots."""
        # Units that are prefetched at a time: as many as one token's experts of a layer have.
        self.window = max(layer.top_k for layer in geometry.layers) * geometry.segments_per_expert
        self._num_layers = geometry.num_layers
        self.now = self._num_layers - 1  # the layer whose router ran last; before a pass, the last layer
        self.needs_slots = False  # whether to prefetch again as soon as a slot is free
        self.evicts = evicts
        self.forecasts: dict[int, Forecast] = {}  # by layer
        self._geometry = geometry
        self._priority = PRIORITIES[order]
        # (-priority, order of arrival, layer) of the next expert of each layer that has one; None: to be made
        self._heads: dict[int, tuple[float, int, int]] | None = None
        self._num_arrived = 0

    def predict(self, prediction: Prediction, *, is_resident: bool = False) -> None:
        """Queue these experts in place of those queued for the layer. Resident ones among the surest top-k, and those
        found resident when their turn to be prefetched comes, are not evicted for other prefetches. `is_resident`: all
        of them were found so.
        """
        layer, experts = prediction.layer, prediction.experts
        forecast = self.forecasts.get(layer) or self.forecasts.setdefault(layer, Forecast())
        forecast.by_distance[prediction.distance] = prediction
        forecast.queued, forecast.position, forecast.arrival = prediction, 0, self._num_arrived
        self._num_arrived += len(experts)
        first = self._geometry.first_ids[layer]
        num_likely = self._geometry.layers[layer].top_k
        if is_resident:
            num_likely = forecast.position = len(experts)
        forecast.likely = dict.fromkeys([first + expert for expert in experts[:num_likely]] if self.evicts else ())
        if self._heads is not None:
            self._set_head(layer, forecast, self._heads)

    @property
    def is_idle(self) -> bool:
        """Whether no expert is queued, and none that was prefetched waits for its layer."""
        return not any(
            forecast.prefetched or (forecast.queued and forecast.position < len(forecast.queued.experts))
            for forecast in self.forecasts.values()
        )

    def by_urgency(self) -> Iterator[tuple[int, int, Forecast]]:
        """The layer, the id and the layer's forecast of each expert, the most urgent first. An expert stays queued
        until the next one is asked for; nothing else may change the queue meanwhile.
        """
        if self._heads is None:
            self._heads = {}
            for layer, forecast in self.forecasts.items():
                self._set_head(layer, forecast, self._heads)
        while len(self._heads) > 1:
            layer = min(self._heads.values())[2]
            forecast = self.forecasts[layer]
            assert forecast.queued is not None
            yield layer, self._geometry.first_ids[layer] + forecast.queued.experts[forecast.position], forecast
            forecast.position += 1
            self._set_head(layer, forecast, self._heads)
        for layer in self._heads:  # one: its experts are in order
            self._heads = None  # to be made anew, as positions change
            forecast, first = self.forecasts[layer], self._geometry.first_ids[layer]
            assert forecast.queued is not None
            while forecast.position < len(forecast.queued.experts):
                yield layer, first + forecast.queued.experts[forecast.position], forecast
                forecast.position += 1

    def _set_head(self, layer: int, forecast: Forecast, heads: dict[int, tuple[float, int, int]]) -> None:
        queued, position = forecast.queued, forecast.position
        if queued is None or position == len(queued.experts):
            heads.pop(layer, None)
            return
        to_go = (layer - self.now) % self._num_layers or self._num_layers
        heads[layer] = -self._priority(queued.scores[position], to_go), forecast.arrival + position, layer

    def cancelled(self, layer: int, eid: int, units: Collection[int]) -> None:
        """Units of an expert will not come."""
        forecast = self.forecasts.get(layer)
        if forecast and eid in forecast.prefetched:
            forecast.prefetched[eid] = [unit for unit in forecast.prefetched[eid] if unit not in units]

    def upcoming(self) -> set[int]:
        """Experts that must not be evicted: prefetched for layers that have not run, or likely."""
        upcoming: set[int] = set()
        for forecast in self.forecasts.values():
            upcoming.update(forecast.prefetched, forecast.likely)
        return upcoming

    def router_ran(
        self, router: RouterRan, phase: PhaseCounters, num_resident: Callable[[Iterable[int]], int]
    ) -> Collection[int]:
        """Count how good the predictions for the layer were (ProMoE, section 4), and what was prefetched of it, and
        empty its queue. `num_resident`: how many of some experts are wholly there. Experts that only pad tokens chose
        do not count. Returns the experts that were prefetched.
        """
        layer = self.now = router.layer
        self._heads = None  # the layers that are queued are nearer now
        forecast = self.forecasts.pop(layer, None)
        if forecast is None:
            return ()
        first = self._geometry.first_ids[layer]
        needed = {first + expert for expert, num in zip(router.experts, router.num_tokens, strict=True) if num}
        for prediction in forecast.by_distance.values():
            experts = [first + expert for expert in prediction.experts]
            phase.predicted += len(experts)
            phase.predicted_needed += len(needed.intersection(experts))
            phase.predicted_resident += num_resident(experts)
            phase.predicted_of += len(needed)
        for eid, units in forecast.prefetched.items():
            phase.prefetched += len(units) > 0
            if units and eid in needed:
                phase.prefetched_needed += 1
                phase.prefetched_in_time += num_resident((eid,))
            elif units:
                phase.wasted_nbytes += len(units) * self._geometry.unit_nbytes[layer]
        return forecast.prefetched

    def clear(self) -> None:
        self.forecasts.clear()
        self._heads = None
        self.now = self._num_layers - 1

"""What is predicted, what of it is being loaded ahead, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, Span
from expertly.policies.prefetch import ByScore, PrefetchOrder
from expertly.scheduler.calibration import Guess
from expertly.scheduler.counters import PhaseCounters

_FEW = 64
"""Heads among which void ones are not looked for."""


@dataclass(slots=True)
class _Loaded:
    """What was loaded ahead of an expert whose router has spoken."""

    num_segments: int
    segment_nbytes: int
    is_needed: bool
    is_in_time: bool


_Wanted = tuple[float, int, int]  # (-score, order of arrival, expert)
_Head = tuple[float, int, int]  # (-priority, order of arrival, layer)


class Speculation:
    """Wanted experts by falling priority, spans in flight that nobody waits for yet, and experts loaded ahead whose
    layer has not run. Experts are dense ids. `window` bounds the segments in flight.
    """

    def __init__(self, geometry: Geometry, window: int, order: PrefetchOrder = ByScore()) -> None:  # noqa: B008 - holds nothing
        self._geometry = geometry
        self.window = window
        self.now = geometry.num_layers - 1  # the layer whose router spoke last; an iteration begins behind the last one
        self.is_used = False  # has anything ever been predicted?
        self.num_in_flight = 0  # segments
        self.in_flight: dict[int, dict[Span, bool]] = {}  # expert -> spans: asked for by decode?
        self.waiting: dict[int, int] = {}  # expert whose layer has not run -> segments loaded ahead for it
        self._settling: tuple[PhaseCounters, dict[int, _Loaded]] | None = None  # of the layer whose router spoke last
        self.likely: dict[int, dict[int, None]] = {}  # layer -> experts predicted to run: what is here should stay
        self._priority = order.priority
        self._is_steady = not order.follows_distance  # the same whatever runs
        self._wanted: dict[int, list[_Wanted]] = {}  # layer -> in the order of need, the first at the end
        self._wanted_of: dict[int, tuple[int, int]] = {}  # layer -> the order of its first arrival, its distance
        self._heads: list[_Head] = []  # a heap with the first of each layer, and some that were
        self._heads_of = self.now  # the layer that had spoken when their priorities were taken
        self._order = 0
        self._predicted: list[dict[int, Prediction]] = [{} for _ in geometry.layers]  # layer: distance -> the newest

    # -- wanted ------------------------------------------------------------------------------------------------

    def predict(self, prediction: Prediction, num_likely: int) -> None:
        """Want these experts instead of what was wanted of the layer. What is here of the first `num_likely`, and of
        those that `stays` names then, is not to be evicted for other guesses; 0: eviction knows better.
        """
        self.is_used = True
        self._predicted[prediction.layer][prediction.distance] = prediction
        layer, experts, order = prediction.layer, prediction.experts, self._order
        first = self._geometry.first_expert_id(layer)
        self._wanted_of[layer] = order, prediction.distance
        self.likely[layer] = dict.fromkeys([first + expert for expert in experts[:num_likely]])
        self._order += len(experts)
        arrivals = range(order, self._order)
        wanted = [
            (-score, arrival, first + expert)
            for score, arrival, expert in zip(prediction.scores, arrivals, experts, strict=True)
        ]
        wanted.sort(reverse=True)
        self._wanted[layer] = wanted
        self._push(layer)

    def next(self) -> int | None:
        """The expert that is wanted most, or None. It stays wanted until `taken`."""
        if self._heads_of != self.now:
            self._heads_of = self.now
            if not self._is_steady:
                self._rank()
        heads = self._heads
        while heads:
            _, order, layer = heads[0]
            wanted = self._wanted.get(layer)
            if wanted and wanted[-1][1] == order:
                return wanted[-1][2]
            heappop(heads)
        return None

    def guess(self) -> Guess:
        """What the prediction says of the expert that `next` named."""
        layer = self._heads[0][2]
        lowered, arrival, _ = self._wanted[layer][-1]
        order, distance = self._wanted_of[layer]
        return Guess(arrival - order, -lowered, distance)

    def taken(self) -> None:
        """What `next` named is served, or will not be."""
        layer = self._heads[0][2]
        wanted = self._wanted[layer]
        wanted.pop()
        if wanted:
            heapreplace(self._heads, self._head(layer))
        else:
            heappop(self._heads)

    def _push(self, layer: int) -> None:
        if not self._wanted[layer]:
            return
        if len(self._heads) < _FEW + len(self._wanted):
            heappush(self._heads, self._head(layer))
        else:  # priorities so low that they are never reached would pile up
            self._rank()

    def _rank(self) -> None:
        self._heads = [self._head(layer) for layer, wanted in self._wanted.items() if wanted]
        heapify(self._heads)

    def _head(self, layer: int) -> _Head:
        lowered, order, _ = self._wanted[layer][-1]
        num_layers = self._geometry.num_layers
        return -self._priority(-lowered, (layer - self._heads_of) % num_layers or num_layers), order, layer

    def stays(self, layer: int, expert: int) -> None:
        """A wanted expert is here or in flight: so it should be when its layer runs."""
        if self.likely[layer]:
            self.likely[layer][expert] = None
        if expert in self.in_flight:
            self.waiting.setdefault(expert, 0)

    # -- in flight ---------------------------------------------------------------------------------------------

    def submitted(self, expert: int, spans: Sequence[Span], is_decoding: bool) -> None:
        """These spans are being loaded ahead."""
        num_segments = sum(span.num_segments for span in spans)
        self.in_flight.setdefault(expert, {}).update(dict.fromkeys(spans, is_decoding))
        self.num_in_flight += num_segments
        self.waiting[expert] = self.waiting.get(expert, 0) + num_segments

    def ended(self, expert: int, span: Span) -> bool:
        """A span has arrived or was withdrawn; whether decode had asked for it."""
        spans = self.in_flight[expert]
        is_decoding = spans.pop(span)
        self.num_in_flight -= span.num_segments
        if not spans:
            del self.in_flight[expert]
        return is_decoding

    def withdrawn(self, expert: int, span: Span) -> bool:
        """A span will not come; whether decode had asked for it."""
        if expert in self.waiting:
            self.waiting[expert] -= span.num_segments
        else:
            self.taken_back(expert, span.num_segments)
        return self.ended(expert, span)

    def taken_back(self, expert: int, num_segments: int) -> None:
        """So many segments for the running layer were not loaded ahead after all."""
        if self._settling is not None and expert in self._settling[1]:
            self._settling[1][expert].num_segments -= num_segments

    def join(self, expert: int) -> dict[Span, bool]:
        """The spans of an expert in flight, and whether decode had asked for them; a layer waits for them now."""
        spans = self.in_flight.pop(expert, {})
        self.num_in_flight -= sum(span.num_segments for span in spans)
        return spans

    def is_stale(self, expert: int) -> bool:
        """Whether it is in flight for a layer whose router has spoken."""
        return expert in self.in_flight and expert not in self.waiting

    def guessed(self) -> set[int]:
        """What is loaded ahead, came and was not used yet, or is here and predicted to be needed."""
        if not self.is_used:
            return set()
        return {*self.waiting, *self.in_flight}.union(*self.likely.values())

    def clear(self) -> None:
        """Nothing is predicted, in flight or waiting."""
        self._wanted.clear()
        self._heads.clear()
        self.now = self._geometry.num_layers - 1
        self.in_flight.clear()
        self.waiting.clear()
        self.likely.clear()
        self._settling = None
        self.num_in_flight = 0
        for predicted in self._predicted:
            predicted.clear()

    # -- what came of it ---------------------------------------------------------------------------------------

    def settle(
        self, layer: int, experts: Sequence[int], is_resident: Sequence[bool], counters: PhaseCounters
    ) -> list[int]:
        """The layer's router has spoken: were the predictions right (ProMoE, section 4), did loading ahead help?

        `is_resident` is of the whole layer, by expert. Experts that only pad tokens chose are not in `experts`. Nothing
        is wanted of the layer any more and nothing waits for it; the experts that did. What was loaded ahead is counted
        when `layer_ended`.
        """
        needed = set(experts)
        for prediction in self._predicted[layer].values():
            counters.count_prediction(prediction, needed, is_resident, self._geometry.layers[layer].top_k)
        self._predicted[layer].clear()
        self._wanted.pop(layer, None)
        self.likely.pop(layer, None)
        first = self._geometry.first_expert_id(layer)
        end = first + self._geometry.layers[layer].num_experts
        waited = [expert for expert in self.waiting if first <= expert < end]
        if waited:
            nbytes = self._geometry.segment_nbytes(layer)
            self._settling = (
                counters,
                {
                    expert: _Loaded(
                        self.waiting.pop(expert), nbytes, expert - first in needed, is_resident[expert - first]
                    )
                    for expert in waited
                },
            )
        return waited

    def layer_ended(self) -> None:
        """What is left of what was loaded ahead of the running layer was."""
        if self._settling is None:
            return
        counters, of_experts = self._settling
        self._settling = None
        for loaded in of_experts.values():
            if loaded.num_segments:
                counters.prefetched += 1
                if loaded.is_needed:
                    counters.prefetched_needed += 1
                    counters.prefetched_in_time += loaded.is_in_time
                else:
                    counters.wasted_nbytes += loaded.num_segments * loaded.segment_nbytes

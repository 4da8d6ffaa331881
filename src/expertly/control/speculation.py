"""What is predicted, what of it is being loaded ahead, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from expertly.control.counters import PhaseCounters
from expertly.core.geometry import Geometry
from expertly.core.messages import Piece, Prediction

_FEW = 256
"""Wanted experts among which void ones are not looked for."""


class Speculation:
    """Wanted experts by falling score, pieces in flight that nobody waits for yet, and experts loaded ahead whose layer
    has not run. Experts are dense ids. `window` bounds the segments in flight.
    """

    def __init__(self, geometry: Geometry, window: int) -> None:
        self._geometry = geometry
        self.window = window
        self.is_used = False  # has anything ever been predicted?
        self.num_in_flight = 0  # segments
        self.in_flight: dict[int, dict[Piece, bool]] = {}  # expert -> pieces: asked for by decode?
        self.waiting: dict[int, int] = {}  # expert whose layer has not run -> segments loaded ahead for it
        self.likely: dict[int, dict[int, None]] = {}  # layer -> experts predicted to run: what is here should stay
        self._wanted: list[tuple[float, int, int]] = []  # heap of (-score, order of arrival, expert)
        self._many = _FEW
        self._order = 0
        self._valid_from = [0] * geometry.num_layers  # arrivals before it are void
        self._predicted: list[dict[int, list[int]]] = [{} for _ in geometry.layers]  # layer: distance -> experts

    # -- wanted ------------------------------------------------------------------------------------------------

    def predict(self, prediction: Prediction, num_likely: int) -> None:
        """Want these experts instead of what was wanted of the layer. What is here of the first `num_likely`, and of
        those that `stays` names then, is not to be evicted for other guesses; 0: eviction knows better.
        """
        self.is_used = True
        layer = prediction.layer
        first = self._geometry.first_expert_id(layer)
        self._valid_from[layer] = self._order
        self._predicted[layer][prediction.distance] = prediction.experts
        self.likely[layer] = dict.fromkeys([first + expert for expert in prediction.experts[:num_likely]])
        for expert, score in zip(prediction.experts, prediction.scores, strict=True):
            heappush(self._wanted, (-score, self._order, first + expert))
            self._order += 1
        if len(self._wanted) > self._many:  # low scores are never reached: they would pile up
            self._wanted = [entry for entry in self._wanted if self._is_valid(entry)]
            heapify(self._wanted)
            self._many = max(_FEW, 2 * len(self._wanted))

    def _is_valid(self, entry: tuple[float, int, int]) -> bool:
        return entry[1] >= self._valid_from[self._geometry.layer_of_expert(entry[2])]

    def next(self) -> int | None:
        """The expert that is wanted most, or None. It stays wanted until `taken`."""
        wanted = self._wanted
        while wanted:
            if self._is_valid(wanted[0]):
                return wanted[0][2]
            heappop(wanted)
        return None

    def taken(self) -> None:
        """What `next` named is served, or will not be."""
        heappop(self._wanted)

    def stays(self, layer: int, expert: int) -> None:
        """A wanted expert is here or in flight: so it should be when its layer runs."""
        if self.likely[layer]:
            self.likely[layer][expert] = None
        if expert in self.in_flight:
            self.waiting.setdefault(expert, 0)

    # -- in flight ---------------------------------------------------------------------------------------------

    def submitted(self, expert: int, pieces: Sequence[Piece], is_decoding: bool) -> None:
        """These pieces are being loaded ahead."""
        num_segments = sum(piece.num_segments for piece in pieces)
        self.in_flight.setdefault(expert, {}).update(dict.fromkeys(pieces, is_decoding))
        self.num_in_flight += num_segments
        self.waiting[expert] = self.waiting.get(expert, 0) + num_segments

    def ended(self, expert: int, piece: Piece) -> bool:
        """A piece has arrived or was withdrawn; whether decode had asked for it."""
        pieces = self.in_flight[expert]
        is_decoding = pieces.pop(piece)
        self.num_in_flight -= piece.num_segments
        if not pieces:
            del self.in_flight[expert]
        return is_decoding

    def withdrawn(self, expert: int, piece: Piece) -> bool:
        """A piece will not come; whether decode had asked for it."""
        if expert in self.waiting:
            self.waiting[expert] -= piece.num_segments
        return self.ended(expert, piece)

    def join(self, expert: int) -> list[Piece]:
        """The pieces of an expert in flight; from now on a layer waits for them."""
        pieces = list(self.in_flight.pop(expert, ()))
        self.num_in_flight -= sum(piece.num_segments for piece in pieces)
        return pieces

    def clear(self) -> None:
        """Nothing is predicted, in flight or waiting."""
        self._wanted.clear()
        self.in_flight.clear()
        self.waiting.clear()
        self.likely.clear()
        self.num_in_flight = 0
        for predicted in self._predicted:
            predicted.clear()

    # -- what came of it ---------------------------------------------------------------------------------------

    def settle(
        self, layer: int, experts: Sequence[int], is_resident: Sequence[bool], counters: PhaseCounters
    ) -> list[int]:
        """The layer's router has spoken: were the predictions right (ProMoE, section 4), did loading ahead help?

        `is_resident` is of the whole layer, by expert. Experts that only pad tokens chose are not in `experts`. Nothing
        is wanted of the layer any more and nothing waits for it; the experts that did.
        """
        needed = set(experts)
        for distance, predicted in self._predicted[layer].items():
            right = len(needed.intersection(predicted))
            counters.predicted += len(predicted)
            counters.predicted_needed += right
            counters.predicted_resident += sum(is_resident[expert] for expert in predicted)
            total, hits = counters.by_distance.get(distance, (0, 0))
            counters.by_distance[distance] = (total + len(predicted), hits + right)
        self._predicted[layer].clear()
        self._valid_from[layer] = self._order
        self.likely.pop(layer, None)
        first = self._geometry.first_expert_id(layer)
        end = first + self._geometry.layers[layer].num_experts
        waited = [expert for expert in self.waiting if first <= expert < end]
        for expert in waited:
            if self.waiting.pop(expert):
                counters.prefetched += 1
                if expert - first in needed:
                    counters.prefetched_needed += 1
                    counters.prefetched_in_time += is_resident[expert - first]
        return waited

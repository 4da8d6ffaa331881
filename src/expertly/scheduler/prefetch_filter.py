"""Whether a predicted expert is prefetched: where that should pay, by what was measured while the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import frexp
from typing import Any, NamedTuple

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan

FILTERS = ("none", "confidence")
"""All that is predicted is prefetched; what should pay."""

_MOST = 256.0
"""Predictions of one kind that are remembered; of more, all count half."""
_BELIEVED = 4.0
"""Predictions that the more general kind weighs in one that was seen little."""
_FADE_PREDICTIONS = 0.999
"""Of what was counted, what is left after another layer."""
_MAX_RANK = 31
_MAX_HALVINGS = 15
_FADE_MISSES = 0.998
"""Of what was counted, what is left after another pass through a layer."""
_NEWEST = 1 / 16
"""What the newest time weighs."""
_MOST_TIMES = 4.0
"""Times the average that a time is taken for at most: a pause says little about the next."""


class Moment(str, Enum):
    """What a driver tells the time of."""

    PASS_BEGAN = "pass began"
    ALL_CAME = "all came"  # what the running layer waited for first
    NOW = "now"  # a router ran, or something is about to be prefetched


class PrefetchFilter:
    """Sees loads, what came of predictions, and times as a driver tells them; it reads no clock.

    A predicted expert is prefetched where p x saved > (1 - p) x lost, in nanoseconds. p: how often such predictions
    were right (HitProbability). saved: what of the load fits into the time that the link is free before the layer's
    router runs, after what is in flight (BandwidthEstimate). lost: what then still is to come of it, where that keeps
    the layer's own loads waiting, and what it evicts for nothing, as an LRU cache would miss it (ShadowCache); less
    what other prefetches make good. Until these times are known everything is prefetched.
    """

    def __init__(self, geometry: Geometry, quotas: Sequence[int]) -> None:
        """`quotas`: kept slots of each layer."""
        self.num_let = self.num_refused = 0
        """Predicted experts that were not here."""
        self._geometry = geometry
        self._hit_probability = HitProbability()
        self._bandwidth = BandwidthEstimate()
        self._shadow = ShadowCache([quota // geometry.segments_per_expert for quota in quotas])
        self._now_ns = 0
        self._size = 0  # of the running pass, in powers of two

    # -- what it sees ------------------------------------------------------------------------------------------

    def at(self, moment: Moment, now_ns: int) -> None:
        """It is that late."""
        self._now_ns = now_ns
        if moment is Moment.ALL_CAME:
            self._bandwidth.came(now_ns)
        elif moment is Moment.PASS_BEGAN:
            self._bandwidth.begin_pass()

    def router_ran(self, router: RouterRan) -> None:
        """A layer begins, now."""
        self._size = router.batch_tokens.bit_length()
        self._bandwidth.router_ran(self._now_ns, self._size)
        is_decode = router.batch_tokens and False not in router.is_decode
        misses = self._shadow.ran(router) if is_decode else None
        self._hit_probability.settle(router.layer, frozenset(router.experts), misses)

    def asked(self, layer: int, num_segments: int) -> None:
        """The running layer waits for so many segments."""
        self._bandwidth.asked(num_segments * self._geometry.segment_nbytes(layer))

    def abandon(self) -> None:
        """The pass failed."""
        self._hit_probability.clear()
        self._bandwidth.begin_pass()

    # -- what it says ------------------------------------------------------------------------------------------

    def lets(
        self,
        layer: int,
        eid: int,
        predicted: PredictedExpert,
        now: int,
        num_segments: int,
        num_queued: int,
        *,
        evicts: bool,
    ) -> bool:
        """Whether so many segments of a predicted expert are prefetched. `now`: the layer whose router ran last.
        `num_queued`: segments that come before. `evicts`: others are evicted for it.
        """
        pays = self._pays(layer, eid, predicted, now, num_segments, num_queued, evicts=evicts)
        if pays:
            self.num_let += 1
        else:
            self.num_refused += 1
        return pays

    def _pays(
        self,
        layer: int,
        eid: int,
        predicted: PredictedExpert,
        now: int,
        num_segments: int,
        num_queued: int,
        *,
        evicts: bool,
    ) -> bool:
        geometry, bandwidth, shadow = self._geometry, self._bandwidth, self._shadow
        p = self._hit_probability.probability(layer, eid - geometry.first_expert_id(layer), predicted, self._size)
        segment_ns = bandwidth.load_ns(geometry.segment_nbytes(layer))
        free_ns = bandwidth.free_ns(self._now_ns, (layer - now) % geometry.num_layers or geometry.num_layers)
        if segment_ns is None or free_ns is None:
            return True
        free_ns -= num_queued * segment_ns
        takes_ns = num_segments * segment_ns
        if free_ns <= 0:
            return False  # it would be cancelled before it began
        saved_ns = min(free_ns, takes_ns)
        left_ns = segment_ns - free_ns % segment_ns if free_ns < takes_ns else 0.0
        unpredicted = 1 - self._hit_probability.coverage
        lost_ns = left_ns * min(1.0, shadow.misses_a_pass(layer) * unpredicted)
        if evicts:
            lost_ns += shadow.worth_of_place(layer) * (takes_ns - saved_ns * (1 - unpredicted))
        return p * saved_ns > (1 - p) * lost_ns

    def facts(self) -> dict[str, Any]:
        """What it has come to, as plain data (docs/conventions.md)."""
        return {
            "kind": "confidence",
            "state": "on",
            "let": self.num_let,
            "refused": self.num_refused,
            "accuracy": self._hit_probability.accuracy(),
            "says": f"{self.num_let} predictions loaded, {self.num_refused} not worth it",
        }


class PredictedExpert(NamedTuple):
    """One expert of a prediction."""

    rank: int  # from 0: the one with the highest score
    score: float
    distance: int  # layers ahead of what the predictor had seen


_Kind = tuple[int, ...]


class HitProbability:
    """Counts by (tokens of the pass, layers ahead, rank, score), the last two in steps; a kind that was hardly seen is
    believed to be as its rank is, and a rank as the distance.
    """

    def __init__(self) -> None:
        self._seen: dict[_Kind, list[float]] = {}  # kind -> [predictions, right ones]
        self._asked: dict[int, dict[int, _Kind]] = {}  # layer -> expert -> kind: not settled
        self._num_right = self._num_misses = 0.0

    def probability(self, layer: int, expert: int, predicted: PredictedExpert, size: int) -> float:
        """That the expert is needed. It is noted: `settle` tells. `size`: of the pass, tokens in powers of two."""
        score = frexp(predicted.score)[1] if predicted.score > 0 else -_MAX_HALVINGS
        kind = (
            size,
            predicted.distance,
            min(predicted.rank, _MAX_RANK),
            max(-_MAX_HALVINGS, min(_MAX_HALVINGS, score)),
        )
        self._asked.setdefault(layer, {})[expert] = kind
        believed = 0.5
        for general in (kind[:2], kind[:3], kind):
            seen, right = self._seen.get(general, (0.0, 0.0))
            believed = (right + _BELIEVED * believed) / (seen + _BELIEVED)
        return believed

    @property
    def coverage(self) -> float:
        """Of what is missed in decode, the share that was predicted."""
        return min(1.0, self._num_right / self._num_misses) if self._num_misses else 0.0

    def settle(self, layer: int, needed: frozenset[int], misses: int | None = None) -> None:
        """The layer's router ran: of the experts that were asked about, these are needed. `misses`: experts that
        it would have missed if nothing was prefetched; None: it is no decode's.
        """
        asked = self._asked.pop(layer, None)
        if misses is not None and asked is not None:
            self._num_misses = self._num_misses * _FADE_PREDICTIONS + misses
            self._num_right = self._num_right * _FADE_PREDICTIONS + sum(expert in needed for expert in asked)
        if asked is None:
            return
        for expert, kind in asked.items():
            is_right = expert in needed
            for general in (kind[:2], kind[:3], kind):
                counts = self._seen.setdefault(general, [0.0, 0.0])
                if counts[0] >= _MOST:
                    counts[0], counts[1] = counts[0] / 2, counts[1] / 2
                counts[0] += 1
                counts[1] += is_right

    def clear(self) -> None:
        """What was asked about will not be settled."""
        self._asked.clear()

    def accuracy(self) -> float | None:
        """Of the predictions remembered, the share that was needed; None where there are none."""
        pairs = [counts for kind, counts in self._seen.items() if len(kind) == 2]
        seen = sum(pair[0] for pair in pairs)
        return sum(pair[1] for pair in pairs) / seen if seen else None


class ShadowCache:
    """Experts by layer, in the order of their last use; no bytes. Only what decode needs is seen."""

    def __init__(self, capacities: Sequence[int]) -> None:
        """`capacities`: of each layer, how many experts it keeps."""
        self._capacities = list(capacities)
        self._kept: list[list[int]] = [[] for _ in capacities]  # the last used at the end
        self._misses = [0.0] * len(self._kept)
        self._last_hits = [0.0] * len(self._kept)  # of what would have gone next
        self._num_passes = [0.0] * len(self._kept)

    def ran(self, router: RouterRan) -> int:
        """A layer needs these: how many of them it would have missed."""
        layer = router.layer
        misses, last_hits = self._use(self._kept[layer], self._capacities[layer], router.experts)
        self._misses[layer] = self._misses[layer] * _FADE_MISSES + misses
        self._last_hits[layer] = self._last_hits[layer] * _FADE_MISSES + last_hits
        self._num_passes[layer] = self._num_passes[layer] * _FADE_MISSES + 1
        return misses

    def _use(self, kept: list[int], capacity: int, experts: Sequence[int]) -> tuple[int, int]:
        """Misses, and hits of what would have gone next."""
        if len(experts) > capacity:  # at best it has what it can hold of them
            return len(experts) - capacity, 0
        last = kept[0] if len(kept) == capacity and kept else None
        misses = last_hits = 0
        for expert in experts:
            if expert in kept:
                kept.remove(expert)
                last_hits += expert == last
            else:
                misses += 1
            kept.append(expert)
        if len(kept) > capacity:
            del kept[: len(kept) - capacity]
        return misses, last_hits

    def worth_of_place(self, layer: int) -> float:
        """Demands that are missed, of 0 to 1, because one place of a layer's holds what nobody needs, until that has
        become the oldest: so many misses go by as there are places.
        """
        if not self._misses[layer]:
            return 0.0
        return min(1.0, self._last_hits[layer] * self._capacities[layer] / self._misses[layer])

    def misses_a_pass(self, layer: int) -> float:
        """Experts that a pass through the layer would have missed, on average."""
        return self._misses[layer] / self._num_passes[layer] if self._num_passes[layer] else 0.0


class Average:
    """Of the newest values, none counted as more than 4 times what came before; None before the first."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        if self.value is None:
            self.value = value
        else:
            self.value += (min(value, _MOST_TIMES * self.value) - self.value) * _NEWEST


class BandwidthEstimate:
    """Times in nanoseconds. By `size`, tokens of a pass in powers of two.

    After the last of what a layer waited for has come, and all along where it waits for nothing, the link is free until
    the next router runs: what is loaded ahead has that time.
    """

    def __init__(self) -> None:
        self._free_ns: dict[tuple[int, bool], Average] = {}  # by size, and whether the layer had waited
        self._all_free_ns: dict[int, Average] = {}
        self._ns_a_byte = Average()
        self._router_ns: int | None = None  # when the last one ran; None: in no pass, or in an earlier one
        self._free_from_ns = 0
        self._awaited_nbytes = 0
        self._has_waited = False
        self._size = 0

    def begin_pass(self) -> None:
        """The time since the last router is no layer's."""
        self._router_ns = None
        self._awaited_nbytes = 0

    def router_ran(self, now_ns: int, size: int) -> None:
        """A router ran."""
        if self._router_ns is not None and size == self._size and not self._awaited_nbytes:
            free_ns = now_ns - self._free_from_ns
            self._free_ns.setdefault((size, self._has_waited), Average()).add(free_ns)
            self._all_free_ns.setdefault(size, Average()).add(free_ns)
        self._router_ns = self._free_from_ns = now_ns
        self._size, self._awaited_nbytes, self._has_waited = size, 0, False

    def asked(self, nbytes: int) -> None:
        """The layer waits for so many bytes."""
        self._awaited_nbytes = nbytes

    def came(self, now_ns: int) -> None:
        """They are all here."""
        if self._awaited_nbytes and self._router_ns is not None:
            self._ns_a_byte.add((now_ns - self._router_ns) / self._awaited_nbytes)
            self._has_waited = True
        self._free_from_ns, self._awaited_nbytes = now_ns, 0

    def load_ns(self, nbytes: int) -> float | None:
        """How long loading so much takes; None: nobody knows yet."""
        return None if self._ns_a_byte.value is None else self._ns_a_byte.value * nbytes

    def free_ns(self, now_ns: int, num_layers: int) -> float | None:
        """How long the link is free from now until the router runs that is so many after the last one; None: nobody
        knows yet.
        """
        of_layer = self._free_ns.get((self._size, self._has_waited or self._awaited_nbytes > 0))
        of_any = self._all_free_ns.get(self._size)
        if of_layer is None or of_any is None or of_layer.value is None or of_any.value is None:
            return None
        gone_ns = 0 if self._awaited_nbytes else now_ns - self._free_from_ns
        return max(0.0, of_layer.value - gone_ns) + (num_layers - 1) * of_any.value

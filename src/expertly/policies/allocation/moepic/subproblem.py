"""How a layer best splits its budget: so many segments of so many experts (MoEpic, section 3.4.2, equation 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.policies.allocation.moepic.plan import LayerSplit
from expertly.policies.allocation.moepic.statistics import Doubles, LayerRates
from expertly.policies.allocation.moepic.timing import Parts, Timing

Counts = npt.NDArray[np.intp]

_ROUNDING = 1e-9  # of sums of shares: a prefetch that just fits must not fail for their last bits


class Splits:
    """Every way to keep `segments` of each of `experts` experts, (0, 0) included, by rising memory, then experts.

    theta, the kept share of an expert, is segments / P: V / C rounded down, so that C * theta * P segments <= V * P.
    The rest of V stays free for other layers: a layer's budget is what it may use.
    """

    def __init__(self, num_experts: int, segments_per_expert: int) -> None:
        self.num_experts, self.max_segments = num_experts, num_experts * segments_per_expert
        experts = np.repeat(np.arange(1, num_experts + 1), segments_per_expert)
        segments = np.tile(np.arange(1, segments_per_expert + 1), num_experts)
        order = np.lexsort((experts, experts * segments))
        self.experts: Counts = np.concatenate([[0], experts[order]])
        self.segments: Counts = np.concatenate([[0], segments[order]])
        self.theta: Doubles = self.segments / segments_per_expert
        pairs = zip(self.experts.tolist(), self.segments.tolist(), strict=True)
        self.number = {pair: number for number, pair in enumerate(pairs)}
        self.last: Counts = (  # [E*P+1] by budget in segments: the last split that needs no more
            np.searchsorted(self.experts * self.segments, np.arange(self.max_segments + 1), side="right") - 1
        )


class Outcomes(NamedTuple):
    """What comes of a layer's splits, one element each."""

    loaded: Doubles  # m: experts' worth of what is needed that is there when the router has run
    exposed_ns: Doubles
    next_window_ns: Doubles  # T_wind of the next layer


@dataclass(frozen=True, slots=True)
class Curve:
    """The best split of a layer for each budget 0..E*P, in segments, with one prefetching window."""

    splits: Splits
    split: Counts  # [E*P+1] the best one, by its number in `splits`
    loaded: Doubles  # [E*P+1] its m: never falls as the budget grows, where parts cost nothing of their own
    exposed_ns: Doubles  # [E*P+1] what the layer then takes beyond all being there and whole: never grows
    next_window_ns: Doubles  # [E*P+1]

    def best(self, budget: int) -> LayerSplit:
        """The best split for so many segments."""
        number = self.split[budget]
        return LayerSplit(int(self.splits.experts[number]), int(self.splits.segments[number]), budget)


class LayerProblem:
    """The sub-problem of one layer, for any budget and window."""

    def __init__(self, rates: LayerRates, layer: int, timing: Timing, splits: Splits) -> None:
        num = rates.num_experts
        assert num == splits.num_experts
        self.splits, self._layer, self._timing = splits, layer, timing
        self._top_k, self._load_ns = timing.top_k[layer], timing.load_ns[layer]
        predicted_hits = rates.predicted_hits.T  # [E+1, E] by C, then y
        # Sums over the first Y predicted experts, [C, Y] flat: of PH, and of PH * P; and of P, [Y]
        self._hits_of_first = _sums(predicted_hits)
        self._joint_of_first = _sums(predicted_hits * rates.accuracy)
        self._needed_of_first = _sums(rates.accuracy)
        self._begin: Counts = splits.experts * (num + 1)
        self._tops: Doubles = self._top_k * rates.hits[splits.experts]  # of the needed experts, those that are kept
        self._cached: Doubles = self._tops * splits.theta  # A_cache
        self._is_split = (splits.experts > 0) & (splits.theta < 1)

    def outcomes(self, window_ns: float) -> Outcomes:
        loaded, parts = self._loaded(window_ns)
        timing, layer = self._timing, self._layer
        exposed, window = timing.exposed_ns(layer, loaded, parts), timing.next_window_ns(layer, loaded, parts)
        return Outcomes(loaded, exposed, window)

    def curve(self, window_ns: float) -> Curve:
        """The best split for each budget: the least exposed time; of equal ones the highest m, then the one that keeps
        most of what is needed, then the least memory, then the fewest experts.
        """
        splits, (loaded, exposed, next_window) = self.splits, self.outcomes(window_ns)
        # Where parts cost nothing the highest m has the least exposed time.
        counts_parts = self._timing.counts_parts(self._layer)
        rank, goods = (-exposed, [loaded, self._cached]) if counts_parts else (loaded, [self._cached])
        best = np.maximum.accumulate(rank)
        is_better = np.append(True, best[1:] > best[:-1])
        for good in goods:  # where that is as high as before, more is better; a level is all since it last rose
            rank = np.where(rank == best, good, -1.0) + np.cumsum(is_better) * (self._top_k + 2.0)
            best = np.maximum.accumulate(rank)
            np.greater(best[1:], best[:-1], out=is_better[1:])
        chosen = np.maximum.accumulate(np.where(is_better, np.arange(len(loaded)), 0))[splits.last]
        return Curve(splits, chosen, loaded[chosen], exposed[chosen], next_window[chosen])

    def _loaded(self, window_ns: float) -> tuple[Doubles, Parts | None]:
        """m of each split: what is kept, and the first Y predicted experts, as many as can be prefetched (equation 9)
        in the window and into a buffer of K experts. And the parts, where these cost something.

        Parts (ours): where tops are kept, every needed expert comes in two spans. Its rest lies where the buffer had
        room; an expert that is not kept gets its top a place among the kept ones. Tops whose rest has not arrived are
        computed meanwhile.
        """
        num_experts, theta, begin = self.splits.num_experts, self.splits.theta, self._begin
        room = float(self._top_k)  # in whole experts
        if self._load_ns > 0:
            room = min(room, window_ns / self._load_ns)
        room = max(room, 0.0) + _ROUNDING
        # What the first Y take, Y - theta * sum of PH, never falls with Y and is at most Y: a binary search for all.
        count = np.full(len(theta), min(int(room), num_experts))
        step = 1 << max(num_experts - int(room), 0).bit_length()
        while step := step >> 1:
            more = np.minimum(count + step, num_experts)
            fits = more - theta * self._hits_of_first.take(begin + more) <= room
            np.copyto(count, more, where=fits)
        needed, kept = self._needed_of_first.take(count), self._joint_of_first.take(begin + count)
        loaded: Doubles = np.minimum(self._cached + (needed - theta * kept), self._top_k)  # equation 10
        if not self._timing.counts_parts(self._layer):
            return loaded, None
        alone = np.maximum(self._tops - kept, 0.0)  # kept ones that were not prefetched
        there = needed + np.where(self._is_split, 0.0, alone)
        lacking = np.clip(self._top_k - there, self._top_k - loaded, self._top_k)
        return loaded, Parts(
            further=np.where(self._is_split, float(self._top_k), 0.0),
            early=np.where(self._is_split, alone * (1 - theta), 0.0),
            lacking=np.where(lacking > _ROUNDING, lacking, 0.0),
        )


def _sums(shares: Doubles) -> Doubles:
    """Sums of the first 0..E along the last axis, [..., E+1], flat."""
    sums = np.zeros((*shares.shape[:-1], shares.shape[-1] + 1))
    np.cumsum(shares, axis=-1, out=sums[..., 1:])
    return sums.reshape(-1)

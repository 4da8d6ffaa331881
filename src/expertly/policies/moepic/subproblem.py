"""How a layer best splits its budget: so many segments of so many experts (MoEpic, section 3.4.2, equation 11)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.policies.moepic.statistics import Doubles, LayerRates

Counts = npt.NDArray[np.intp]

_ROUNDING = 1e-9  # of sums of shares: a prefetch that just fits must not fail for their last bits


class Splits:
    """Every way to keep `segments` of each of `experts` experts, (0, 0) included, by rising memory, then experts.

    theta, the kept share of an expert, is segments / P: V / C rounded down, so that C * theta * P segments <= V * P.
    What that leaves of V is kept free for other layers: a layer's budget is what it may use.
    """

    def __init__(self, num_experts: int, segments_per_expert: int) -> None:
        self.num_experts, self.segments_per_expert = num_experts, segments_per_expert
        experts = np.repeat(np.arange(1, num_experts + 1), segments_per_expert)
        segments = np.tile(np.arange(1, segments_per_expert + 1), num_experts)
        order = np.lexsort((experts, experts * segments))
        self.experts: Counts = np.concatenate([[0], experts[order]])
        self.segments: Counts = np.concatenate([[0], segments[order]])
        self.theta: Doubles = self.segments / segments_per_expert
        taken = self.experts * self.segments
        self.number = {
            pair: n for n, pair in enumerate(zip(self.experts.tolist(), self.segments.tolist(), strict=True))
        }
        self.last: Counts = np.searchsorted(taken, np.arange(self.max_segments + 1), side="right") - 1
        """[E*P+1] by budget in segments: the last split that needs no more"""

    @property
    def max_segments(self) -> int:
        return self.num_experts * self.segments_per_expert


@dataclass(frozen=True, slots=True)
class Curve:
    """What a layer makes of each budget 0..E*P, in segments, with one prefetching window."""

    splits: Splits
    split: Counts  # [E*P+1] the best one, by its number in `splits`
    loaded: Doubles  # [E*P+1] its m: never falls as the budget grows

    def kept_experts(self, budget: int) -> int:
        return int(self.splits.experts[self.split[budget]])

    def kept_segments(self, budget: int) -> int:
        """Of each kept expert."""
        return int(self.splits.segments[self.split[budget]])


class LayerProblem:
    """The sub-problem of one layer, for any budget and window."""

    def __init__(self, rates: LayerRates, top_k: int, splits: Splits) -> None:
        num = rates.num_experts
        assert num == splits.num_experts
        self.splits, self.top_k = splits, top_k
        predicted_hits = rates.predicted_hits.T  # [E+1, E] by C, then y
        # Sums over the first Y predicted experts, [C, Y] flat: of PH, and of PH * P; and of P, [Y]
        self._hits_of_first = _sums(predicted_hits)
        self._joint_of_first = _sums(predicted_hits * rates.accuracy)
        self._needed_of_first = _sums(rates.accuracy)
        self._begin: Counts = splits.experts * (num + 1)
        self._cached: Doubles = top_k * rates.hits[splits.experts] * splits.theta  # A_cache

    def loaded(self, window_ns: float, load_ns: float) -> Doubles:
        """m of each split: what is kept, and what the prefetches bring that fit the window, at most K.

        Y is the largest number of predicted experts whose prefetches (equation 9) together take no longer than the
        window, and no more memory than the buffer of K experts.
        """
        num_experts, theta, begin = self.splits.num_experts, self.splits.theta, self._begin
        room = float(self.top_k)  # in whole experts
        if load_ns > 0:
            room = min(room, window_ns / load_ns)
        room = max(room, 0.0) + _ROUNDING
        taken_up_to = self._hits_of_first
        # What the first Y take, Y - theta * sum of PH, never falls with Y and is at most Y: a binary search for all.
        count = np.full(len(theta), min(int(room), num_experts))
        step = 1 << max(num_experts - int(room), 0).bit_length()
        while step := step >> 1:
            more = np.minimum(count + step, num_experts)
            fits = more - theta * taken_up_to.take(begin + more) <= room
            np.copyto(count, more, where=fits)
        prefetched = self._needed_of_first.take(count) - theta * self._joint_of_first.take(begin + count)  # equation 10
        result: Doubles = np.minimum(self._cached + prefetched, self.top_k)
        return result

    def loaded_with(self, experts: int, segments: int, window_ns: float, load_ns: float) -> float:
        """m of one split."""
        return float(self.loaded(window_ns, load_ns)[self.splits.number[experts, segments]])

    def curve(self, window_ns: float, load_ns: float) -> Curve:
        """The best split for each budget: the highest m; of equal ones that which keeps most of what is needed, then
        the least memory, then the fewest experts.
        """
        splits, loaded = self.splits, self.loaded(window_ns, load_ns)
        best = np.maximum.accumulate(loaded)
        is_higher = np.empty(len(loaded), np.bool_)
        is_higher[0] = True
        np.greater(best[1:], best[:-1], out=is_higher[1:])
        # Where m is as high as before, more kept is better. A level is all splits since m last rose.
        level = np.cumsum(is_higher) * (self.top_k + 1.0)
        rank = level + np.where(loaded == best, self._cached, 0.0)
        best_rank = np.maximum.accumulate(rank)
        is_better = is_higher
        np.greater(best_rank[1:], best_rank[:-1], out=is_better[1:])
        chosen = np.maximum.accumulate(np.where(is_better, np.arange(len(loaded)), 0))[splits.last]
        return Curve(splits, chosen, loaded[chosen])


def _sums(shares: Doubles) -> Doubles:
    """Sums of the first 0..E along the last axis, [..., E+1], flat."""
    sums = np.zeros((*shares.shape[:-1], shares.shape[-1] + 1))
    np.cumsum(shares, axis=-1, out=sums[..., 1:])
    return sums.reshape(-1)

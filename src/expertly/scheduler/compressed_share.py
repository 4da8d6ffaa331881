"""Which share of a memory budget holds experts as they are stored: from measured speeds and from how experts recur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from expertly.core.costs import CodecCosts

Reuse = Sequence[tuple[float, float]]
"""(share of its experts that a layer keeps, hit rate in decode), rising from (0, 0) to (1, 1)."""

_KEPT = (0.0, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_HIT = {
    "the demo model": (0.0, 0.142, 0.25, 0.321, 0.395, 0.539, 0.669, 0.783, 0.878, 0.95, 1.0),
    "gpt-oss-20b": (0.0, 0.262, 0.454, 0.529, 0.618, 0.805, 0.909, 0.958, 0.985, 0.996, 1.0),
    "DeepSeek-V2-Lite, law": (0.0, 0.21, 0.344, 0.434, 0.499, 0.62, 0.736, 0.834, 0.907, 0.963, 1.0),
    "DeepSeek-V2-Lite, translation": (0.0, 0.196, 0.33, 0.479, 0.62, 0.755, 0.853, 0.913, 0.95, 0.977, 1.0),
}

MEASURED: dict[str, Reuse] = {whose: tuple(zip(_KEPT, rates, strict=True)) for whose, rates in _HIT.items()}
"""Of `lru` on recorded routing, warm."""

REUSES: tuple[Reuse, ...] = tuple(MEASURED.values())
"""What stands for a model whose reuse nobody knows: all of them."""

OVERLAP = 0.15
"""Of the experts above, so many have a copy, too, which is of no use meanwhile, where copies are few; all of them where
copies are of all experts.
"""

LOSS = 0.15
"""Copies are chosen so much worse than one cache of all memory would: 0.07 to 0.2, less the more of the model fits."""

OVERTIME = 0.5
"""Copies are decoded while others are read, as far as a layer needs both: so much of the shorter time comes on top."""

STEEPER = 1.5
"""With it a model that is left out of those measured is expected to lose 6 % of loading at the most, at any budget,
disk and decoding tried: less than compressing saves. With 1.2 that is as much as loading takes; 1.7 loses nothing, and
some gains.
"""

LEAST_GAIN = 0.03
"""Of the time that loading is expected to take. Below it nothing is compressed."""

STEP = 0.05


@dataclass(frozen=True, slots=True)
class ShareChoice:
    """A share of the budget, from 0 to below 1, and why."""

    share: float
    why: str
    gain: float  # of the expected time of loading, against no copies, on average; 0 with share 0


@dataclass(frozen=True, slots=True)
class Loading:
    """What loading is expected to take: `memory_nbytes` is the budget, of which `least_nbytes` (the ring) keep nothing.
    What comes from the disk takes the larger of reading and decoding, what is a copy decoding alone, partly meanwhile.
    """

    experts_nbytes: int  # decoded
    memory_nbytes: int
    least_nbytes: int
    disk_nbytes_per_s: float
    costs: CodecCosts

    @property
    def reading(self) -> float:
        """Seconds a byte of weights."""
        return self.costs.ratio / self.disk_nbytes_per_s

    @property
    def decoding(self) -> float:
        """Seconds a byte of weights."""
        return 1.0 / self.costs.all_nbytes_per_s

    def seconds(self, share: float, reuse: Reuse) -> float:
        """For a demanded byte, with so much of the memory for copies."""
        above = max(0.0, self.memory_nbytes * (1 - share) - self.least_nbytes) / self.experts_nbytes
        copies = self.memory_nbytes * share / (self.costs.ratio * self.experts_nbytes)
        hits = _at(reuse, above)
        missing = max(0.0, 1 - copies)
        worth = copies * (1 - LOSS * missing) - above * (1 - (1 - OVERLAP) * missing)
        with_copies = _at(reuse, above + max(0.0, worth))
        from_disk = (1 - with_copies) * max(self.reading, self.decoding)
        from_copies = (with_copies - hits) * self.decoding
        return max(from_disk, from_copies) + OVERTIME * min(from_disk, from_copies)

    def gain(self, share: float, reuse: Reuse) -> float:
        """Of the time without copies, what they save; below 0 where they lose."""
        without = self.seconds(0.0, reuse)
        return (without - self.seconds(share, reuse)) / (without or 1.0)


def choose_share(
    experts_nbytes: int,
    memory_nbytes: int,
    least_nbytes: int,
    disk_nbytes_per_s: float,
    costs: CodecCosts,
    reuses: Sequence[Reuse] = REUSES,
) -> ShareChoice:
    """Of the shares that are expected to lose nothing under any reuse, the one that saves most of the time to load what
    a token needs, on their average. See Loading. Several reuses are other models'; then it must lose nothing either for
    a model whose experts recur more than theirs.
    """
    if memory_nbytes >= experts_nbytes:
        return ShareChoice(0.0, "all experts are kept: none is loaded twice", 0.0)
    expected = Loading(experts_nbytes, memory_nbytes, least_nbytes, disk_nbytes_per_s, costs)
    all_of_them = [*reuses, steeper(reuses)] if len(reuses) > 1 else reuses
    saved, best = 0.0, 0.0
    for number in range(1, round(1 / STEP)):
        share = STEP * number
        if memory_nbytes * (1 - share) < least_nbytes:
            break
        if min(expected.gain(share, reuse) for reuse in all_of_them) < 0:
            continue
        gain = sum(expected.gain(share, reuse) for reuse in reuses) / len(reuses)
        if gain > saved:
            saved, best = gain, share
    speeds = f"reading brings {1e-9 / expected.reading:.2f} GB/s of weights, decoding {1e-9 / expected.decoding:.2f}"
    if saved < LEAST_GAIN:
        return ShareChoice(0.0, f"{speeds}: copies in memory would not save {LEAST_GAIN:.0%} of loading", 0.0)
    return ShareChoice(round(best, 2), f"{speeds}: copies in memory are expected to save {saved:.0%} of loading", saved)


def steeper(reuses: Sequence[Reuse]) -> Reuse:
    """Of a model whose experts recur more than those of each of these: misses to the power of STEEPER."""
    most = [max(rates) for rates in zip(*([rate for _, rate in reuse] for reuse in reuses), strict=True)]
    return tuple((kept, 1 - (1 - rate) ** STEEPER) for (kept, _), rate in zip(reuses[0], most, strict=True))


def reuse_of(misses: Sequence[npt.NDArray[np.int64]]) -> Reuse | None:
    """From what caches of s = 0..E experts of each layer missed ([E + 1] each), first uses left out; None where nothing
    was used twice.
    """
    points = np.array(_KEPT)
    missed = np.zeros(len(points))
    for one in misses:
        size = len(one) - 1
        missed += np.interp(points * size, np.arange(size + 1), one - one[size])
    if not missed[0]:
        return None
    return tuple(zip(_KEPT, (1 - missed / missed[0]).tolist(), strict=True))


def _at(curve: Reuse, x: float) -> float:
    """On the straight lines through the points of a curve; its last value beyond them."""
    for (left, low), (right, high) in pairwise(curve):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return curve[-1][1]

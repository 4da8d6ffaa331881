"""Experts by cache priority, as each of many passes found them (MoEpic, section 3.4.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertly.policies.eviction.priority import CachePriority

Ints = npt.NDArray[np.intp]

_NEVER = np.inf
_TOGETHER = 32  # passes


class PriorityRanks:
    """Of one layer's experts: place 0 has the highest priority; ties go to the lowest id, those never used are last."""

    def __init__(self, num_experts: int, priority: CachePriority) -> None:
        self._priority = priority
        self._num_used = np.zeros(num_experts, np.intp)
        self._score = np.full(num_experts, _NEVER)  # minus the priority
        self._ids: Ints = np.arange(num_experts)

    def ranked(self) -> list[int]:
        """All experts by falling priority, now."""
        ranked: list[int] = self._score.argsort(kind="stable").tolist()
        return ranked

    def follow(self, needed: Ints, passes: Ints, num_tokens: Ints) -> Ints:
        """Take passes one after another, and return the ranks that each of them found: [passes, E].

        `needed` [N]: what their tokens need, in order, and `passes` [N] the pass, from 0, in which they do;
        `num_tokens` [passes]: how many there have been when that pass ends.

        Nothing is sorted pass by pass: all priorities that are or come to be are ordered once, and an expert's rank is
        the number of experts whose priority, of that pass, has a lower place in that order. So for a few passes at a
        time: what is ordered grows with their number.
        """
        ends = passes.searchsorted(np.arange(1, len(num_tokens) + 1)).tolist()
        parts, begin = [], 0
        for first in range(0, len(num_tokens), _TOGETHER):
            after = num_tokens[first : first + _TOGETHER]
            end = ends[first + len(after) - 1]
            parts.append(self._few(needed[begin:end], passes[begin:end] - first, after))
            begin = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _few(self, needed: Ints, passes: Ints, num_tokens: Ints) -> Ints:
        num_passes, num_experts = len(num_tokens), len(self._ids)
        by_expert = needed.argsort(kind="stable")
        grouped = needed[by_expert]
        count = np.empty_like(needed)
        count[by_expert] = np.arange(1, len(needed) + 1) - grouped.searchsorted(grouped)
        count += self._num_used[needed]
        scores = np.concatenate([self._score, -self._priority.of_many(count, num_tokens[passes])])
        order = np.lexsort((np.concatenate([self._ids, needed]), scores))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        found = np.empty((num_passes, num_experts), np.intp)  # of each expert its place in that order
        now, following = place[:num_experts].copy(), place[num_experts:]
        begin = 0
        for number, end in enumerate(passes.searchsorted(np.arange(num_passes), side="right").tolist()):
            found[number] = now
            now[needed[begin:end]] = following[begin:end]  # an expert that is there twice: the last
            begin = end
        found *= num_passes
        found += np.arange(num_passes)[:, None]  # places in [order, passes], flat
        num_before = np.zeros((len(order), num_passes), np.int32)
        num_before.reshape(-1)[found] = 1
        num_before.cumsum(axis=0, out=num_before)
        ranks: Ints = num_before.take(found).astype(np.intp)
        ranks -= 1
        self._score = scores[order[now]]
        self._num_used += np.bincount(needed, minlength=num_experts)
        return ranks

"""Gives more slots to layers that miss more, for the fewest expected loads (AdapMoE's cache allocation)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation import Allocation, uniform_quotas, with_rests
from expertly.policies.base import PolicyOptions, option
from expertly.policies.known import NOTHING, Known
from expertly_lab.baselines.oracle import NEVER

Costs = Sequence[npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]]

_LEAST_GAIN = 0.01
"""The least share of the expected loads that new quotas must save to be taken (our choice)."""

_STEPS = 30
"""Costs are rounded to 2**-30 of one, or less finely where sums would not fit 63 bits."""


@dataclass(frozen=True)
class AdapMoEOptions(PolicyOptions):
    tau: int = option(256, "decoded tokens between two allocations, where no training part says how to share", least=1)


class AdapMoE(Allocation):
    """Whole experts go where they save most: a layer l that keeps s experts is expected to load misses_l(s) x (1 -
    a_l). misses_l is that of an LRU cache, from stack distances; a_l is the share of needed experts that predictions
    name, and that are prefetched. Prompts do not count.

    With the Usage of a training part quotas are fixed. Without, they are uniform until `tau` tokens have been decoded;
    then, and after every `tau` more, they are computed from everything seen so far.
    """

    name = "adapmoe"
    options = AdapMoEOptions
    needs_layers = True

    def __init__(self, geometry: Geometry, options: AdapMoEOptions = AdapMoEOptions(), known: Known = NOTHING) -> None:
        super().__init__(geometry)
        self._usage = known.get(Usage)
        self.is_online = self._usage is None
        self._tau = self._due = options.tau
        self._seen = [StackDistances(layer.num_experts) for layer in geometry.layers] if self.is_online else []
        self._quotas: list[int] = []
        self._recall: Sequence[float] = () if self._usage is None else self._usage.recall
        self._num_tokens = 0
        self._num_moves = 0

    @classmethod
    def training(cls, geometry: Geometry) -> UsageTraining:
        return UsageTraining(geometry)

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        if self._usage is None:
            return uniform_quotas(self.geometry, kept_slots)
        return self._best(kept_slots, _expected_loads(self._usage.misses, self._usage.recall))

    def begin(self, quotas: Sequence[int]) -> None:
        self._quotas = list(quotas)

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        if not router.serves_decode:
            return None
        self._seen[router.layer].add(_decoding(router))
        if router.layer < self.geometry.num_layers - 1:
            return None
        self._num_tokens += router.batch_tokens if False not in router.is_decode else 1  # a prompt's do not count
        if self._num_tokens < self._due:
            return None
        self._due = self._num_tokens + self._tau
        return self._solve([recall(layer) for layer in range(self.geometry.num_layers)])

    def _solve(self, recall: Sequence[float]) -> list[int] | None:
        costs = _expected_loads([seen.misses() for seen in self._seen], recall)
        quotas = self._best(self.geometry.class_sums(self._quotas), costs)
        num_segments = self.geometry.segments_per_expert
        before, after = (
            float(sum(cost[quota // num_segments] for cost, quota in zip(costs, shares, strict=True)))
            for shares in (self._quotas, quotas)
        )
        if quotas == self._quotas or (self._num_moves and after >= (1 - _LEAST_GAIN) * before):
            return None
        self._recall = tuple(recall)
        self._num_moves += 1
        self._quotas = quotas
        return list(quotas)

    def _best(self, kept_slots: Sequence[int], costs: Costs) -> list[int]:
        num_segments = self.geometry.segments_per_expert
        quotas = [0] * self.geometry.num_layers
        for size_class, slots in enumerate(kept_slots):
            layers = self.geometry.layers_of_class(size_class)
            best = cheapest_quotas([costs[layer] for layer in layers], slots // num_segments)
            for layer, num_experts in zip(layers, best, strict=True):
                quotas[layer] = num_experts * num_segments
        return with_rests(self.geometry, kept_slots, quotas)

    def facts(self) -> dict[str, object]:
        """`recall`: the a_l by which quotas were chosen, None before that; `moves`: how often quotas changed."""
        learned = f"online, from {self._num_tokens} decoded tokens" if self._usage is None else self._usage.origin
        recall = [round(a, 4) for a in self._recall]
        return {"learned": learned, "recall": recall or None, "moves": self._num_moves}


@dataclass(frozen=True, slots=True)
class Usage:
    """Each layer's decode in a training part."""

    misses: tuple[npt.NDArray[np.int64], ...]  # [E + 1] of each: demands that an LRU cache of s = 0..E experts misses
    recall: tuple[float, ...]  # share of what a layer needed that the system's predictor named
    origin: str  # in words


class UsageTraining:
    """Counts the misses of LRU caches of every size, and how much the predictor names of what is needed."""

    max_rows = None

    def __init__(self, geometry: Geometry) -> None:
        self._seen = [StackDistances(layer.num_experts) for layer in geometry.layers]
        self._newest: dict[int, Sequence[int]] = {}  # experts that the newest prediction of each layer named
        self._num_needed, self._num_named = [0] * geometry.num_layers, [0] * geometry.num_layers

    def predicted(self, predictions: Iterable[Prediction]) -> None:
        self._newest |= {prediction.layer: prediction.experts for prediction in predictions}

    def observe(self, router: RouterRan) -> None:
        decoding = _decoding(router)
        self._seen[router.layer].add(decoding)
        needed = {expert for _, expert in decoding}
        self._num_needed[router.layer] += len(needed)
        self._num_named[router.layer] += len(needed.intersection(self._newest.pop(router.layer, ())))

    def found(self, origin: str) -> Usage:
        """`origin`: the training part, in words."""
        pairs = zip(self._num_named, self._num_needed, strict=True)
        recall = tuple(named / max(1, needed) for named, needed in pairs)
        return Usage(tuple(seen.misses() for seen in self._seen), recall, origin)


def _decoding(router: RouterRan) -> list[tuple[int, int]]:
    """(tokens, expert) of the experts that decode needs."""
    every = zip(router.num_tokens, router.experts, router.is_decode, strict=True)
    return [(num, expert) for num, expert, is_decode in every if num and is_decode]


def _expected_loads(misses: Sequence[npt.NDArray[np.int64]], recall: Sequence[float]) -> Costs:
    """For each layer, the expected loads by the number of experts that it keeps."""
    return [of_layer * (1 - a) for of_layer, a in zip(misses, recall, strict=True)]


class StackDistances:
    """Counts how deep demanded experts lie in least-recently-used order (Mattson). An LRU cache of s experts holds the
    s topmost, so one pass gives the misses of every size.
    """

    def __init__(self, num_experts: int) -> None:
        self._stack: list[int] = []  # the most recently used first
        self._counts = [0] * (num_experts + 1)  # requests by depth; the last entry: first requests

    def add(self, demands: Iterable[tuple[int, int]]) -> None:
        """The (tokens, expert) that one pass demands. All are looked up before any counts as used; then the busiest is
        the most recent, as in the policy `lru`.
        """
        stack, counts = self._stack, self._counts
        ranked = sorted(demands)
        for _, expert in ranked:
            counts[stack.index(expert) if expert in stack else -1] += 1
        for _, expert in ranked:
            if expert in stack:
                stack.remove(expert)
            stack.insert(0, expert)

    def misses(self) -> npt.NDArray[np.int64]:
        """[E + 1]: the demands so far that a cache of s = 0..E experts would have missed."""
        counts = np.array(self._counts, np.int64)
        beyond: npt.NDArray[np.int64] = counts.sum() - np.concatenate(([0], np.cumsum(counts[:-1])))
        return beyond


def cheapest_quotas(costs: Costs, num_experts: int) -> list[int]:
    """Experts of each layer, `num_experts` in all, with the least sum of `costs[layer][experts]`: exactly, by a dynamic
    program in O(sum of E x num_experts).

    `costs[layer]` is [E + 1], at least 0, falling or not. Among equal sums the most even (of least sum of squares)
    comes first, then the one that gives the lowest layers most.
    """
    limits = [len(cost) - 1 for cost in costs]
    if not 0 <= num_experts <= sum(limits):
        raise ConfigError(f"num_experts={num_experts}: must be from 0 to {sum(limits)}")
    keys = _keys(costs)
    below = [np.full(num_experts + 1, NEVER, np.int64)]  # of the layers from the last one up: the least by number
    below[0][0] = 0
    most = 0  # that these layers can hold
    for key in reversed(keys):
        following = below[-1]
        least = np.full(num_experts + 1, NEVER, np.int64)
        for num, price in enumerate(key.tolist()):
            end = min(num_experts, most + num) + 1
            if end > num:
                np.minimum(least[num:end], following[: end - num] + price, out=least[num:end])
        most = min(num_experts, most + len(key) - 1)
        below.append(least)
    quotas, left = [], num_experts
    for layer, key in enumerate(keys):
        costs_here, following = below[len(keys) - layer][left], below[len(keys) - layer - 1]
        nums = np.arange(min(left, limits[layer]) + 1)
        (best,) = np.nonzero(key[nums] + following[left - nums] == costs_here)
        quotas.append(int(best[-1]))
        left -= quotas[-1]
    return quotas


def _keys(costs: Costs) -> list[npt.NDArray[np.int64]]:
    """Cost and square in one integer, whose sums compare as the pairs of sums do, without rounding."""
    squares = sum((len(cost) - 1) ** 2 for cost in costs).bit_length()
    whole = int(np.ceil(sum(float(cost.max()) for cost in costs))).bit_length()
    steps = min(_STEPS, 60 - squares - whole)
    return [
        (np.rint(np.ldexp(cost.astype(np.float64), steps)).astype(np.int64) << squares) + np.arange(len(cost)) ** 2
        for cost in costs
    ]

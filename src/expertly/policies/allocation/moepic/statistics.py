"""How well a layer's experts could be cached and are predicted: H(C), P(y), PH(y, C) (MoEpic, section 3.4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.observation import Floats, Ids
from expertly.policies.eviction.lcp import CachePriority

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

DEFAULT_HALF_LIFE = 5000.0
"""Tokens: as many as go by between two configurations (tau)."""

_MAX_WEIGHT = 2.0**100


@dataclass(frozen=True, slots=True)
class LayerRates:
    """What was seen of one layer, E experts. An expert's rank is its place, from 0, by falling cache priority."""

    hits: Doubles  # [E+1] H(C), C = 0..E: share of the needed experts whose rank was below C
    accuracy: Doubles  # [E] P(y) at y - 1: share of tokens that needed the expert of the y-th highest predicted score
    predicted_hits: Doubles  # [E, E+1] PH(y, C) at y - 1: share of the tokens in which that expert's rank was below C

    @classmethod
    def alike(cls, num_experts: int) -> LayerRates:
        """Each expert is needed as often as any other, and none was predicted."""
        return cls(np.linspace(0, 1, num_experts + 1), np.zeros(num_experts), np.zeros((num_experts, num_experts + 1)))

    @property
    def num_experts(self) -> int:
        return len(self.accuracy)


class LayerStatistics:
    """Gathers the rates of one layer, online. Memory: 8 bytes * E * E.

    Ranks are those before the update that a pass makes, as a cache finds them; ties, of ranks and of predicted scores,
    go to the lowest id, and experts that were never used come last. The paper counts all tokens alike for ever; here
    (our choice) a token's weight halves with every `half_life` tokens that follow it, so that what is configured next
    fits what runs now; None counts as the paper does.

    Raises ConfigError for a `half_life` that is not above 0.
    """

    def __init__(self, num_experts: int, half_life: float | None = DEFAULT_HALF_LIFE) -> None:
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life={half_life}: must be above 0 tokens")
        self.num_experts = num_experts
        self.num_tokens = 0
        self._growth = 1.0 if half_life is None else 2.0 ** (1 / half_life)
        # Instead of all that was counted losing weight with every token, each token weighs more than the one before it.
        self._weight = 1.0
        self._priority = CachePriority()
        self._num_used = [0] * num_experts
        self._score = np.full(num_experts, math.inf)  # minus the cache priority
        self._places = np.arange(num_experts)
        self._needed = np.zeros(num_experts)  # weight of the needed experts, by their rank
        self._predicted_weight = 0.0  # of the tokens that had a prediction
        self._right = np.zeros(num_experts)  # of those that needed the y-th predicted one
        self._joint = np.zeros(num_experts * num_experts)  # [y, rank of the y-th predicted one], flat

    def note(self, needed: Sequence[int], predicted: Sequence[int] | None = None) -> None:
        """A pass of one token: the experts that it needs, all in 0..E-1 and none twice, and the predicted ones by
        falling score, where there was a prediction; those that it does not name come last.
        """
        order = None
        if predicted is not None:
            order = np.array(predicted, np.intp)
            if len(order) < self.num_experts:
                is_named = np.zeros(self.num_experts, np.bool_)
                is_named[order] = True
                order = np.concatenate([order, np.flatnonzero(~is_named)])
        self._count(self._ranks(), needed, order)
        self._end_pass([needed])

    def observe(
        self, experts: Ids, predicted: Floats | None = None, is_predicted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """The rows of one pass, each a token: [T, K] needed experts and [T, E] predicted scores.

        What is not in 0..E-1 is no expert; none is twice in a row. All rows find the ranks that the passes before left.
        Rows outside `is_predicted`, [T], and all where there are no scores, had no prediction: they count for H alone.
        """
        rows = [[expert for expert in row if 0 <= expert < self.num_experts] for row in experts.tolist()]
        ranks = self._ranks()
        for number, row in enumerate(rows):
            has_scores = predicted is not None and (is_predicted is None or is_predicted[number])
            order = (-predicted[number]).argsort(kind="stable") if predicted is not None and has_scores else None
            self._count(ranks, row, order)
        self._end_pass(rows)

    def rates(self) -> LayerRates:
        """Of what was observed; all 0 for what was not. Copies: what follows does not change them."""
        num = self.num_experts
        hits, accuracy, predicted_hits = np.zeros(num + 1), np.zeros(num), np.zeros((num, num + 1))
        np.cumsum(self._needed, out=hits[1:])
        if hits[-1]:
            hits /= hits[-1]
        if self._predicted_weight:
            np.divide(self._right, self._predicted_weight, out=accuracy)
            np.cumsum(self._joint.reshape(num, num), axis=1, out=predicted_hits[:, 1:])
            predicted_hits /= self._predicted_weight
            np.minimum(predicted_hits, 1, out=predicted_hits)  # sums round
            np.minimum(accuracy, 1, out=accuracy)
        return LayerRates(hits, accuracy, predicted_hits)

    def ranked(self) -> list[int]:
        """All experts by falling cache priority, now: the first C are those that a cache of C experts should hold."""
        ranked: list[int] = self._score.argsort(kind="stable").tolist()
        return ranked

    def _ranks(self) -> Ints:
        ranks = np.empty(self.num_experts, np.intp)
        ranks[self._score.argsort(kind="stable")] = self._places
        return ranks

    def _count(self, ranks: Ints, needed: Sequence[int], order: Ints | None) -> None:
        """A token of the running pass; `order`: all experts by falling predicted score."""
        weight = self._weight
        self._needed[ranks[needed]] += weight
        if order is not None:
            num = self.num_experts
            self._joint[self._places * num + ranks[order]] += weight
            place = np.empty(num, np.intp)
            place[order] = self._places
            self._right[place[needed]] += weight
            self._predicted_weight += weight

    def _end_pass(self, rows: Sequence[Sequence[int]]) -> None:
        self.num_tokens += len(rows)
        num_used = self._num_used
        for row in rows:
            for expert in row:
                num_used[expert] += 1
        for expert in {expert for row in rows for expert in row}:
            self._score[expert] = -self._priority(num_used[expert], self.num_tokens)
        self._weight *= self._growth ** len(rows)
        if self._weight > _MAX_WEIGHT:  # weigh everything anew, a token 1: shares stay as they are
            for counted in (self._needed, self._right, self._joint):
                counted /= self._weight
            self._predicted_weight /= self._weight
            self._weight = 1.0

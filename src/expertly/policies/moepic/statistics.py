"""How well a layer's experts could be cached and are predicted: H(C), P(y), PH(y, C) (MoEpic, section 3.4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.observation import Floats, Ids
from expertly.policies.eviction.priority import CachePriority

Doubles = npt.NDArray[np.float64]

DEFAULT_HALF_LIFE = 5000.0
"""Tokens: as many as go by between two configurations (tau)."""

_MAX_WEIGHT = 2.0**100
_NEVER = np.inf
_TOGETHER = 32  # tokens
_MAX_EXPERTS = 1 << 16  # an id and the bits of a score are sorted as one number


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
    """Gathers the rates of one layer, online.

    Ranks are those before the update that a token makes, as a cache finds them; ties, of ranks and of predicted scores,
    go to the lowest id. The paper counts all tokens alike for ever; here (our choice) a token's weight halves with
    every `half_life` tokens that follow it, so that what is configured next fits what runs now; None counts as the
    paper does. Memory: 8 bytes * E * E, and 12 * E for each of 32 tokens. Raises ConfigError for a `half_life` that is
    not above 0.
    """

    def __init__(
        self,
        num_experts: int,
        half_life: float | None = DEFAULT_HALF_LIFE,
        priority: CachePriority | None = None,
    ) -> None:
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life={half_life}: must be above 0 tokens")
        assert 0 < num_experts <= _MAX_EXPERTS
        self._priority = CachePriority() if priority is None else priority
        self._growth = 1.0 if half_life is None else 2.0 ** (1 / half_life)
        # Instead of all that was counted losing weight with every token, each token weighs more than the one before it.
        self._weight = 1.0
        self.num_tokens = 0
        self._num_used = [0] * num_experts
        self._score = np.full(num_experts, _NEVER)  # minus the priority
        self._ids = np.arange(num_experts)
        self._ranked = self._ids.copy()  # experts by rank
        self._rank = self._ids.copy()  # its inverse
        self._needed = np.zeros(num_experts)  # weight of the needed experts, by their rank
        self._predicted_weight = 0.0  # of the tokens that had a prediction
        self._right = np.zeros(num_experts)  # of those that needed the y-th predicted one
        self._joint = np.zeros(num_experts * num_experts)  # [y, rank of the y-th predicted one]
        self._row_of = self._ids * num_experts  # where y begins in `_joint`
        # What tokens showed, until they are counted together, which is cheaper: they share rows of `_joint`.
        self._rows: list[list[int]] = []  # needed experts
        self._weights: list[float] = []
        self._predicted_weights: list[float] = []  # 0: no prediction
        self._scores = np.zeros((_TOGETHER, num_experts), np.float32)
        self._ranks = np.zeros((_TOGETHER, num_experts), np.intp)

    @property
    def num_experts(self) -> int:
        return len(self._ids)

    def observe(
        self, experts: Ids, predicted: Floats | None = None, is_predicted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """The rows of one pass, each a token: [T, K] needed experts and [T, E] predicted scores, at least 0.

        What is not in 0..E-1 is no expert; none is twice in a row. All rows find the ranks that the passes before left.
        Rows outside `is_predicted`, [T], and all where there are no scores, had no prediction: they count for H alone.
        """
        rows: list[list[int]] = experts.tolist()
        for number, row in enumerate(rows):
            if min(row) < 0 or max(row) >= self.num_experts:
                rows[number] = row = [expert for expert in row if 0 <= expert < self.num_experts]
            has_scores = predicted is not None and (is_predicted is None or is_predicted[number])
            self._note(row, predicted[number] if predicted is not None and has_scores else None)
        self._use(rows)
        self._weight *= self._growth ** len(rows)
        if self._weight > _MAX_WEIGHT:
            self._lighten()

    def learn(
        self, experts: Ids, predicted: Floats | None = None, is_predicted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Tokens that came one after another: as `observe` with each of them in turn."""
        for row in range(len(experts)):
            this = slice(row, row + 1)
            has_scores = predicted is not None and (is_predicted is None or is_predicted[row])
            self.observe(experts[this], predicted[this] if predicted is not None and has_scores else None)

    def rates(self) -> LayerRates:
        """Of what was observed; all 0 for what was not. Copies: what follows does not change them."""
        self._count()
        num = self.num_experts
        hits, predicted_hits = np.zeros(num + 1), np.zeros((num, num + 1))
        accuracy = np.zeros(num)
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
        ranked: list[int] = self._ranked.tolist()
        return ranked

    def _note(self, needed: list[int], scores: Floats | None) -> None:
        """A token, which finds the ranks as they are."""
        place = len(self._rows)
        self._ranks[place] = self._rank
        self._rows.append(needed)
        self._weights.append(self._weight)
        self._predicted_weights.append(0.0 if scores is None else self._weight)
        if scores is not None:
            self._scores[place] = scores
        if place + 1 == _TOGETHER:
            self._count()

    def _count(self) -> None:
        """All that was noted."""
        num = len(self._rows)
        if not num:
            return
        ranks, weights, predicted_weights = (
            self._ranks[:num],
            np.array(self._weights),
            np.array(self._predicted_weights),
        )
        tokens = np.repeat(np.arange(num), [len(row) for row in self._rows])
        needed = np.array([expert for row in self._rows for expert in row], np.intp)
        np.add.at(self._needed, ranks[tokens, needed], weights[tokens])
        if predicted_weights.any():
            orders = by_falling_score(self._scores[:num])
            orders += np.arange(num)[:, None] * self.num_experts  # of each token its own
            ranked = ranks.take(orders)
            ranked += self._row_of
            np.add.at(self._joint, ranked.reshape(-1), np.repeat(predicted_weights, self.num_experts))
            places = np.empty_like(orders)
            places.reshape(-1)[orders] = self._ids
            np.add.at(self._right, places[tokens, needed], predicted_weights[tokens])
            self._predicted_weight += float(predicted_weights.sum())
        self._rows.clear()
        self._weights.clear()
        self._predicted_weights.clear()

    def _use(self, rows: list[list[int]]) -> None:
        """The ranks after these rows of needed experts."""
        self.num_tokens = now = self.num_tokens + len(rows)
        num_used, priority, score = self._num_used, self._priority, self._score
        for row in rows:
            for expert in row:
                num_used[expert] += 1
        for row in rows:
            for expert in row:
                score[expert] = -priority(num_used[expert], now)
        self._ranked = score.argsort(kind="stable")
        self._rank[self._ranked] = self._ids

    def _lighten(self) -> None:
        """Weigh everything anew, a token 1: shares stay as they are."""
        self._count()
        for counted in (self._needed, self._right, self._joint):
            counted /= self._weight
        self._predicted_weight /= self._weight
        self._weight = 1.0


def by_falling_score(scores: Floats) -> npt.NDArray[np.int64]:
    """Of each row [T, E] of scores at least 0 its experts, the highest score first; ties to the lowest id.

    A third of the time of a stable argsort: the bits of such a float32 order as it does, and with the id below them
    nothing is equal.
    """
    bits = np.ascontiguousarray(scores, np.float32).view(np.int32)
    keys = np.multiply(bits, -_MAX_EXPERTS, dtype=np.int64)
    keys += np.arange(scores.shape[-1])
    keys.sort(axis=-1)
    keys &= _MAX_EXPERTS - 1
    return keys

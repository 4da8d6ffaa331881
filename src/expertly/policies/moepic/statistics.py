"""How well a layer's experts could be cached and are predicted: H(C), P(y), PH(y, C) (MoEpic, section 3.4.2)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.observation import Floats, Ids
from expertly.policies.eviction.priority import CachePriority
from expertly.policies.moepic.ranks import PriorityRanks

Doubles = npt.NDArray[np.float64]

DEFAULT_HALF_LIFE = 5000.0
"""Tokens: as many as go by between two configurations (tau)."""

_MAX_WEIGHT = 2.0**100
_TOGETHER = 64  # tokens
_MAX_EXPERTS = 1 << 16  # an id and the bits of a score are sorted as one number
_MAX_BYTE = 256  # ids of so many experts are bytes

_Noted = tuple[Sequence[int], "bytes | array[int] | None", float, int]
"""A token: needed experts; all by falling score, where there was a prediction; weight; pass, from 0."""


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
    paper does. Tokens are noted, and counted 64 at a time, which is cheaper; the first time `early` tokens earlier, so
    that not all layers count beside the same token. Memory: 8 bytes * E * E.

    Raises ConfigError for a `half_life` that is not above 0.
    """

    def __init__(
        self,
        num_experts: int,
        half_life: float | None = DEFAULT_HALF_LIFE,
        priority: CachePriority | None = None,
        early: int = 0,
    ) -> None:
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life={half_life}: must be above 0 tokens")
        assert 0 < num_experts <= _MAX_EXPERTS
        self.num_experts = num_experts
        self.num_tokens = 0
        self._growth = 1.0 if half_life is None else 2.0 ** (1 / half_life)
        # Instead of all that was counted losing weight with every token, each token weighs more than the one before it.
        self._weight = 1.0
        self._ranks = PriorityRanks(num_experts, CachePriority() if priority is None else priority)
        self._needed = np.zeros(num_experts)  # weight of the needed experts, by their rank
        self._predicted_weight = 0.0  # of the tokens that had a prediction
        self._right = np.zeros(num_experts)  # of those that needed the y-th predicted one
        self._joint = np.zeros(num_experts * num_experts)  # [y, rank of the y-th predicted one]
        self._row_of = np.arange(num_experts) * num_experts  # where y begins in `_joint`
        # What tokens showed, until they are counted.
        self._until_counted = _TOGETHER - early % _TOGETHER
        self._noted: list[_Noted] = []
        self._after: list[int] = []  # of each pass: tokens when it has ended
        self._id_dtype = np.uint8 if num_experts <= _MAX_BYTE else np.uint16

    def note(self, needed: Sequence[int], predicted: Sequence[int] | None = None) -> None:
        """A pass of one token: the experts that it needs, all in 0..E-1 and none twice, and the predicted ones by
        falling score, where there was a prediction; those that it does not name come last.
        """
        if predicted is not None and len(predicted) < self.num_experts:
            is_named = np.zeros(self.num_experts, np.bool_)
            is_named[list(predicted)] = True
            predicted = [*predicted, *np.flatnonzero(~is_named).tolist()]
        order = None if predicted is None else self._packed(predicted)
        self._noted.append((needed, order, self._weight, len(self._after)))
        self._end_pass(1)

    def observe(
        self, experts: Ids, predicted: Floats | None = None, is_predicted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """The rows of one pass, each a token: [T, K] needed experts and [T, E] predicted scores, at least 0.

        What is not in 0..E-1 is no expert; none is twice in a row. All rows find the ranks that the passes before left.
        Rows outside `is_predicted`, [T], and all where there are no scores, had no prediction: they count for H alone.
        """
        orders = None if predicted is None else by_falling_score(predicted).astype(self._id_dtype)
        for number, row in enumerate(experts.tolist()):
            if min(row) < 0 or max(row) >= self.num_experts:
                row = [expert for expert in row if 0 <= expert < self.num_experts]
            has_scores = orders is not None and (is_predicted is None or is_predicted[number])
            order = orders[number].tobytes() if orders is not None and has_scores else None
            self._noted.append((row, order, self._weight, len(self._after)))
        self._end_pass(len(experts))

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
        self._count()
        return self._ranks.ranked()

    def _packed(self, experts: Sequence[int]) -> bytes | array[int]:
        return bytes(experts) if self.num_experts <= _MAX_BYTE else array("H", experts)

    def _end_pass(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._after.append(self.num_tokens)
        self._weight *= self._growth**num_tokens
        if len(self._noted) >= self._until_counted:
            self._until_counted = _TOGETHER
            self._count()
        if self._weight > _MAX_WEIGHT:
            self._lighten()

    def _count(self) -> None:
        """All that was noted."""
        if not self._noted:
            return
        num = self.num_experts
        rows, noted, token_weights, token_passes = zip(*self._noted, strict=True)
        weights, passes = np.array(token_weights), np.array(token_passes, np.intp)
        tokens = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        needed = np.array([expert for row in rows for expert in row], np.intp)
        ranks = self._ranks.follow(needed, passes[tokens], np.array(self._after, np.intp))
        np.add.at(self._needed, ranks[passes[tokens], needed], weights[tokens])
        has_order = np.array([order is not None for order in noted])
        if has_order.any():
            packed = b"".join([order for order in noted if order is not None])
            orders = np.frombuffer(packed, self._id_dtype).reshape(-1, num)
            order_weights = weights[has_order]
            ranked = ranks.take(orders + passes[has_order][:, None] * num)
            ranked += self._row_of
            np.add.at(self._joint, ranked.reshape(-1), np.repeat(order_weights, num))
            places = np.empty((len(orders), num), np.intp)
            places.reshape(-1)[orders + np.arange(len(orders))[:, None] * num] = np.arange(num)
            is_with = has_order[tokens]
            order_of = has_order.cumsum()[tokens[is_with]] - 1
            np.add.at(self._right, places[order_of, needed[is_with]], order_weights[order_of])
            self._predicted_weight += float(order_weights.sum())
        self._noted.clear()
        self._after.clear()

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

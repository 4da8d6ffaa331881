"""How well a layer's experts could be cached, and how well they are predicted: H(C), P(y), PH(y, C) (MoEpic, section
3.4.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.observation import Floats, Ids
from expertly.policies.eviction.lcp import CachePriority, LCPOptions

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

DEFAULT_HALF_LIFE = 5000.0
"""Tokens; as many as tau, the time between two configurations."""

_MAX_WEIGHT = 2.0**100
_TOGETHER = 64  # tokens

_Noted = tuple[Sequence[int], bytes | None, float, int]
"""A token: needed experts; all ids by falling score, where there was a prediction; weight; number of its pass."""


@dataclass(frozen=True, slots=True)
class LayerRates:
    """The rates of one layer, E experts. An expert's rank is its place, from 0, by falling cache priority."""

    hits: Doubles  # [E+1] H(C), C = 0..E: share of the needed experts whose rank was below C
    accuracy: Doubles  # [E] P(y) at y - 1: share of tokens that needed the expert of the y-th highest predicted score
    predicted_hits: Doubles  # [E, E+1] PH(y, C) at y - 1: share of the tokens in which that expert's rank was below C

    @classmethod
    def alike(cls, num_experts: int) -> LayerRates:
        """The rates where each expert is needed as often as any other, and none was predicted."""
        return cls(np.linspace(0, 1, num_experts + 1), np.zeros(num_experts), np.zeros((num_experts, num_experts + 1)))

    @property
    def num_experts(self) -> int:
        return len(self.accuracy)


class LayerStatistics:
    """Gathers the rates of one layer, online. Memory: 8 bytes * E * E.

    Ranks are those before a pass updates them, as a cache finds them. Ties, of ranks and of predicted scores, go to the
    lowest id; experts that were never used come last. The paper counts all tokens alike for ever. Here (our choice) a
    token's weight halves with every `half_life` tokens that follow it, so that a configuration fits what runs now; None
    counts as the paper does. Tokens are counted 64 at a time, which is cheaper; the first time `early` tokens earlier,
    so that not all layers count at the same token.

    Raises ConfigError for a `half_life` that is not above 0.
    """

    def __init__(
        self,
        num_experts: int,
        half_life: float | None = DEFAULT_HALF_LIFE,
        early: int = 0,
        priority: LCPOptions | None = None,
    ) -> None:
        """`priority`: options of the caches' priority, which ranks experts; None: the defaults."""
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life={half_life}: must be above 0 tokens")
        self.num_experts = num_experts
        self.num_tokens = 0
        self._growth = 1.0 if half_life is None else 2.0 ** (1 / half_life)
        # Instead of all that was counted losing weight with every token, each token weighs more than the one before it.
        self._weight = 1.0
        self._priority = CachePriority(priority or LCPOptions())
        self._num_used = [0] * num_experts
        self._needed = np.zeros(num_experts)  # weight of the needed experts, by their rank
        self._predicted_weight = 0.0  # of the tokens that had a prediction
        self._right = np.zeros(num_experts)  # of those that needed the y-th predicted one
        self._joint = np.zeros(num_experts * num_experts)  # [y, rank of the y-th predicted one], flat
        # What tokens showed, until they are counted.
        self._until_counted = _TOGETHER - early % _TOGETHER
        self._noted: list[_Noted] = []
        self._id_dtype = np.uint8 if num_experts <= 256 else np.uint16  # in which predictions are noted
        self._ids = list(range(num_experts))  # of all experts, then of those that each pass used
        self._scores = [math.inf] * num_experts  # minus the cache priority: of all at first, then of those after it
        self._starts: list[int] = []  # of each pass: where its own begin in both

    def note(self, needed: Sequence[int], predicted: Sequence[int] | None = None) -> None:
        """A pass of one token: the experts that it needs, all in 0..E-1 and none twice, and the predicted ones by
        falling score, where there was a prediction; experts that it does not name come last.
        """
        if predicted is not None and len(predicted) < self.num_experts:
            is_named = np.zeros(self.num_experts, np.bool_)
            is_named[list(predicted)] = True
            predicted = [*predicted, *np.flatnonzero(~is_named).tolist()]
        order = None if predicted is None else np.array(predicted, self._id_dtype).tobytes()
        self._noted.append((needed, order, self._weight, len(self._starts)))
        self._end_pass(1)

    def observe(
        self, experts: Ids, predicted: Floats | None = None, is_predicted: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """The rows of one pass, each a token: [T, K] needed experts and [T, E] predicted scores.

        Ids outside 0..E-1 are no experts; none is twice in a row. All rows see the ranks that the passes before left.
        Rows outside `is_predicted`, [T], and all rows without scores, had no prediction: they count for H alone.
        """
        orders = None if predicted is None else (-predicted).argsort(axis=1, kind="stable").astype(self._id_dtype)
        for number, row in enumerate(experts.tolist()):
            needed = [expert for expert in row if 0 <= expert < self.num_experts]
            order = None
            if orders is not None and (is_predicted is None or is_predicted[number]):
                order = orders[number].tobytes()
            self._noted.append((needed, order, self._weight, len(self._starts)))
        self._end_pass(len(experts))

    def rates(self) -> LayerRates:
        """The rates observed so far, 0 where nothing was observed; copies."""
        self._count()
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

    def _end_pass(self, num_tokens: int) -> None:
        self._starts.append(len(self._ids))
        self.num_tokens += num_tokens
        num_used = self._num_used
        used = [expert for needed, *_ in self._noted[len(self._noted) - num_tokens :] for expert in needed]
        for expert in used:
            num_used[expert] += 1
        used = list(dict.fromkeys(used))
        self._ids += used
        self._scores += [-self._priority(num_used[expert], self.num_tokens) for expert in used]
        self._weight *= self._growth**num_tokens
        if len(self._noted) >= self._until_counted:
            self._until_counted = _TOGETHER
            self._count()
        if self._weight > _MAX_WEIGHT:  # weigh everything anew, a token 1: shares stay as they are
            self._count()
            for counted in (self._needed, self._right, self._joint):
                counted /= self._weight
            self._predicted_weight /= self._weight
            self._weight = 1.0

    def _count(self) -> None:
        if not self._noted:
            return
        num = self.num_experts
        rows, orders, token_weights, token_passes = zip(*self._noted, strict=True)
        weights, passes = np.array(token_weights), np.array(token_passes, np.intp)
        ranks = self._take_ranks()
        token = np.repeat(np.arange(len(rows)), [len(row) for row in rows])  # of each needed expert
        needed = np.array([expert for row in rows for expert in row], np.intp)
        np.add.at(self._needed, ranks[passes[token], needed], weights[token])
        has_order = np.array([order is not None for order in orders])
        if has_order.any():
            packed = b"".join([order for order in orders if order is not None])
            predicted = np.frombuffer(packed, self._id_dtype).reshape(-1, num)  # [tokens with one, E]
            order_weights = weights[has_order]
            ranked = ranks.take(predicted + passes[has_order][:, None] * num)
            np.add.at(self._joint, (ranked + np.arange(num) * num).reshape(-1), np.repeat(order_weights, num))
            is_with = has_order[token]
            of_token = has_order.cumsum()[token[is_with]] - 1
            np.add.at(self._right, _places(predicted)[of_token, needed[is_with]], order_weights[of_token])
            self._predicted_weight += float(order_weights.sum())
        self._noted.clear()

    def _take_ranks(self) -> Ints:
        """[passes, E]: the ranks that each pass finds. Afterwards only those that the last pass left are known.

        All scores are sorted once; their places are small whole numbers, which sort faster than the scores.
        """
        ids, scores = np.array(self._ids), np.array(self._scores)
        order = np.lexsort((ids, scores))
        place = _places(order[None])[0].astype(np.min_scalar_type(len(ids)))
        found = np.empty((len(self._starts), self.num_experts), place.dtype)
        now = place[: self.num_experts].copy()
        for number, (start, end) in enumerate(pairwise([*self._starts, len(ids)])):
            found[number] = now
            now[ids[start:end]] = place[start:end]
        self._ids, self._scores = self._ids[: self.num_experts], scores[order[now]].tolist()
        self._starts.clear()
        return _places(found.argsort(axis=1, kind="stable"))


def _places(orders: npt.NDArray[Any]) -> Ints:
    """For each row of ids, [N, E]: the place of each id in it."""
    places = np.empty(orders.shape, np.intp)
    np.put_along_axis(places, orders.astype(np.intp), np.arange(orders.shape[1])[None, :], axis=1)
    return places

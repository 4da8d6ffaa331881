"""One layer of a ReuseModel: its weights, and what they have yet to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

DISCOUNT = 0.9
"""Of a use a step later."""
HORIZON = 8
"""Steps after which it is known what a value should have been; what comes later is taken to go on like them."""
FADING = np.exp(-1 / 2)
"""What is left of a token's share of the inputs a token later."""
RATE = 0.03
"""Of learning: the share of its error by which a value changes where the same inputs come again."""
BATCH = 4
"""Steps that are learned from at once: one product of matrices costs less than four of vectors."""
MEAN_RATE = 1e-3
"""By which means of inputs follow, a token; faster while few have been seen."""
OWN_WEIGHT = 1.0
"""At the start: of an expert's own recent use. All else begins at 0."""
MOST_PRODUCTS = 1 << 17
"""Multiplications in one product of matrices. BLAS shares out larger ones among threads, which costs more than it saves
here, and could round otherwise with another number of them.
"""

_SUM_OF_DISCOUNTS = 1 / (1 - DISCOUNT)
_LEAST_NORM = 1e-3


def fade(num_tokens: int) -> float:
    """What is left of the inputs after so many tokens."""
    return float(FADING**num_tokens)


def _targets() -> Floats:
    """[BATCH, BATCH + HORIZON]: what was used -> the discounted uses after each of the first BATCH steps."""
    ahead = np.arange(BATCH + HORIZON) - np.arange(BATCH)[:, None]
    weights = np.where((ahead >= 1) & (ahead <= HORIZON), DISCOUNT ** (ahead - 1.0), 0.0)
    return (weights / (1 - DISCOUNT**HORIZON)).astype(np.float32)


class LayerReuse:
    """`own` and `seen` are the dense ids of its E experts and of the S that it looks at, among which they are; `recent`
    and `mean` the inputs of all experts, which the model moves, and what they are on average, which layers do.
    """

    def __init__(self, own: slice, seen: slice, recent: Floats, mean: Floats) -> None:
        num, num_seen = own.stop - own.start, seen.stop - seen.start
        self._own = slice(own.start - seen.start, own.stop - seen.start)  # among what it looks at
        self._recent, self._own_recent = recent[seen], recent[own]
        self._mean, self._own_mean = mean[seen], mean[own]
        self._weights: Floats = np.zeros((num, num_seen), np.float32)
        experts = np.arange(num)
        self._weights[experts, self._own.start + experts] = OWN_WEIGHT
        self._base: Floats = np.zeros(num, np.float32)  # the value where inputs are what they are on average
        num_kept = BATCH + HORIZON
        self._inputs: Floats = np.zeros((num_kept, num_seen), np.float32)  # of the steps yet to be learned from
        self._values: Floats = np.zeros((num_kept, num), np.float32)
        self._used: Floats = np.zeros((num_kept, num), np.float32)
        self._num_kept = 0
        self._num_tokens = 0  # seen so far
        self._targets = _targets()
        self._num_together = max(1, MOST_PRODUCTS // (BATCH * num_seen))  # experts in one product
        self._change: Floats = np.empty((min(num, self._num_together), num_seen), np.float32)
        # numpy takes as long to make a view as to add two of these rows
        self._rows: list[tuple[Floats, Floats, Floats]] = [*zip(self._inputs, self._values, self._used, strict=True)]

    def step(self, used: Sequence[int], num_tokens: int, *, is_decode: bool) -> Floats:
        """The layer is about to use these experts, by their numbers in it. The value of each expert, [E], until the
        next step. Moves the mean of the layer's inputs.
        """
        if self._num_kept == BATCH + HORIZON:
            self._learn()
        if not is_decode:  # what a prompt needs says nothing of the steps after it, which begin anew
            self._num_kept = 0
            self._follow(self._own_recent, num_tokens)
            self._rebase()
        inputs, values, uses = self._rows[self._num_kept]
        inputs[:] = self._recent
        np.add(self._products(inputs), self._base, out=values)
        uses.fill(0)
        for expert in used:
            uses[expert] = 1
        self._num_kept += 1
        self._num_tokens += num_tokens
        return values

    def same_as(self, other: LayerReuse) -> None:
        """Take over what `other`, of a layer like this, has learned and is to learn from."""
        for name in ("_weights", "_base", "_inputs", "_values", "_used"):
            getattr(self, name)[:] = getattr(other, name)
        self._num_kept, self._num_tokens = other._num_kept, other._num_tokens

    @property
    def weights(self) -> Floats:
        """What it has learned, [E, S]. Not to be written."""
        return self._weights

    @property
    def num_tokens(self) -> int:
        """That it has seen."""
        return self._num_tokens

    def restore(self, weights: Floats, num_tokens: int) -> None:
        """Go on with what another process had learned from so many tokens; the mean of its inputs is what it was
        then.
        """
        self._weights[:] = weights
        self._num_tokens = num_tokens
        self._num_kept = 0
        self._rebase()

    def _learn(self) -> None:
        """From the oldest steps, which go."""
        inputs = self._inputs[:BATCH] - self._mean
        errors = np.matmul(self._targets, self._used) - self._values[:BATCH]
        errors *= (RATE / (_LEAST_NORM + np.einsum("bs,bs->b", inputs, inputs)))[:, None]
        together = self._num_together
        for start in range(0, len(self._weights), together):
            weights = self._weights[start : start + together]
            change = self._change[: len(weights)]
            weights += np.matmul(errors[:, start : start + together].T, inputs, out=change)
        self._follow(np.add.reduce(self._inputs[:BATCH, self._own]) / BATCH, BATCH)
        self._rebase()
        for array in (self._inputs, self._values, self._used):
            array[:HORIZON] = array[BATCH:]
        self._num_kept = HORIZON

    def _follow(self, recent: Floats, num_tokens: int) -> None:
        rate = max(1 - (1 - MEAN_RATE) ** num_tokens, num_tokens / max(num_tokens, self._num_tokens))
        self._own_mean += (recent - self._own_mean) * np.float32(rate)

    def _rebase(self) -> None:
        np.subtract(self._own_mean * np.float32(_SUM_OF_DISCOUNTS), self._products(self._mean), out=self._base)

    def _products(self, inputs: Floats) -> Floats:
        """Of each expert's weights with the inputs, [E]: a product of vectors each, which is no work for threads."""
        products: Floats = np.matmul(self._weights[:, None, :], inputs[:, None])
        return products[:, 0, 0]

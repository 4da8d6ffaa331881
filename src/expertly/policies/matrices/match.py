"""The matrices nearest to a running iteration, brought forward a layer at a time (MoE-Infinity, section 4.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from expertly.core.observation import Floats
from expertly.policies.maps.numbers import TIE
from expertly.policies.matrices.collection import Collection


class Nearest(NamedTuple):
    """The m matrices of highest cosine."""

    slots: tuple[int, ...]  # rising
    cosine: float  # of the nearest, above 0 up to 1


class Match:
    """The cosines of one request's iteration to every matrix of a collection, over the layers that it has run.

    A layer costs one pass over the matrices for each expert that the request chose there (K in decode, E at most),
    whatever its number. Holds for the collection as it was when it was made.
    """

    def __init__(self, collection: Collection) -> None:
        n = collection.num_matrices
        self.collection = collection
        self.num_read = 0
        """Numbers of the collection that the last layer took."""
        self._generation = collection.generation
        self._dots: Floats = np.zeros(n, np.float32)
        self._scratch: Floats = np.empty(n, np.float32)
        self._square = 0  # squared length of what has been seen
        self._last = -1
        self._has_gap = False  # a layer was left out
        self._seen: list[int] = []

    def observe(self, layer: int, counts: Mapping[int, int]) -> None:
        """A layer's experts and how many of the request's tokens each serves. Layers come in order."""
        assert self._generation == self.collection.generation
        n, dots, scratch = len(self._dots), self._dots, self._scratch
        columns = self.collection.columns[layer]
        if 3 * len(counts) <= len(columns) or len(counts) <= 8:  # one product reads all rows, but each of them faster
            for expert, count in counts.items():
                if count == 1:
                    np.add(dots, columns[expert, :n], out=dots)
                else:
                    np.multiply(columns[expert, :n], np.float32(count), out=scratch)
                    np.add(dots, scratch, out=dots)
            self.num_read = n * len(counts)
        else:
            row = np.zeros(len(columns), np.float32)
            row[list(counts)] = list(counts.values())
            np.dot(row, columns[:, :n], out=scratch)
            np.add(dots, scratch, out=dots)
            self.num_read = n * len(columns)
        self._square += sum(count * count for count in counts.values())
        self._has_gap |= layer != self._last + 1
        self._last = layer
        self._seen.append(layer)

    def nearest(self, num: int) -> Nearest | None:
        """The `num` nearest, fewer where fewer have anything in common; of equal ones, but for rounding, the newest.
        None where there are none.
        """
        if not self._square or not len(self._dots):
            return None
        length = self._square**0.5
        scores = self._scratch
        np.multiply(self._dots, self._inverse_norms(), out=scores)  # cosines times `length`
        best = float(scores[scores.argmax()])
        if best <= 0:
            return None
        tie = TIE * length
        num = min(num, len(scores))
        least = best if num == 1 else float(np.partition(scores, len(scores) - num)[len(scores) - num])
        slots = (scores >= max(least - tie, tie)).nonzero()[0]
        if len(slots) > num:
            is_sure = scores[slots] > least + tie
            equal = slots[~is_sure]
            equal = equal[np.argsort(-self.collection.born[equal], kind="stable")]
            slots = np.sort(np.concatenate([slots[is_sure], equal[: num - int(is_sure.sum())]]))
        return Nearest(tuple(slots.tolist()), min(best / length, 1.0))

    def _inverse_norms(self) -> Floats:
        """[n] over the layers seen."""
        collection, n = self.collection, len(self._dots)
        if not self._has_gap:
            return collection.inverse_norms[self._last, :n]
        lengths = np.sqrt(collection.squares[self._seen, :n].sum(axis=0))
        lengths[lengths == 0] = np.inf
        inverse: Floats = (1 / lengths).astype(np.float32)
        return inverse

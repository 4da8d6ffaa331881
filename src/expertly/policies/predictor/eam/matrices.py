"""Activation matrices: how many tokens of a past request each expert served, for a few requests that are unlike each
other; and the match of a running iteration with them (MoE-Infinity, sections 4.3 and 4.5, appendix B.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError, StoreError
from expertly.core.observation import Floats
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.redundancy import TIE
from expertly.policies.predictor.fmoe.store import MAX_NBYTES

DEFAULT_CAPACITY = 120
MAX_CAPACITY = 1 << 20
MAX_COUNT = 1 << 24
"""Tokens of an expert from which on float32 does not count; more are taken for so many."""

Counts = npt.NDArray[np.int64]


def check_capacity(capacity: int) -> None:
    """Raise ConfigError where no collection can be of that capacity."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ConfigError(f"capacity={capacity}: must be from 1 to {MAX_CAPACITY} matrices")


class Collection:
    """Matrices of up to `capacity` requests, of one phase. Slots below `num_matrices` are filled; arrays are not to be
    written to. Raises ConfigError where it would not fit into memory.
    """

    def __init__(self, shape: ModelShape, capacity: int = DEFAULT_CAPACITY) -> None:
        check_capacity(capacity)
        num_layers, num_experts = shape.num_layers, shape.max_experts
        nbytes = 8 * capacity * num_layers * num_experts
        if nbytes > MAX_NBYTES:
            raise ConfigError(f"capacity={capacity}: matrices of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
        self.shape = shape
        self.capacity = capacity
        self.num_matrices = 0
        self.generation = 0
        """Counts changes."""
        # Twice, since a search runs along an expert and a prediction along a matrix. Zeroed pages take no memory
        # before they are written to.
        self.matrices: Floats = np.zeros((capacity, num_layers, num_experts), np.float32)
        """[C, L, E]: tokens of the request that each expert served."""
        self.columns: Floats = np.zeros((num_layers, num_experts, capacity), np.float32)
        """[L, E, C]: the same."""
        self.squares = np.zeros((num_layers, capacity))
        """[L, C]: squared length of a matrix' row."""
        self.inverse_norms: Floats = np.zeros((num_layers, capacity), np.float32)
        """[L, C]: 1 / length of a matrix' rows up to this one; 0 where all are zero."""
        self.born: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        """[C]: counts insertions, so the highest is the newest."""
        self.total: Counts = np.zeros((num_layers, num_experts), np.int64)
        """[L, E]: the sum of all matrices."""
        self._num_added = 0

    def add(self, counts: npt.NDArray[Any]) -> None:
        """Add a request's matrix [L, E]; one without any token is left out.

        While there is room it takes a free slot, then that of the nearest to it (appendix B.1), the oldest of equals.
        """
        assert counts.shape == self.total.shape
        matrix = np.minimum(counts, MAX_COUNT).astype(np.float32)
        if not matrix.any():
            return
        if self.num_matrices < self.capacity:
            slot = self.num_matrices
            self.num_matrices += 1
        else:
            slot = self._nearest(matrix)
            self.total -= self.matrices[slot].astype(np.int64)
        self._write(slot, matrix, self._num_added)
        self._num_added += 1
        self.generation += 1

    def extend(self, other: Collection) -> None:
        """Add all matrices of another one, the oldest first: to merge, or to make one smaller."""
        for slot in np.argsort(other.born[: other.num_matrices], kind="stable").tolist():
            self.add(other.matrices[slot])

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The filled part: matrices [n, L, E] and born [n]."""
        n = self.num_matrices
        return {"matrices": self.matrices[:n], "born": self.born[:n]}

    @classmethod
    def from_state(
        cls, shape: ModelShape, arrays: Mapping[str, npt.NDArray[Any]], capacity: int = DEFAULT_CAPACITY
    ) -> Collection:
        """The inverse of `state`. Raises StoreError where arrays do not fit the shape, each other or the capacity."""
        collection = cls(shape, capacity)
        matrices, born = arrays["matrices"], arrays["born"]
        n = len(born)
        if n > capacity:
            raise StoreError(f"collection: {n} matrices: more than the capacity of {capacity}")
        if matrices.shape != (n, shape.num_layers, shape.max_experts):
            wanted = (n, shape.num_layers, shape.max_experts)
            raise StoreError(f"collection: array 'matrices' has shape {matrices.shape}, must be {wanted}")
        for slot in range(n):
            collection._write(slot, matrices[slot], int(born[slot]))
        collection.num_matrices = n
        collection._num_added = int(born.max()) + 1 if n else 0
        return collection

    def _write(self, slot: int, matrix: npt.NDArray[Any], born: int) -> None:
        self.matrices[slot] = matrix
        self.columns[:, :, slot] = matrix
        squares = np.square(matrix, dtype=np.float64).sum(axis=1)
        self.squares[:, slot] = squares
        lengths = np.sqrt(np.cumsum(squares))
        lengths[lengths == 0] = np.inf
        self.inverse_norms[:, slot] = 1 / lengths
        self.born[slot] = born
        self.total += matrix.astype(np.int64)

    def _nearest(self, matrix: Floats) -> int:
        """The slot of the least cosine distance, all of them being filled."""
        cosines = matrix.reshape(-1) @ self.columns.reshape(-1, self.capacity)
        cosines *= self.inverse_norms[-1]
        tie = TIE * float(np.sqrt(np.square(matrix, dtype=np.float64).sum()))
        best = np.flatnonzero(cosines >= cosines.max() - tie)
        return int(best[self.born[best].argmin()])


class Matrices:
    """What is kept of a model's requests: a collection of their prompts and one of their decoding, which are traced
    apart (section 4.3).
    """

    def __init__(self, shape: ModelShape, capacity: int = DEFAULT_CAPACITY) -> None:
        self.prefill = Collection(shape, capacity)
        self.decode = Collection(shape, capacity)

    @classmethod
    def of(cls, prefill: Collection, decode: Collection) -> Matrices:
        """Of two collections of one shape and capacity."""
        assert (prefill.shape, prefill.capacity) == (decode.shape, decode.capacity)
        made = cls.__new__(cls)
        made.prefill, made.decode = prefill, decode
        return made

    @property
    def shape(self) -> ModelShape:
        return self.prefill.shape

    @property
    def capacity(self) -> int:
        """Of each collection."""
        return self.prefill.capacity

    @property
    def generation(self) -> int:
        """Counts changes."""
        return self.prefill.generation + self.decode.generation

    @property
    def num_matrices(self) -> int:
        return self.prefill.num_matrices + self.decode.num_matrices

    @property
    def most_of_a_phase(self) -> int:
        """The least capacity that would hold them all."""
        return max(self.prefill.num_matrices, self.decode.num_matrices)

    def extend(self, other: Matrices) -> None:
        """See Collection."""
        self.prefill.extend(other.prefill)
        self.decode.extend(other.decode)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Of n and m matrices: prefill [n, L, E] and prefill_born [n], decode [m, L, E] and decode_born [m]."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for phase, collection in (("prefill", self.prefill), ("decode", self.decode)):
            state = collection.state()
            arrays |= {phase: state["matrices"], f"{phase}_born": state["born"]}
        return arrays

    def of_phase(self, is_prefill: bool) -> Collection:
        return self.prefill if is_prefill else self.decode


class NearestMatrices(NamedTuple):
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

    def nearest(self, num: int) -> NearestMatrices | None:
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
        return NearestMatrices(tuple(slots.tolist()), min(best / length, 1.0))

    def _inverse_norms(self) -> Floats:
        """[n] over the layers seen."""
        collection, n = self.collection, len(self._dots)
        if not self._has_gap:
            return collection.inverse_norms[self._last, :n]
        lengths = np.sqrt(collection.squares[self._seen, :n].sum(axis=0))
        lengths[lengths == 0] = np.inf
        inverse: Floats = (1 / lengths).astype(np.float32)
        return inverse

"""Activation matrices: how many tokens of a past request each expert served, kept for a few requests that differ from
each other; and the match of a running iteration with them (MoE-Infinity, sections 4.3 and 4.5, appendix B.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.observation import Floats
from expertly.policies.learned import (
    MAX_CAPACITY,
    MAX_NBYTES,
    Arrays,
    Header,
    LearnedStore,
    ModelShape,
    check_born,
    check_numbers,
)
from expertly.policies.predictor.similarity import TIE, LayersSeen, inverse_root

DEFAULT_CAPACITY = 120
MAX_COUNT = 1 << 24
"""Tokens beyond which float32 cannot count; more count as so many."""

_PHASES = ("prefill", "decode")

Counts = npt.NDArray[np.int64]


class Collection:
    """Matrices of up to `capacity` requests, of one phase. Slots below `num_matrices` are filled; callers must not
    write the arrays. Raises ConfigError where it would not fit into memory.
    """

    def __init__(self, shape: ModelShape, capacity: int = DEFAULT_CAPACITY) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"capacity={capacity}: must be from 1 to {MAX_CAPACITY} matrices")
        num_layers, num_experts = shape.num_layers, shape.max_experts
        nbytes = 8 * capacity * num_layers * num_experts
        if nbytes > MAX_NBYTES:
            raise ConfigError(f"capacity={capacity}: matrices of {nbytes} bytes; at most {MAX_NBYTES} are accepted")
        self.shape = shape
        self.capacity = capacity
        self.num_matrices = 0
        self.generation = 0  # counts changes
        # Kept twice: a search reads along an expert, a prediction along a matrix. Zeroed pages take no memory before
        # they are written to.
        self.matrices: Floats = np.zeros((capacity, num_layers, num_experts), np.float32)  # [C, L, E] tokens served
        self.columns: Floats = np.zeros((num_layers, num_experts, capacity), np.float32)  # [L, E, C] the same
        self.squares = np.zeros((num_layers, capacity))  # [L, C] squared length of a matrix' row
        # [L, C] 1 / length of a matrix' rows up to this one; 0 where all are zero
        self.inverse_norms: Floats = np.zeros((num_layers, capacity), np.float32)
        self.born: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)  # [C] counts insertions: the newest is highest
        self.total: Counts = np.zeros((num_layers, num_experts), np.int64)  # [L, E] the sum of all matrices
        self._num_added = 0

    def add(self, counts: npt.NDArray[Any]) -> None:
        """Add a request's matrix [L, E]; one without any token is left out.

        It takes a free slot or, when none is left, that of the matrix nearest to it (appendix B.1), the oldest of
        equals.
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
        """Add all matrices of another collection, the oldest first: to merge, or to make a smaller one."""
        for slot in np.argsort(other.born[: other.num_matrices], kind="stable").tolist():
            self.add(other.matrices[slot])

    def fill(self, matrices: npt.NDArray[Any], born: npt.NDArray[np.int64]) -> None:
        """Take these matrices [n, L, E], and born [n], as they are; the collection is empty."""
        assert not self.num_matrices
        if len(born) > self.capacity:
            raise ConfigError(f"capacity={self.capacity}: must be at least {len(born)}, the matrices that there are")
        for slot, (matrix, number) in enumerate(zip(matrices, born.tolist(), strict=True)):
            self._write(slot, matrix, number)
        self.num_matrices = len(born)
        self._num_added = int(born.max(initial=-1)) + 1

    def absorb(self, other: Collection, known: Container[bytes], most: int) -> int:
        most = max(most, self.capacity - self.num_matrices)
        digests, order = other.digests(), np.argsort(other.born[: other.num_matrices], kind="stable")
        slots = [slot for slot in order.tolist() if digests[slot] not in known][-most:]
        for slot in slots:
            self.add(other.matrices[slot])
        return len(slots)

    def digests(self) -> list[bytes]:
        """A digest of each matrix; equal ones have equal digests."""
        return [
            hashlib.blake2b(self.matrices[slot].tobytes(), digest_size=16).digest() for slot in range(self.num_matrices)
        ]

    def _write(self, slot: int, matrix: npt.NDArray[Any], born: int) -> None:
        self.matrices[slot] = matrix
        self.columns[:, :, slot] = matrix
        squares = np.square(matrix, dtype=np.float64).sum(axis=1)
        self.squares[:, slot] = squares
        self.inverse_norms[:, slot] = inverse_root(np.cumsum(squares))
        self.born[slot] = born
        self.total += matrix.astype(np.int64)

    def _nearest(self, matrix: Floats) -> int:
        """The slot of the least cosine distance; all slots are filled."""
        cosines = matrix.reshape(-1) @ self.columns.reshape(-1, self.capacity)
        cosines *= self.inverse_norms[-1]
        tie = TIE * float(np.sqrt(np.square(matrix, dtype=np.float64).sum()))
        best = np.flatnonzero(cosines >= cosines.max() - tie)
        return int(best[self.born[best].argmin()])


class Matrices(LearnedStore):
    """The matrices of a model's requests: a collection of their prompts and one of their decoding, which are traced
    separately (section 4.3).
    """

    kind = "matrices"
    holds = "activation matrices, by which moe-infinity predicts"
    unit = "activation matrices"
    made_by = "lab learned build"
    schema = {  # noqa: RUF012 - of P and D matrices, tokens that each expert served
        "prefill_born": ("I64", "P"),
        "prefill": ("I32", "PLE"),
        "decode_born": ("I64", "D"),
        "decode": ("I32", "DLE"),
    }

    def __init__(self, shape: ModelShape, capacity: int = DEFAULT_CAPACITY) -> None:
        """`capacity`: of each collection."""
        self.shape = shape
        self.capacity = capacity
        self.prefill, self.decode = Collection(shape, capacity), Collection(shape, capacity)

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self.prefill.generation + self.decode.generation

    @property
    def num_learned(self) -> int:
        return self.prefill.num_matrices + self.decode.num_matrices

    @property
    def num_needed(self) -> int:
        return max(self.prefill.num_matrices, self.decode.num_matrices)

    def extend(self, other: Matrices) -> None:
        """Add all matrices of another one, the oldest first."""
        self.prefill.extend(other.prefill)
        self.decode.extend(other.decode)

    def of_phase(self, is_prefill: bool) -> Collection:
        return self.prefill if is_prefill else self.decode

    # -- as a file keeps it ------------------------------------------------------------------------------------

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The filled parts, for n and m matrices: prefill [n, L, E] and prefill_born [n], decode [m, L, E] and
        decode_born [m].
        """
        arrays: dict[str, npt.NDArray[Any]] = {}
        for phase, one in zip(_PHASES, (self.prefill, self.decode), strict=True):
            arrays |= {phase: one.matrices[: one.num_matrices], f"{phase}_born": one.born[: one.num_matrices]}
        return arrays

    def settings(self) -> dict[str, str]:
        return {"capacity": str(self.capacity)}

    @classmethod
    def check(cls, path: Path, shape: ModelShape, arrays: Arrays) -> None:
        is_expert, axes = (
            np.arange(shape.max_experts) < np.array(shape.num_experts)[:, None],
            ("matrix", "layer", "expert"),
        )
        for phase in _PHASES:
            one = arrays[phase]
            is_count = (one >= 0) & (one <= MAX_COUNT)
            check_numbers(path, phase, one, is_count, axes, f"a count of tokens, from 0 to {MAX_COUNT}")
            check_numbers(path, phase, one, is_expert | (one == 0), axes, "0: the layer has fewer experts")
            totals = one.sum(axis=(1, 2))
            check_numbers(path, phase, totals, totals > 0, axes, "above 0, the tokens that a matrix counts")
            check_born(path, f"{phase}_born", arrays[f"{phase}_born"])

    @classmethod
    def restored(cls, header: Header, arrays: Arrays) -> Matrices:
        made = cls(header.shape, header.number("capacity", int))
        for phase in _PHASES:
            made.of_phase(phase == "prefill").fill(arrays[phase], arrays[f"{phase}_born"])
        return made

    def digests(self) -> set[bytes]:
        return {digest for phase in (self.prefill, self.decode) for digest in phase.digests()}

    def absorb(self, other: Matrices, known: Container[bytes], most: int) -> int:
        return self.prefill.absorb(other.prefill, known, most) + self.decode.absorb(other.decode, known, most)

    @classmethod
    def merged(cls, stores: Sequence[Matrices], capacity: int) -> Matrices:
        """In a full collection each new matrix replaces the one nearest to it."""
        out = cls(stores[0].shape, capacity)
        for store in stores:
            if store.shape != out.shape:
                raise ConfigError("matrices of other layers, experts or top-k: not of one model")
            out.extend(store)
        return out


class NearestMatrices(NamedTuple):
    """The m matrices of highest cosine."""

    slots: tuple[int, ...]  # rising
    cosine: float  # of the nearest, above 0 up to 1


class Match:
    """The cosines of one request's iteration to every matrix of a collection, over the layers that it has run.

    A layer costs one pass over the matrices for each expert that the request chose in it (K in decode, at most E).
    Valid for the collection as it was when the match was made.
    """

    def __init__(self, collection: Collection) -> None:
        n = collection.num_matrices
        self.collection = collection
        self.num_read = 0
        """Numbers of the collection that the last layer read."""
        self._generation = collection.generation
        self._dots: Floats = np.zeros(n, np.float32)
        self._scratch: Floats = np.empty(n, np.float32)
        self._square = 0  # squared length of what has been seen
        self._seen = LayersSeen()

    def observe(self, layer: int, counts: Mapping[int, int]) -> None:
        """A layer's chosen experts, and how many of the request's tokens each serves. Layers come in order."""
        assert self._generation == self.collection.generation
        n, dots, scratch = len(self._dots), self._dots, self._scratch
        columns = self.collection.columns[layer]
        if 3 * len(counts) <= len(columns) or len(counts) <= 8:  # otherwise one product of all rows is faster
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
        self._seen.add(layer)

    def nearest(self, num: int) -> NearestMatrices | None:
        """The `num` nearest matrices, fewer where fewer have anything in common; of equal ones, up to rounding, the
        newest. None where there are none.
        """
        if not self._square or not len(self._dots):
            return None
        length = self._square**0.5
        scores, collection = self._scratch, self.collection
        inverse_norms = self._seen.inverse_norms(collection.inverse_norms, collection.squares, len(scores))
        np.multiply(self._dots, inverse_norms, out=scores)  # cosines times `length`
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
            equal = equal[np.argsort(-collection.born[equal], kind="stable")]
            slots = np.sort(np.concatenate([slots[is_sure], equal[: num - int(is_sure.sum())]]))
        return NearestMatrices(tuple(slots.tolist()), min(best / length, 1.0))

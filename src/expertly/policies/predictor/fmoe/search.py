"""Finds the stored maps most similar to an iteration: by its embedding before it runs, by its layers while it runs
(fMoE, section 4.2).
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.core.observation import Floats
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.predictor.similarity import TIE, LayersSeen, inverse_root


class NearestMaps(NamedTuple):
    """The most similar stored map of each row; lists where there is one row."""

    slots: npt.NDArray[np.intp] | list[int]  # [T]
    scores: Floats | list[float]  # [T] cosines, -1 to 1


class Search:
    """The similarity of one iteration to every map of a store, [T, n], updated a layer at a time: a layer costs O(T * n
    * E), whichever it is.

    Valid for the store as it was at `begin`: afterwards `is_current` is false, and nothing else may be called.
    """

    def __init__(self, store: MapStore) -> None:
        self.store = store
        self._generation = -1
        self.num_maps = 0  # stored maps that are searched
        self._num_rows = 0
        self._row = np.empty((2, store.capacity), np.float32)  # the buffers of one row, made once
        self._rows = np.empty((2, 0, 0), np.float32)  # of several

    def begin(self, num_rows: int) -> None:
        store = self.store
        self._generation, self.num_maps, self._num_rows = store.generation, store.num_maps, num_rows
        n = store.num_maps
        if num_rows != 1 and self._rows.shape[1:] != (num_rows, n):
            self._rows = np.empty((2, num_rows, n), np.float32)
        self._dots, self._product = self._row[:, :n] if num_rows == 1 else self._rows
        self._seen = LayersSeen()
        self._own_squares: Floats | float = 0.0  # of the rows

    @property
    def is_current(self) -> bool:
        """Whether the store is as it was at `begin`."""
        return self._generation == self.store.generation

    def semantic(self, embedding: Floats) -> Floats | None:
        """Cosines [T, n] of embeddings [T, H] to the stored ones (equation 4). None where none is stored, or a row is
        not finite.
        """
        store, n = self.store, self.num_maps
        if store.embeddings is None or not n:
            return None
        if self._num_rows == 1:
            query = embedding[0]
            square = float(np.dot(query, query))
            if not isfinite(square):
                return None
            cosines = np.dot(store.embeddings[:n], query)
            cosines *= store.inverse_embedding_norms[:n]
            if square:
                cosines *= square**-0.5
            one: Floats = cosines[None]
            return one
        squares = np.einsum("th,th->t", embedding, embedding)
        if not np.isfinite(squares).all():
            return None
        several: Floats = np.dot(embedding, store.embeddings[:n].T)
        several *= store.inverse_embedding_norms[:n]
        several *= inverse_root(squares)[:, None]
        return several

    def observe(self, layer: int, scores: Floats) -> None:
        """The routing scores of a layer, [T, E of the layer]. Layers come in order; some may be left out."""
        n = self.num_maps
        maps = self.store.maps[layer, :n, : scores.shape[1]]
        into = self._product if self._seen.layers else self._dots
        if self._num_rows == 1:
            row = scores[0]
            np.dot(maps, row, out=into)
            self._own_squares += float(np.dot(row, row))
        else:
            np.dot(scores, maps.T, out=into)
            self._own_squares = self._own_squares + np.einsum("te,te->t", scores, scores)
        if self._seen.layers:
            self._dots += self._product
        self._seen.add(layer)

    def trajectory(self) -> Floats | None:
        """Cosines [T, n] to the stored maps over the layers seen so far (equation 5); the next call and `observe`
        overwrite them. None where nothing is stored, a row is not finite, or the only row is zero.
        """
        store, seen = self.store, self._seen
        if not seen.layers:
            return None
        return self._cosines(seen.inverse_norms(store.inverse_norms, store.squares, self.num_maps))

    def of_all_layers(self) -> Floats | None:
        """Cosines as of `trajectory`, over all layers; layers that were not seen are zero in the rows."""
        return self._cosines(self.store.inverse_norms[-1, : self.num_maps]) if self._seen.layers else None

    def _cosines(self, inverse_norms: Floats) -> Floats | None:
        own_squares = self._own_squares
        is_finite = isfinite(own_squares) if isinstance(own_squares, float) else np.isfinite(own_squares).all()
        if not self.num_maps or not is_finite:
            return None
        cosines: Floats = self._product  # what it held is in the sum, and it is still in the processor's cache
        np.multiply(self._dots, inverse_norms, out=cosines)
        if isinstance(own_squares, float):
            if not own_squares:
                return None
            cosines *= own_squares**-0.5
            one: Floats = cosines[None]
            return one
        cosines *= inverse_root(own_squares)[:, None]
        return cosines

    def nearest(self, cosines: Floats) -> NearestMaps:
        """The most similar map of each row; of equal ones, up to rounding, the newest."""
        born = self.store.born
        if len(cosines) == 1:
            row = cosines[0]
            slot = int(row.argmax())
            best = row[slot]
            equal = (row >= best - TIE).nonzero()[0]
            if len(equal) > 1:
                slot = int(equal[born[equal].argmax()])
            return NearestMaps([slot], [min(float(row[slot]), 1.0)])
        slots = cosines.argmax(axis=1)
        scores = cosines[np.arange(len(cosines)), slots]
        is_equal = cosines >= (scores - TIE)[:, None]
        if np.count_nonzero(is_equal) > len(cosines):
            rows, equals = divmod(np.flatnonzero(is_equal), cosines.shape[1])
            order = np.lexsort((born[equals], rows))
            last = np.searchsorted(rows[order], np.arange(len(cosines)), side="right") - 1
            slots = equals[order][last]
        return NearestMaps(slots, np.minimum(scores, 1.0))

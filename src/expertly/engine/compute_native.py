"""The same arithmetic by the compiled products, for a few tokens in RAM: straight from the slots' addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from expertly.core.messages import Piece
from expertly.native.kernels import Kernels


class NativeProducts:
    """Products with the pieces of one layer. `rows` are the layer's slots [S * r1, M, H], r1 neurons a segment."""

    def __init__(self, kernels: Kernels, rows: torch.Tensor, neurons_per_segment: int) -> None:
        self._kernels = kernels
        self._dtype = rows.dtype
        self._address = rows.data_ptr()
        self._neurons_per_segment = neurons_per_segment
        self._num_inner = rows.shape[1] - 1  # gate and up, or up
        self._matrix_nbytes = rows.shape[2] * rows.element_size()
        self._row_nbytes = rows.shape[1] * self._matrix_nbytes
        self._slot_nbytes = neurons_per_segment * self._row_nbytes

    def take(self, x: torch.Tensor) -> bool:
        """Whether they are for such inputs [n, H]."""
        return x.shape[0] <= self._kernels.max_tokens and x.dtype == self._dtype

    def inner(self, x: torch.Tensor, pieces: Sequence[Piece]) -> tuple[torch.Tensor, ...]:
        """Rows of each piece of equal size times x [n, H]: gate and up [pieces * n, r]; without a gate, up."""
        n = x.shape[0]
        tasks: list[int] = []
        for k, piece in enumerate(pieces):
            tasks += (self._address + piece.slot * self._slot_nbytes, 0, n, k * n)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_neurons = pieces[0].num_segments * self._neurons_per_segment
        out = x.new_empty(self._num_inner, len(pieces) * n, num_neurons)
        self._kernels.dots(tasks, x, out, self._row_nbytes, self._matrix_nbytes)
        return out.unbind(0)

    def outer(
        self, inner: torch.Tensor, pieces: Sequence[Piece], places: Sequence[int], out: torch.Tensor, *, adds: bool
    ) -> None:
        """Activations [pieces * n, r] times the down rows of each piece, to the n rows of `out` [*, H] from its place
        on, rounded once; or added to them, where `out` is a float32 sum.
        """
        n = inner.shape[0] // len(pieces)
        first = self._address + self._num_inner * self._matrix_nbytes
        tasks: list[int] = []
        for k, (piece, place) in enumerate(zip(pieces, places, strict=True)):
            tasks += (first + piece.slot * self._slot_nbytes, k * n, n, place)
        self._kernels.sums(tasks, inner.contiguous(), out, self._row_nbytes, adds=adds)
        self._kernels.num_native += len(pieces)

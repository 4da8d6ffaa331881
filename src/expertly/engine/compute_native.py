"""The same arithmetic by the compiled products, for a few tokens in RAM: straight from the slots' addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from expertly.core.messages import Span
from expertly.native.kernels import Kernels


class NativeProducts:
    """Products with the spans of one layer. `rows` are the layer's slots [S * r1, M, H], r1 neurons a segment."""

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

    def inner(self, x: torch.Tensor, spans: Sequence[Span]) -> tuple[torch.Tensor, ...]:
        """Rows of each span of equal size times x [n, H]: gate and up [spans * n, r]; without a gate, up."""
        n = x.shape[0]
        tasks: list[int] = []
        for k, span in enumerate(spans):
            tasks += (self._address + span.slot * self._slot_nbytes, 0, n, k * n)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_neurons = spans[0].num_segments * self._neurons_per_segment
        out = x.new_empty(self._num_inner, len(spans) * n, num_neurons)
        self._kernels.dots(tasks, x, out, self._row_nbytes, self._matrix_nbytes)
        return out.unbind(0)

    def outer(
        self, inner: torch.Tensor, spans: Sequence[Span], places: Sequence[int], out: torch.Tensor, *, adds: bool
    ) -> None:
        """Activations [spans * n, r] times the down rows of each span, to the n rows of `out` [*, H] from its place
        on, rounded once; or added to them, where `out` is a float32 sum.
        """
        n = inner.shape[0] // len(spans)
        first = self._address + self._num_inner * self._matrix_nbytes
        tasks: list[int] = []
        for k, (span, place) in enumerate(zip(spans, places, strict=True)):
            tasks += (first + span.slot * self._slot_nbytes, k * n, n, place)
        self._kernels.sums(tasks, inner.contiguous(), out, self._row_nbytes, adds=adds)
        self._kernels.num_native += len(spans)

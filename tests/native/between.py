"""The two products of an expert, each alone, and what torch computes between them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from expertly.native.activations import recognise
from expertly.native.kernels import ExpertProducts, Kernels

Formats = tuple[int, int, int] | None
"""The kernels of gate, up and down; None: weights are rows of numbers."""


def _call(kernels: Kernels, name: str, formats: Formats, dtype: torch.dtype, tasks: Sequence[int], *rest: int) -> None:
    library, packed = kernels.library, array("q", tasks)
    assert library is not None
    function = getattr(library.call, f"{'tiles' if formats else 'products'}_{name}")
    how = library.level, *(formats or ()), kernels.dtypes[dtype], min(torch.get_num_threads(), kernels.max_threads)
    if function(*how, packed.buffer_info()[0], len(packed) // 4, *rest):
        raise MemoryError


def inner_products(
    kernels: Kernels,
    tasks: Sequence[int],
    x: torch.Tensor,
    out: torch.Tensor,
    row_nbytes: int,
    matrix_nbytes: int = 0,
    bias: torch.Tensor | None = None,
    formats: Formats = None,
) -> None:
    """out[m, o + t, i] = row (i, m) . x[r + t] for every task (address, r, n, o) and t < n; neuron i's row of matrix m
    is at address + i * row_nbytes + m * matrix_nbytes, or in blocks every `row_nbytes`.
    """
    sizes = (*out.shape[::2], x.shape[1], row_nbytes, *(() if formats else (matrix_nbytes,)))
    inputs = x.data_ptr(), x.shape[0], x.stride(0) * x.element_size(), 0 if bias is None else bias.data_ptr()
    _call(kernels, "dots", formats, x.dtype, tasks, *sizes, *inputs, out.data_ptr(), out.shape[1])


def down_products(
    kernels: Kernels,
    tasks: Sequence[int],
    h: torch.Tensor,
    out: torch.Tensor,
    row_nbytes: int,
    num_inner: int = 0,
    formats: Formats = None,
    *,
    adds: bool = False,
) -> None:
    """out[o + t] = the sum over i of h[r + t, i] * row i, for every task and t < n; `adds`: added to float32."""
    sizes = *((num_inner,) if formats else ()), h.shape[1], out.shape[1], row_nbytes
    _call(kernels, "sums", formats, h.dtype, tasks, *sizes, h.data_ptr(), h.shape[0], out.data_ptr(), adds)


@dataclass
class Biased:
    """Of two experts the second: its biases of the inner matrices [r] each, and of down [H]."""

    products: ExpertProducts
    inner_bias: tuple[torch.Tensor, ...]
    down_bias: torch.Tensor

    def between(self, inner: torch.Tensor) -> torch.Tensor:
        """[n, r] from the first products [M, n, r]."""
        return activated(*(values + bias for values, bias in zip(inner, self.inner_bias, strict=True)))

    def assert_same(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        few = 1e-4 if found.dtype == torch.float32 else 0
        largest = float(expected.float().nan_to_num().abs().max())
        torch.testing.assert_close(found, expected, rtol=few, atol=few * largest, equal_nan=True)


def activated(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    return silu(gate) if up is None else silu(gate) * up


def with_biases(
    dtype: torch.dtype,
    num_inner: int,
    hidden: int,
    width: int,
    formats: tuple[int, int, int],
    nbytes: tuple[int, int] = (0, 0),
) -> Biased:
    """`nbytes`: from row to row (or block to block) and from matrix to matrix."""
    dice = torch.Generator().manual_seed(width)
    inner = tuple(torch.randn(2, width, generator=dice).to(dtype) for _ in range(num_inner))
    down = torch.randn(2, hidden, generator=dice).to(dtype)
    activation = recognise(activated, dtype, is_gated=num_inner == 2)
    assert activation is not None
    products = ExpertProducts(formats, (num_inner, hidden), *nbytes, activation, inner, down)
    return Biased(products, tuple(bias[1] for bias in inner), down[1])

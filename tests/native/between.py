"""What torch computes between the two products of an expert, beside the same for one call of the compiled products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from expertly.native.activations import recognise
from expertly.native.kernels import ExpertProducts


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

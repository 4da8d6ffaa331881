"""Experts as they are written down, in float64, and how far the kernels may be from that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import silu

from expertly.core.messages import Span
from expertly.native.activations import recognise
from expertly.native.kernels import NO_DOWN, ExpertProducts, Kernels, Work

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
"""Half of a unit of a rounded number; in float32, where silu is approximated, four."""


def activated(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    return silu(gate) if up is None else silu(gate) * up


@dataclass
class Experts:
    """Two experts of `weights` [r, M, H] each, the first of their neurons number `begin`, which lie at `addresses`."""

    weights: tuple[torch.Tensor, torch.Tensor]
    addresses: tuple[int, int]
    products: ExpertProducts
    inner_bias: tuple[torch.Tensor, ...]
    down_bias: torch.Tensor
    begin: int

    def run(
        self, kernels: Kernels, num_tokens: tuple[int, ...], x: torch.Tensor, *, adds: bool = False
    ) -> list[torch.Tensor]:
        """Outputs [n, H] of expert 0 for the first n tokens, and of expert 1, if asked for, for the last ones, their
        order turned around. `adds`: to ones.
        """
        rows = [
            row for n, row in zip(num_tokens, (range(len(x)), range(len(x))[::-1]), strict=False) for row in row[:n]
        ]
        out = torch.ones(len(rows) + 1, x.shape[1]) if adds else x.new_full((len(rows) + 1, x.shape[1]), torch.nan)
        works: list[Work] = []
        for e, n in enumerate(num_tokens):
            first = sum(num_tokens[:e])
            span = Span(0, e, self.begin, len(self.weights[0]), self.addresses[e])  # of slots of one neuron
            works.append((span, rows[first : first + n], range(first + 1, first + n + 1)))
        kernels.experts(self.products, (0, 1, 1), works, x, out, adds=adds)
        assert bool((out[0] == 1).all() if adds else out[0].isnan().all()), "what is not theirs is left alone"
        return list(out[1:].split(list(num_tokens)))

    @cached_property
    def _exact(self) -> list[list[tuple[torch.Tensor, float]]]:
        """Each expert's matrices as they are multiplied by, [H, r] and down [r, H], and their largest magnitude."""
        matrices = [list(weights.double().unbind(1)) for weights in self.weights]
        return [
            [(matrix, float(matrix.abs().max())) for matrix in (*(rows.T for rows in inner), down)]
            for *inner, down in matrices
        ]

    @cached_property
    def _down(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Magnitudes and squares."""
        return [(down.abs(), down**2) for *_, (down, _) in self._exact]

    def check(self, found: torch.Tensor, expert: int, x: torch.Tensor, *, adds: bool = False) -> None:
        """An expert's outputs of inputs [n, H]: what each step rounds and sums may change, and no more."""
        dtype, (*inner, last) = x.dtype, self._exact[expert]
        eps, few, x = EPSILON[dtype], 2**-24 if dtype == torch.float16 else 1e-30, x.double()
        end = self.begin + len(last[0])
        values, errors = [], []
        for matrix, bias in zip(inner, self.inner_bias, strict=True):
            product, error = _summed(x, *matrix)
            values.append(product + bias[expert, self.begin : end].double())
            errors.append(error + eps * (product.abs() + values[-1].abs()) + 2 * few)
        h = silu(values[0])
        error = 1.1 * errors[0] + eps * h.abs() + few
        if len(values) > 1:
            error = error * (values[1].abs() + errors[1]) + h.abs() * errors[1]
            h = h * values[1]
            error += eps * h.abs() + few
        (exact, bound), (down, squares) = _summed(h, *last), self._down[expert]
        bound = bound + torch.minimum(error @ down, 4 * (error**2 @ squares).sqrt())  # roundings do not agree
        if adds:
            exact, bound = exact + 1, bound + 2**-23 * (1 + exact.abs())
        else:
            biased = exact + self.down_bias[expert].double()
            exact, bound = biased, bound + eps * (exact.abs() + biased.abs()) + 2 * few
        off = (found.double() - exact).abs()
        assert bool((off <= bound).all()), f"{float((off / bound).nan_to_num(math.inf).max())} of what is allowed"


def _summed(x: torch.Tensor, weights: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, H] times weights [H, r], and what sums in float32 of so many terms may lose."""
    exact = x @ weights
    return exact, torch.full_like(exact, 2**-22 * len(weights) * float(x.abs().max()) * largest)


def make_experts(
    weights: tuple[torch.Tensor, torch.Tensor],
    addresses: tuple[int, int],
    dtype: torch.dtype,
    formats: tuple[int, int, int] = (NO_DOWN,) * 3,
    nbytes: tuple[int, int] = (0, 0),
    begin: int = 0,
) -> Experts:
    """`weights`: rounded to `dtype`. `nbytes`: from row to row (or block to block) and from matrix to matrix."""
    width, num_matrices, hidden = weights[0].shape
    dice, num_inner = torch.Generator().manual_seed(width), num_matrices - 1
    inner = tuple(torch.randn(2, begin + width, generator=dice).to(dtype) for _ in range(num_inner))
    down = torch.randn(2, hidden, generator=dice).to(dtype)
    activation = recognise(activated, dtype, is_gated=num_inner == 2)
    assert activation is not None
    products = ExpertProducts(formats, (num_inner, hidden), *nbytes, activation, inner, down)
    return Experts(weights, addresses, products, inner, down, begin)

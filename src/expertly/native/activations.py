"""What is computed between the two products of an expert, as the compiled ones take it: recognised by what it computes.

A function of one number of 16 bits is a table of 65 536 numbers, so that the compiled products give bit by bit what the
model's own code gives, whatever it is called. Shapes: n tokens, r neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import gelu, relu, silu


@dataclass(frozen=True)
class Activation:
    """f(gate) * g(up), rounded each time; f(up) where there is no gate. Tables [65536] by the bits of a number; `g` is
    None where it is `up` itself. In float32 `f` is a curve [5] as in products.h, which has g, too.
    """

    f: torch.Tensor
    g: torch.Tensor | None = None

    @property
    def is_silu(self) -> bool:
        """Of float32: whether f is silu and g nothing."""
        return self.f.tolist() == list(_SILU)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Of (gate [n, r], up [n, r]) or (up [n, r]), in 16 bits."""
        first = _at(self.f, gate)
        if up is None:
            return first
        return first * (up if self.g is None else _at(self.g, up))


_UNLIMITED = float("inf")

_SILU = (1.0, 0.0, _UNLIMITED, 0.0, 0.0)

_GATED: Sequence[tuple[tuple[float, ...], Callable[..., torch.Tensor]]] = (
    (_SILU, lambda gate, up: silu(gate) * up),
    ((1.5957691216, 0.0713548163, _UNLIMITED, 0.0, 0.0), lambda gate, up: gelu(gate, approximate="tanh") * up),
    ((1.702, 0.0, 7.0, 1.0, 0.0), lambda gate, up: (up.clamp(-7, 7) + 1) * _swish(gate.clamp(max=7), 1.702)),
)
_PLAIN = (
    (_SILU, silu),
    ((1e30, 0.0, _UNLIMITED, 0.0, 1.0), lambda up: relu(up).square()),
)
"""Curves of float32, and torch's functions: of Llama and its kin, Gemma, gpt-oss; Nemotron."""

_known: list[tuple[tuple[torch.dtype, torch.device, bool], Activation]] = []  # or no gate; layers share their tables


def recognise(
    activate: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device | str = "cpu", *, is_gated: bool
) -> Activation | None:
    """What `activate`, of (gate [n, r], up [n, r]) or (up [n, r]) in `dtype` on `device`, computes there, where its
    tables are, too; None: nothing of this kind.
    """
    with torch.no_grad():
        if dtype == torch.float32:
            return _in_float32(activate, device, is_gated=is_gated)
        pairs = [numbers.to(device) for numbers in _pairs(dtype)[: 2 if is_gated else 1]]
        expected = activate(*pairs)
        kind = dtype, pairs[0].device, is_gated
        for its_kind, known in _known:
            if its_kind == kind and _is_same(known(*pairs), expected):
                return known
        for candidate in _candidates(activate, _numbers(dtype).to(device), is_gated=is_gated):
            if _is_same(candidate(*pairs), expected):
                _known.append((kind, candidate))
                return candidate
    return None


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """All that 16 bits can be, [1, 65536]."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)[None]


@cache
def _pairs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Every number as a gate and every number as an up [1, 65536] each, in orders of their own: limits of two kinds of
    gate may differ in a few numbers only.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(_numbers(dtype)[:, torch.randperm(1 << 16, generator=generator)] for _ in range(2))


def _candidates(
    activate: Callable[..., torch.Tensor], numbers: torch.Tensor, *, is_gated: bool
) -> Iterator[Activation]:
    if not is_gated:
        yield Activation(activate(numbers)[0])
        return
    for unit in (1.0, 0.0):  # up, and up + 1
        f = activate(numbers, torch.full_like(numbers, unit))
        yield Activation(f[0])
        g = _of_up(activate, f, numbers)
        if g is not None:
            yield Activation(f[0], g[0])


def _in_float32(
    activate: Callable[..., torch.Tensor], device: torch.device | str, *, is_gated: bool
) -> Activation | None:
    generator = torch.Generator().manual_seed(0)
    gate, up = ((torch.randn(1, 4096, generator=generator) * 8).to(device) for _ in range(2))
    numbers = (gate, up) if is_gated else (gate,)
    expected = activate(*numbers)
    for curve, function in _GATED if is_gated else _PLAIN:
        if _is_same(function(*numbers), expected):
            return Activation(torch.tensor(curve))
    return None


def _swish(numbers: torch.Tensor, alpha: float) -> torch.Tensor:
    return numbers * torch.sigmoid(numbers * alpha)


def _of_up(activate: Callable[..., torch.Tensor], f: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor | None:
    """g of all numbers, from a gate of which f is a power of two, the nearest to 1; None where there is none."""
    mantissas, exponents = torch.frexp(f.float())
    order = exponents.abs().masked_fill((mantissas != 0.5) | ~f.isfinite() | (exponents.abs() > 8), 1 << 10)
    best = int(order.argmin())
    if order[0, best] > 8:
        return None
    return activate(numbers[:, best : best + 1].expand_as(numbers), numbers) / f[0, best]


def _at(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return table[numbers.view(torch.int16).int() & 0xFFFF]


def _is_same(made: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((made == expected) | (made.isnan() & expected.isnan())).all())

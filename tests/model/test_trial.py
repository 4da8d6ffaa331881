"""Experts outside transformers' interface: how they are called, and how their weights lie, is found by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from expertly.model.trial import Calls, try_experts

E, H, I = 8, 32, 16  # noqa: E741


class Experts(nn.Module):
    """By ids; `beyond`: ids that have no expert and give their token."""

    is_transposed = False

    def __init__(self, beyond: int = 0) -> None:
        super().__init__()
        self.num_experts, self.width, self.num_ids = E, I, E + beyond
        up, down = (E + beyond, 2 * I, H), (E, H, I)
        turned = slice(None, None, -1 if self.is_transposed else 1)
        self.gate_up_proj = nn.Parameter(torch.empty(up[0], *up[1:][turned], device="meta"))
        self.down_proj = nn.Parameter(torch.empty(E, *down[1:][turned], device="meta"))
        self.act_fn = nn.SiLU()

    def activated(self, inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner[..., : self.width], inner[..., self.width :]
        return self.act_fn(gate) * up

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        up, down = self.gate_up_proj[number], self.down_proj[number]
        inner = self.activated(x @ (up if self.is_transposed else up.T))
        return inner @ (down if self.is_transposed else down.T)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for token, row in enumerate(ids.tolist()):
            for choice, number in enumerate(row):
                x = hidden[token]
                out[token] += (self.expert(number, x) if number < self.num_experts else x) * weights[token, choice]
        return out


class Turned(Experts):
    is_transposed = True


class Interleaved(Experts):
    def activated(self, inner: torch.Tensor) -> torch.Tensor:
        return self.act_fn(inner[..., ::2]) * inner[..., 1::2]


class Limited(Experts):
    """By something that is in its forward alone."""

    def activated(self, inner: torch.Tensor) -> torch.Tensor:
        return super().activated(inner.clamp(-7, 7))


class WithGate(Experts):
    """What a method does, the kernels call."""

    def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
        return super().activated(inner.clamp(-7, 7))

    activated = _apply_gate


class Rows(Turned):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        of_expert = rows.view(self.num_experts, -1, rows.shape[1])
        return torch.cat([self.expert(number, x) for number, x in enumerate(of_expert)])


class Squared(Experts):
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, ids, weights**2)


class Biased(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(E, H, device="meta"))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Experts(), Calls(False, True, False, True)),
        (Experts(beyond=4), Calls(False, True, False, True)),
        (Turned(beyond=4), Calls(True, True, False, True)),
        (Interleaved(beyond=4), Calls(False, False, False, True)),
        (WithGate(beyond=4), Calls(False, True, False, True)),
        (Rows(), Calls(True, True, True, False)),
        (Limited(beyond=4), None),
        (Squared(beyond=4), None),
        (Biased(), None),
        (nn.Linear(4, 4, device="meta"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_experts_are_what_they_compute(module: Any, expected: Calls | None) -> None:
    assert try_experts(module) == expected
    assert all(weight.is_meta for weight in module.parameters()), "the module itself is left alone"

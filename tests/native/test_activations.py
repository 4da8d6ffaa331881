"""An expert's activation is known by what it computes, and computed as torch has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from expertly.native.activations import recognise


def gpt_oss(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


GATED = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "gpt_oss": gpt_oss,
    "up in float32": lambda gate, up: (functional.silu(gate).float() * up.float()).to(gate.dtype),
}
PLAIN = {"relu": functional.relu, "square": lambda up: functional.relu(up).square()}
OTHERS = {
    "both": lambda gate, up: functional.silu(gate) * up + up,
    "of the sum": lambda gate, up: functional.silu(gate + up),
    "up gates": lambda gate, up: functional.silu(up) * gate,
    "not rounded between": lambda gate, up: (functional.silu(gate.float()) * up.float()).to(gate.dtype),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*GATED, *PLAIN])
def test_known_to_the_bit(name: str, dtype: torch.dtype) -> None:
    activate: Callable[..., torch.Tensor] = (GATED | PLAIN)[name]
    found = recognise(activate, dtype, is_gated=name in GATED)
    assert found is not None and recognise(activate, dtype, is_gated=name in GATED) is found, "layers share tables"
    values = [torch.randn(4, 4096).to(dtype) * 4 for _ in range(2 if name in GATED else 1)]
    assert torch.equal(found(*values), activate(*values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(OTHERS))
def test_others_are_left_to_torch(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) != ("not rounded between", torch.float32):  # where that is silu
        assert recognise(OTHERS[name], dtype, is_gated=True) is None


def test_kinds_that_differ_in_one_number_are_told_apart() -> None:
    for number in (0.5, 1.5, 7.0):

        def activate(gate: torch.Tensor, up: torch.Tensor, number: float = number) -> torch.Tensor:
            return functional.silu(gate).where(gate != number, 0) * up

        found = recognise(activate, torch.bfloat16, is_gated=True)
        gate, up = torch.full((1, 8), number).bfloat16(), torch.ones(1, 8).bfloat16()
        assert found is not None and torch.equal(found(gate, up), activate(gate, up))


def test_float32_is_silu_only() -> None:
    assert recognise(GATED["silu"], torch.float32, is_gated=True) is not None
    assert recognise(functional.silu, torch.float32, is_gated=False) is not None
    for name in ("gelu", "gpt_oss"):
        assert recognise(GATED[name], torch.float32, is_gated=True) is None

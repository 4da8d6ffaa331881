"""An expert's activation is known by what it computes, and computed as torch has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from expertly.core.messages import Span
from expertly.native.activations import recognise
from expertly.native.kernels import NO_DOWN, ExpertProducts, Kernels, Library, libraries


def gpt_oss(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") * up


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


@pytest.mark.parametrize("library", libraries(), ids=lambda library: library.name)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gpt_oss", "plain silu", "square"])
def test_in_float32_curves_are_torchs_but_for_a_few_bits(name: str, library: Library) -> None:
    """An expert whose products are of ones: what is between them, of numbers large, small and negative."""
    curves = GATED | PLAIN | {"gelu_tanh": gelu_tanh, "plain silu": functional.silu}
    activate, is_gated = curves[name], name in ("silu", "gelu_tanh", "gpt_oss")
    activation = recognise(activate, torch.float32, is_gated=is_gated)
    assert activation is not None and activation.is_silu == name.endswith("silu")
    numbers = [-1e4, -30.0, -8.0, -7.0, -1.0, -1e-3, 0.0, 1e-6, 0.5, 3.0, 6.99, 7.01, 40.0, 1e4]
    gate = torch.tensor(numbers)[:, None].expand(-1, 3).flatten()
    up = torch.tensor([-20.0, 0.3, 9.0]).repeat(len(numbers))
    inner = [gate, up] if is_gated else [gate]
    # A neuron a number, of hidden states of one 1: its rows of the inner matrices are the numbers, that of down a 1.
    rows = torch.zeros(len(gate), len(inner) + 1, len(gate))
    for number, values in enumerate(inner):
        rows[:, number, 0] = values
    rows[:, -1] = torch.eye(len(gate))
    x, out = torch.zeros(1, len(gate)), torch.empty(1, len(gate))
    x[0, 0] = 1
    row_nbytes, matrix_nbytes = rows[0].nbytes, rows[0, 0].nbytes
    products = ExpertProducts((NO_DOWN,) * 3, (len(inner), len(gate)), row_nbytes, matrix_nbytes, activation, (), None)
    slots = rows.data_ptr(), rows.nbytes, len(rows)
    Kernels(library, "").experts(products, slots, [(Span(0, 0, 0, 1, 0), (0,), (0,))], x, out)
    expected = activate(*(values[None] for values in inner))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_other_curves_of_float32_are_torchs() -> None:
    assert recognise(GATED["gelu"], torch.float32, is_gated=True) is None
    assert recognise(functional.relu, torch.float32, is_gated=False) is None

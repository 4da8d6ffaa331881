"""What one instruction set computes, the others do: the same bits, or but for the order of summation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from expertly.native.kernels import NORM_STYLES, Kernels, libraries
from tests.native.exact import make_experts

AVAILABLE = libraries()
pytestmark = pytest.mark.skipif(len(AVAILABLE) < 2, reason="one instruction set")

Draw = Callable[..., torch.Tensor]
EXACT, ROUNDED = 0.0, 5e-3
"""The share of numbers that may differ, by a rounding: bfloat16's hides nearly all of what another order changes."""


def drawing() -> Draw:
    dice = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=dice).bfloat16()


def dots(kernels: Kernels, draw: Draw, num_tokens: int, width: int) -> torch.Tensor:
    weight, x, bias = draw(65, width), draw(num_tokens, width), draw(65)
    out = x.new_empty(num_tokens, 65)
    kernels.dots(weight.data_ptr(), x, out, width * x.element_size(), bias)
    return out


def experts(kernels: Kernels, draw: Draw, num_tokens: int, width: int) -> torch.Tensor:
    rows, x = draw(65, 3, width) / 8, draw(num_tokens, width) / width**0.5
    made = make_experts((rows, rows), (rows.data_ptr(),) * 2, x.dtype, nbytes=(rows[0].nbytes, rows[0, 0].nbytes))
    return made.run(kernels, (num_tokens,), x)[0]


def norms(kernels: Kernels, draw: Draw, num_tokens: int, width: int) -> torch.Tensor:
    x, weight = draw(num_tokens, width), draw(width)
    return torch.cat([kernels.norm(x, weight, 1e-6, style) for style in NORM_STYLES])


def attention(kernels: Kernels, draw: Draw, num_tokens: int, width: int) -> torch.Tensor:
    heads = [draw(2, num, tokens, 64) for num, tokens in ((8, num_tokens), (2, width), (2, width))]
    mask = torch.zeros(2, 1, num_tokens, width, dtype=torch.bool)
    mask[..., width // 3 :] = True
    return kernels.attention(*heads, 0.125, mask)


def router(kernels: Kernels, draw: Draw, num_tokens: int, width: int) -> torch.Tensor:
    x, weight = draw(num_tokens, width), draw(65, width) * width**-0.5
    routed = kernels.router(x, weight, None, 4, x.dtype, is_normalised=True)
    assert routed is not None
    return torch.cat([part.to(x.dtype) for part in routed], dim=-1)


def combine(kernels: Kernels, draw: Draw, num_tokens: int, width: int) -> torch.Tensor:
    rows = draw(4 * num_tokens, width)
    return kernels.combine(rows, draw(num_tokens, 4), rows.dtype)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize("width", [48, 333, 2048])
@pytest.mark.parametrize(
    ("compute", "share"),
    [
        (norms, EXACT),
        (combine, EXACT),
        (dots, ROUNDED),
        (experts, 2 * ROUNDED),
        (attention, ROUNDED),
        (router, 2 * ROUNDED),
    ],
)
def test_bfloat16_is_the_same_everywhere(compute: Any, share: float, width: int, num_tokens: int) -> None:
    made = [compute(Kernels(library, ""), drawing(), num_tokens, width) for library in AVAILABLE]
    for library, other in zip(AVAILABLE[1:], made[1:], strict=True):
        differ = other != made[0]
        assert differ.float().mean() <= share, library.name
        torch.testing.assert_close(other, made[0], rtol=2**-7, atol=2e-3)


def test_as_many_tokens_are_taken_by_each() -> None:
    """Else a short prompt is computed in two ways."""
    for dtype in (torch.bfloat16, torch.float32):
        assert len({Kernels(library, "").most_tokens(dtype) for library in AVAILABLE}) == 1

"""Products of matrices of 16 bits where the processor has no instructions for them: in float32, and rounded once.

torch's own then multiply number by number: on AVX2 a product of a prompt takes four times as long, and one whose second
matrix is not transposed three hundred times.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

MAX_ROWS = 256
"""Of the first matrix, that are multiplied at a time: more would not be quicker."""

_PART_NUMBERS = 192 << 10
"""Of the second matrix, that are float32 at a time: what the C library keeps for the next part."""


def _has_instructions(name: str) -> bool:
    return not torch.backends.mkldnn.is_available() or getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

WIDENED = {dtype for name, dtype in _DTYPES.items() if not _has_instructions(name)}
"""dtypes that this processor multiplies in float32."""


def is_widened(x: torch.Tensor) -> bool:
    return x.dtype in WIDENED and x.is_cpu


def nbytes_at_once(itemsize: int, width: int, num_outputs: int) -> int:
    """What a product of [n, width] takes beside its result, of weights with `itemsize` bytes."""
    return 4 * (_PART_NUMBERS + MAX_ROWS * (width + num_outputs)) if WIDENED and itemsize == 2 else 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's `linear` of `x` [..., H], `weight` [r, H] and `bias` [r]."""
    if not is_widened(x):
        return functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], len(weight))
    for wide, rounded in _rows(x, out):
        for some, part in _parts(weight):
            product = functional.linear(wide, part)
            rounded[:, some].copy_(product if bias is None else product.add_(bias[some]))
    return out


def mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch's `mm` of `x` [n, r] and `weight` [r, H]."""
    if not is_widened(x):
        return torch.mm(x, weight)
    out = x.new_empty(len(x), weight.shape[1])
    for wide, rounded in _rows(x, out):
        sums = wide.new_zeros(rounded.shape)
        for some, part in _parts(weight):
            sums.addmm_(wide[:, some], part)
        rounded.copy_(sums)
    return out


def _rows(x: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of `x` in float32 at a time, and those of `out`."""
    inputs, outputs = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    for begin in range(0, len(inputs), MAX_ROWS):
        rows = slice(begin, begin + MAX_ROWS)
        yield inputs[rows].float(), outputs[rows]


def _parts(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time, in float32."""
    step = max(1, _PART_NUMBERS // weight.shape[1])
    for begin in range(0, len(weight), step):
        rows = slice(begin, begin + step)
        yield rows, weight[rows].float()

"""A quantised matrix of a checkpoint, whoever wrote it: numbers, scales, zero points; and its decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """torch, imported when it is first asked for something: `expertly --help` names formats without it."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

Bytes = npt.NDArray[np.uint8]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits: OCP's E2M1."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantised matrix, or several, [..., rows, columns]. A weight is (number - zero point) * scale + bias, computed
    in the dtype of the scales; those that are bytes or FP8 become float32.
    """

    numbers: torch.Tensor
    """FP8 or int8; with `bits` a row's numbers one after another, [..., rows, bytes or words], the lowest bits first. A
    GGUF matrix is its blocks, which only their format understands.
    """
    scales: torch.Tensor
    """One for each block, [..., rows / block[0], columns / block[1]]. Bytes are exponents, as in transformers."""
    bits: int = 0
    columns: int = 0  # with `bits`
    is_e2m1: bool = False
    zeros: torch.Tensor | None = None  # of each scale; None: the middle of numbers without a sign
    biases: torch.Tensor | None = None  # of each scale
    factor: float | None = None  # of all scales in FP8, above 0
    is_divisor: bool = False  # whether they are divided by it
    order: torch.Tensor | None = None  # the group of each input, where these are not neighbours
    block: Sequence[int] | None = None  # whose last one of a row or column may be cut; None: see `block_of`

    def weight(self) -> torch.Tensor:
        """The decoded matrices. Raises CheckpointError where a part does not fit, or is no finite number."""
        scales = self.finite_scales()
        values = self._values().to(scales.dtype)
        num_groups, columns = scales.shape[-1] if scales.dim() else 1, values.shape[-1]
        order = None if self.order is None else order_of(self.order, num_groups, columns)
        block = block_of(values.shape, scales.shape, self.block)
        if block is None and order is None:
            raise CheckpointError(f"scales: {list(scales.shape)}: not so many in {list(values.shape)} weights")
        zeros, biases = self.zeros, self.biases
        if biases is not None and not bool(biases.isfinite().all()):
            raise CheckpointError("a bias is NaN or infinite: must be finite")
        for part, change in ((zeros, values.sub_), (scales, values.mul_), (biases, values.add_)):
            if part is not None:
                part = part.to(scales.dtype)
                change(spread(part, values.shape, block or (1, 1)) if order is None else part[:, order])
        return values

    def finite_scales(self) -> torch.Tensor:
        """In the dtype in which weights are computed. Raises CheckpointError."""
        scales = self.scales
        if scales.dtype == torch.uint8:
            scales = (scales.float() - 127).exp2()
        elif scales.dtype == torch.float8_e8m0fnu:
            scales = scales.float()
        elif scales.dtype == torch.float8_e4m3fn:
            whole = torch.tensor(1.0 if self.factor is None else self.factor)
            if not whole > 0:
                raise CheckpointError(f"the scale of the matrix is {whole:g}: must be above 0")
            scales = fp8_values(scales)
            scales = scales / whole if self.is_divisor else scales * whole
        if not bool(scales.isfinite().all()):
            raise CheckpointError(f"a scale is {scales[~scales.isfinite()][0].item()}: must be finite")
        return scales

    def _values(self) -> torch.Tensor:
        if self.is_e2m1:
            return e2m1_values(self.numbers)
        if not self.bits:
            return self.numbers if self.numbers.dtype == torch.int8 else fp8_values(self.numbers)
        values = torch.from_numpy(unpacked(self.numbers.numpy(), self.bits, self.columns))
        if self.zeros is not None or self.biases is not None:
            return values
        return values.to(torch.int16).sub_(1 << self.bits - 1)


def fp8_values(numbers: torch.Tensor) -> torch.Tensor:
    """In float32. Raises CheckpointError where one is NaN."""
    values = numbers.float()
    if bool(values.isnan().any()):
        raise CheckpointError("a weight is 0x7f or 0xff, which stands for NaN: must be a number")
    return values


def e2m1_values(pairs: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] in float32 from bytes [..., n], the lower four bits first."""
    return torch.tensor(E2M1, device=pairs.device)[nibbles(pairs.view(torch.uint8)).int()]


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] from bytes [..., n], the lower four bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unpacked(words: npt.NDArray[Any], bits: int, num: int) -> Bytes:
    """Numbers [..., num] of `bits` bits each from words [..., n], the lowest bits first; they may straddle words."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed[..., :num]
    if bits == 4:
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)[..., :num]
    places = np.unpackbits(packed, axis=-1, count=num * bits, bitorder="little").reshape(*packed.shape[:-1], num, bits)
    return np.packbits(places, axis=-1, bitorder="little")[..., 0]


def block_of(shape: Sequence[int], scales: Sequence[int], block: Sequence[int] | None) -> tuple[int, int] | None:
    """The rows and columns of weights [..., rows, columns] that share one of `scales`: those of `block`, where the last
    of a row or column may be cut, else of a group, a row or the whole matrix. None: no such block has so many scales.
    """
    *lead, rows, columns = shape
    if block is not None and list(scales) == [*lead, -(-rows // block[0]), -(-columns // block[1])]:
        return block[0], block[1]
    if all(size == 1 for size in scales[len(lead) :]) and list(scales[: len(lead)]) == lead:
        return rows, columns
    if list(scales[:-1]) != [*lead, rows]:
        return (1, columns) if lead == [] and list(scales) == [rows] else None
    return (1, columns // scales[-1]) if scales[-1] and columns % scales[-1] == 0 else None


def spread(scales: torch.Tensor, shape: Sequence[int], block: tuple[int, int]) -> torch.Tensor:
    """`scales` as [..., rows or 1, columns or 1], for `block` of `block_of`."""
    *lead, rows, columns = shape
    factors = scales.reshape(*lead, -(-rows // block[0]), -(-columns // block[1]))
    for dim, size in ((-2, rows), (-1, columns)):
        if block[dim] < size:
            factors = factors.repeat_interleave(block[dim], dim).narrow(dim, 0, size)
    return factors


def order_of(order: torch.Tensor, num_groups: int, columns: int) -> torch.Tensor:
    """The group of each input. Raises CheckpointError where there is none."""
    if columns and not 0 <= int(order.min()) <= int(order.max()) < num_groups:
        raise CheckpointError(f"g_idx: from {order.min()} to {order.max()}: must be from 0 to {num_groups - 1}")
    return order.long()

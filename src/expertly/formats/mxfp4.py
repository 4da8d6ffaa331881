"""MXFP4 (OCP Microscaling Formats 1.0), as in gpt-oss: 4-bit E2M1 numbers; 32 of a row share a scale 2^(byte - 127).

A tile is, for each 8 inputs, 16 words of 4 bytes, one for each output, the first input in the lowest bits; then 16
bytes of scales. These are a checkpoint's own bytes in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.core.errors import CheckpointError
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, RoundingFormat, torch, transposed

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_MAX_SCALE = 252
"""6 * 2^(253 - 127) is beyond bfloat16 and float32; 255 stands for NaN."""


class _Mxfp4(RoundingFormat):
    name = "mxfp4"
    kernel = 0
    group = 32
    tile_nbytes = TILE_OUTPUTS * (1 + 16)
    suffixes: tuple[str, ...] = ("_blocks", "_scales")

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (("U8",), (rows, columns // 32, 16)), (("U8",), (rows, columns // 32))

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        codes, scales = (tensor.numpy() for tensor in tensors)
        if scales.size and scales.max() > _MAX_SCALE:
            raise CheckpointError(f"a scale of {scales.max()}: must be at most {_MAX_SCALE}, beyond are no numbers")
        return codes.reshape(rows, columns // 32, 16), scales.reshape(rows, columns // 32, 1)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales = parts
        words = transposed(codes, 4)  # [..., 4 words, 16 outputs, 4]
        return np.concatenate((words.reshape(*codes.shape[:-2], -1), scales[..., 0]), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        words, scales = tiles[..., :256].unflatten(-1, (4, 16, 4)), tiles[..., 256:]
        pairs = torch.stack((words & 15, words >> 4), dim=-1)  # [..., 4, 16, 4, 2]
        codes = pairs.transpose(-4, -3).flatten(-3)  # [..., 16, 32]
        values = torch.tensor(VALUES, device=tiles.device)[codes.int()]
        return torch.ldexp(values, scales.int().unsqueeze(-1) - 127)

    def encode(self, weights: torch.Tensor) -> tuple[Bytes, ...]:
        """A group's scale is the largest power of two with which its largest weight is at least 4, or twice that, which
        clips nothing: the one with the smaller squared error.
        """
        groups = weights.reshape(len(weights), -1, 32)
        largest = groups.abs().amax(dim=-1)
        scales = ((largest.view(torch.int32) >> 23) - 2).clamp_(0, _MAX_SCALE)
        relative = groups * ((254 - scales) << 23).view(torch.float32).unsqueeze(-1)
        rounded, wider = _nearest(relative), _nearest(relative / 2)
        errors, of_wider = ((numbers - relative).square_().sum(dim=-1) for numbers in (rounded, wider * 2))
        is_wider = of_wider < errors
        is_wider &= scales < _MAX_SCALE
        scales += is_wider
        rounded = torch.where(is_wider.unsqueeze(-1), wider, rounded)
        bits = rounded.view(torch.int32)  # 1, 1.5, 2, 3, 4, 6 lie half an octave apart
        magnitudes = ((bits >> 22 & 511) - 252).clamp_(min=0) + (rounded.abs() == 0.5)
        codes = magnitudes | bits >> 28 & 8
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        return pairs.byte().numpy(), scales.byte().unsqueeze(-1).numpy()


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The nearest of VALUES; of two equally near the one with an even code."""
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=1.0)  # the power of two below
    # VALUES are multiples of half that power (below 1 of 0.5): adding `magic` makes float32 round to these.
    magic = power.mul_(1.5 * 2**22)
    return (values + magic).sub_(magic).copysign_(values).clamp_(-6.0, 6.0)


MXFP4 = _Mxfp4()

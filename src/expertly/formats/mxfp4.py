"""MXFP4 (OCP Microscaling Formats 1.0), as in gpt-oss: numbers of E2M1; 32 of a row share a scale 2^(byte - 127).

A tile is, for each 8 inputs, 16 words of 4 bytes, one for each output, the first input in the lowest bits; then 16
bytes of scales. These are a checkpoint's own bytes in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from expertly.core.errors import CheckpointError
from expertly.formats.layouts import Accepted, Header, Layout
from expertly.formats.matrix import Bytes, Matrix, e2m1_values, torch
from expertly.formats.tiles import TILE_OUTPUTS, RoundingFormat, TiledFormat, transposed

GROUP = 32

_MAX_SCALE = 252
"""6 * 2^(253 - 127) is beyond bfloat16 and float32; 255 stands for NaN."""


class Mxfp4Format(RoundingFormat):
    name = "mxfp4"
    kernel = 0
    group = GROUP
    tile_nbytes = TILE_OUTPUTS * (1 + GROUP // 2)

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        rows, scales = len(matrix.numbers), matrix.scales.numpy()
        if scales.size and scales.max() > _MAX_SCALE:
            raise CheckpointError(f"a scale of {scales.max()}: must be at most {_MAX_SCALE}, beyond are no numbers")
        return matrix.numbers.numpy().view(np.uint8).reshape(rows, -1, GROUP // 2), scales.reshape(rows, -1, 1)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales = parts
        words = transposed(codes, 4)  # [..., 4 words, 16 outputs, 4]
        return np.concatenate((words.reshape(*codes.shape[:-2], -1), scales[..., 0]), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        words, scales = tiles[..., :256].unflatten(-1, (4, 16, 4)), tiles[..., 256:]
        codes = words.transpose(-3, -2).flatten(-2)  # [..., 16, 16]
        return torch.ldexp(e2m1_values(codes), scales.int().unsqueeze(-1) - 127)

    def encode(self, weights: torch.Tensor) -> tuple[Bytes, ...]:
        """A group's scale is the largest power of two with which its largest weight is at least 4, or twice that, which
        clips nothing: the one with the smaller squared error.
        """
        groups = weights.reshape(len(weights), -1, GROUP)
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
    """The nearest number of E2M1; of two equally near the one with an even code."""
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=1.0)  # the power of two below
    # Numbers are multiples of half that power (below 1 of 0.5): adding `magic` makes float32 round to these.
    magic = power.mul_(1.5 * 2**22)
    return (values + magic).sub_(magic).copysign_(values).clamp_(-6.0, 6.0)


MXFP4 = Mxfp4Format()


class Mxfp4Layout(Layout):
    """`quant_method` mxfp4, of gpt-oss: experts in one tensor, [E, rows, groups, 16], whose parameter lies turned."""

    suffixes = ()
    fused = ("_proj_blocks", "_proj_scales")

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> tuple[str, ...]:
        return self.fused

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        _, (*lead, groups) = tensors[self.fused[1]]
        return [*lead, GROUP * groups]

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        scales = [*size[:-1], size[-1] // GROUP]
        return {self.fused[0]: (("U8",), [[*scales, GROUP // 2]]), self.fused[1]: (("U8",), [scales])}

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return MXFP4

    def usual_form(self) -> TiledFormat | None:
        return MXFP4

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        blocks, scales = tensors.values()
        return Matrix(blocks.flatten(-2), scales, 4, GROUP * scales.shape[-1], is_e2m1=True)

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().weight(tensors).transpose(-1, -2)

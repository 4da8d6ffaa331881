"""NVFP4 of NVIDIA's modelopt and compressed-tensors: numbers of E2M1, a scale of E4M3 for each 16, and one of float32
for the whole matrix, by which these are multiplied or divided.

A tile is, for each 8 inputs, 16 words of 4 bytes, one for each output, the first input in the lowest bits; then, for
each 16 inputs, 16 scales, bytes as those of fp8.py; then the float32 one, negative where it divides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.core.errors import CheckpointError
from expertly.formats.fp8 import moved_values, sign_moved
from expertly.formats.matrix import Bytes, Matrix, e2m1_values, fp8_values, torch
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat, transposed

_GROUP = 64
_CODES_NBYTES = TILE_OUTPUTS * _GROUP // 2
_SCALES_NBYTES = TILE_OUTPUTS * _GROUP // 16


class Nvfp4Format(TiledFormat):
    name = "nvfp4_global"
    kernel = 13
    group = _GROUP
    tile_nbytes = _CODES_NBYTES + _SCALES_NBYTES + 4

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        factor = 1.0 if matrix.factor is None else matrix.factor
        if not 2.0**-100 < factor < 2.0**100:
            raise CheckpointError(f"the scale of the matrix is {factor:g}: must be between 2^-100 and 2^100")
        fp8_values(matrix.scales)
        numbers = matrix.numbers.numpy().reshape(len(matrix.numbers), -1, _GROUP // 2)
        scales = sign_moved(matrix.scales.view(torch.uint8).numpy()).reshape(*numbers.shape[:2], -1)
        whole = np.array([-factor if matrix.is_divisor else factor], np.float32).view(np.uint8)
        return numbers, scales, np.broadcast_to(whole, (*numbers.shape[:2], 4))

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales, whole = parts
        if (whole != whole[..., :1, :]).any():
            raise CheckpointError("16 rows, of matrices with different scales, in one tile")
        flat = [part.reshape(*codes.shape[:-2], -1) for part in (transposed(codes, 4), scales.swapaxes(-1, -2))]
        return np.concatenate((*flat, whole[..., 0, :]), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        codes, scales, whole = tiles.split((_CODES_NBYTES, _SCALES_NBYTES, 4), dim=-1)
        rows = codes.unflatten(-1, (-1, TILE_OUTPUTS, 4)).transpose(-2, -3).flatten(-2)  # [..., 16, 64]
        factors = moved_values(scales.unflatten(-1, (-1, TILE_OUTPUTS)).transpose(-1, -2).contiguous())
        size = whole.clone().view(torch.float32).unsqueeze(-1)
        factors = torch.where(size < 0, factors / -size, factors * size)
        return e2m1_values(rows) * factors.repeat_interleave(16, -1)


NVFP4 = Nvfp4Format()

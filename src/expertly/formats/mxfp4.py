"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit numbers E2M1, 32 of a row with a scale 2^(byte - 127); as gpt-oss ships.

A tile is, for each 8 inputs, 16 words of 4 bytes, one an output, the first input in the lowest bits; then 16 bytes of
scales: a checkpoint's own bytes in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from expertly.core.errors import CheckpointError
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, TiledFormat

if TYPE_CHECKING:
    import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_MAX_SCALE = 252
"""6 times 2^(253 - 127) is beyond bfloat16 and float32; 255 stands for NaN."""


class _Mxfp4(TiledFormat):
    name = "mxfp4"
    kernel = 0
    group = 32
    tile_nbytes = TILE_OUTPUTS * (1 + 16)
    suffixes = ("_blocks", "_scales")

    def is_of(self, quantization: Mapping[str, Any], dtypes: Mapping[str, str], dtype: str) -> bool:
        return quantization.get("quant_method") == "mxfp4"

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (("U8",), (rows, columns // 32, 16)), (("U8",), (rows, columns // 32))

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        codes, scales = (tensor.numpy() for tensor in tensors)
        if scales.size and scales.max() > _MAX_SCALE:
            raise CheckpointError(f"a scale of {scales.max()}: must be at most {_MAX_SCALE}, beyond are no numbers")
        return codes.reshape(rows, columns // 32, 16), scales.reshape(rows, columns // 32, 1)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales = parts
        words = codes.reshape(*codes.shape[:-1], 4, 4).swapaxes(-2, -3)  # [..., 4 words, 16 outputs, 4]
        flat = words.reshape(*codes.shape[:-2], -1)
        return np.concatenate((flat, scales[..., 0]), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        import torch

        words, scales = tiles[..., :256].unflatten(-1, (4, 16, 4)), tiles[..., 256:]
        pairs = torch.stack((words & 15, words >> 4), dim=-1)  # [..., 4, 16, 4, 2]
        codes = pairs.transpose(-4, -3).flatten(-3)  # [..., 16, 32]
        values = torch.tensor(VALUES, device=tiles.device)[codes.int()]
        return torch.ldexp(values, scales.int().unsqueeze(-1) - 127)


MXFP4 = _Mxfp4()

"""Weights of 16 bits beside quantised ones, as GGUF files have them: kept so in a model that computes in float32.

A tile is, of BF16, for each 2 inputs 16 words, one for each output, the first input in the lower half; of F16, for each
input 16 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.formats.matrix import Bytes, Matrix, torch
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat, transposed


class _Halves(TiledFormat):
    group = 32
    tile_nbytes = TILE_OUTPUTS * 64

    def __init__(self, type: str, kernel: int, dtype: str, item_nbytes: int) -> None:
        """`type`: GGUF's name of it. `item_nbytes`: bytes of one output that lie together in a tile."""
        self.name, self.type, self.kernel = type.lower(), type, kernel
        self._dtype, self._item_nbytes = dtype, item_nbytes

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        return (matrix.numbers.contiguous().view(torch.uint8).numpy().reshape(len(matrix.numbers), -1, 64),)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (numbers,) = parts
        return np.ascontiguousarray(transposed(numbers, self._item_nbytes)).reshape(*numbers.shape[:-2], -1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        items = tiles.unflatten(-1, (-1, TILE_OUTPUTS, self._item_nbytes)).transpose(-2, -3)
        return items.flatten(-2).contiguous().view(getattr(torch, self._dtype)).float()


HALVES = _Halves("BF16", 25, "bfloat16", 4), _Halves("F16", 26, "float16", 2)

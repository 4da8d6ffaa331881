"""FP8 (OCP's E4M3) with a scale for each 128 x 128 weights, as in DeepSeek-V3, Qwen3-FP8 and MiniMax-M2.

A tile is, for each 4 inputs, 16 words of 4 bytes, one for each output, the first input in the lowest bits; then the
scale, a float32. A byte is a checkpoint's own with its sign moved: from the top exponent (4 bits), sign, mantissa (3),
so that sign and mantissa together are an index of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, TiledFormat, torch, transposed

BLOCK = 128
_CODES_NBYTES = TILE_OUTPUTS * BLOCK


class _Fp8(TiledFormat):
    name = "fp8"
    kernel = 24
    group = BLOCK
    tile_nbytes = _CODES_NBYTES + 4
    suffixes = ("weight", "weight_scale_inv")

    def is_of(self, quantization: Mapping[str, Any], dtypes: Mapping[str, str], dtype: str) -> bool:
        block = quantization.get("weight_block_size", (BLOCK, BLOCK))
        is_blocked = isinstance(block, list | tuple) and tuple(block) == (BLOCK, BLOCK)
        return quantization.get("quant_method") == "fp8" and is_blocked

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        scales = ("F32", "BF16", "F16", "F8_E8M0", "U8")
        return (("F8_E4M3",), (rows, columns)), (scales, (-(-rows // BLOCK), columns // BLOCK))

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        codes, scales = tensors[0].view(torch.uint8).numpy(), tensors[1].reshape(-1, columns // BLOCK)
        if (codes & 0x7F == 0x7F).any():
            raise CheckpointError("a weight is 0x7f or 0xff, which stands for NaN: must be a number")
        spread = scales_of(scales).repeat_interleave(BLOCK, 0)[:rows].contiguous()
        of_rows = spread.numpy().view(np.uint8).reshape(rows, columns // BLOCK, 4)
        return codes.reshape(rows, columns // BLOCK, BLOCK), of_rows

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales = parts
        moved: Bytes = (
            (codes & np.uint8(0x78)) << np.uint8(1) | codes >> np.uint8(4) & np.uint8(8) | codes & np.uint8(7)
        )
        words = transposed(moved, 4)  # [..., 32 words, 16 outputs, 4]
        return np.concatenate((words.reshape(*codes.shape[:-2], -1), scales[..., 0, :]), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        moved = tiles[..., :_CODES_NBYTES].unflatten(-1, (BLOCK // 4, TILE_OUTPUTS, 4)).transpose(-2, -3).flatten(-2)
        codes = moved >> 1 & 0x78 | (moved & 8) << 4 | moved & 7  # [..., 16, 128]
        scales = tiles[..., _CODES_NBYTES:].clone().view(torch.float32)
        return codes.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)


def scales_of(stored: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scales in float32; a byte is an exponent, as in transformers. Raises CheckpointError."""
    scales = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"a scale is {scales[~scales.isfinite()][0].item()}: must be finite")
    return scales


FP8 = _Fp8()

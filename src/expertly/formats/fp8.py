"""FP8 (OCP's E4M3): with a scale for each 128 x 128 weights, as in DeepSeek-V3, Qwen3-FP8 and MiniMax-M2, for a
whole matrix, as AutoFP8 has it, or for a row.

A tile is, for each 4 inputs, 16 words of 4 bytes, one for each output, the first input in the lowest bits; then the
scale, a float32, or (fp8_rows) one for each output. A byte is a checkpoint's own with its sign moved: from the top
exponent (4 bits), sign, mantissa (3), so that sign and mantissa together are an index of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.layouts import WHERE, Header, Layout, block_of, is_plain, spread
from expertly.formats.mxfp4 import VALUES
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, TiledFormat, torch, transposed

BLOCK = 128
_CODES_NBYTES = TILE_OUTPUTS * BLOCK


class Fp8Format(TiledFormat):
    name = "fp8"
    kernel = 24
    group = BLOCK
    num_scales = 1  # of a tile
    tile_nbytes = _CODES_NBYTES + 4

    def __init__(
        self, suffixes: tuple[str, ...] = (".weight", ".weight_scale_inv"), stored: Sequence[int] | None = None
    ) -> None:
        """`stored`: the shape in which a checkpoint has the scales; None: there is one for each block."""
        self.suffixes, self._stored = suffixes, stored

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        scales = ("F32", "BF16", "F16", "F8_E8M0", "U8")
        blocks = (-(-rows // BLOCK), columns // BLOCK) if self._stored is None else tuple(self._stored)
        return (("F8_E4M3",), (rows, columns)), (scales, blocks)

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        codes, scales = tensors[0].view(torch.uint8).numpy(), scales_of(tensors[1])
        if (codes & 0x7F == 0x7F).any():
            raise CheckpointError("a weight is 0x7f or 0xff, which stands for NaN: must be a number")
        width = columns // BLOCK
        if self._stored is None:
            factors = scales.reshape(-1, width).repeat_interleave(BLOCK, 0)[:rows].contiguous()
        else:
            factors = scales.reshape(-1, 1).repeat(rows // scales.numel(), width)
        return codes.reshape(rows, width, BLOCK), factors.numpy().view(np.uint8).reshape(rows, width, 4)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales = parts
        words = transposed(sign_moved(codes), 4)  # [..., 32 words, 16 outputs, 4]
        of_tile = scales[..., : self.num_scales, :].reshape(*codes.shape[:-2], -1)
        return np.concatenate((words.reshape(*codes.shape[:-2], -1), of_tile), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        moved = tiles[..., :_CODES_NBYTES].unflatten(-1, (BLOCK // 4, TILE_OUTPUTS, 4)).transpose(-2, -3).flatten(-2)
        scales = tiles[..., _CODES_NBYTES:].clone().view(torch.float32)
        return moved_values(moved) * scales.unsqueeze(-1)


def sign_moved(codes: Bytes) -> Bytes:
    """Bytes of E4M3 as tiles have them."""
    moved: Bytes = (codes & np.uint8(0x78)) << np.uint8(1) | codes >> np.uint8(4) & np.uint8(8) | codes & np.uint8(7)
    return moved


def moved_values(moved: torch.Tensor) -> torch.Tensor:
    """The numbers of bytes of tiles."""
    codes = moved >> 1 & 0x78 | (moved & 8) << 4 | moved & 7
    return codes.view(torch.float8_e4m3fn).float()


def scales_of(stored: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scales in float32; a byte is an exponent, as in transformers. Raises CheckpointError."""
    scales = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"a scale is {scales[~scales.isfinite()][0].item()}: must be finite")
    return scales


class Fp8RowsFormat(Fp8Format):
    """With a scale for each output."""

    name = "fp8_rows"
    kernel = 25
    num_scales = TILE_OUTPUTS
    tile_nbytes = _CODES_NBYTES + TILE_OUTPUTS * 4


FP8, FP8_ROWS = Fp8Format(), Fp8RowsFormat(stored=(-1, 1))


@cache
def fp8_form(suffixes: tuple[str, ...], shape: tuple[int, ...], scales: tuple[int, ...]) -> TiledFormat | None:
    """The format of weights of `shape` with so many scales, from tensors with these endings."""
    if len(shape) != 2:
        return None
    if all(size == 1 for size in scales):
        return Fp8Format(suffixes, scales)
    block = block_of(shape, scales, (BLOCK, BLOCK))
    if block == (1, shape[1]):
        return Fp8RowsFormat(suffixes, scales)
    return Fp8Format(suffixes) if block == (BLOCK, BLOCK) else None


# -- checkpoints -------------------------------------------------------------------------------------------------------

_IN_FP4 = ("I8", "U8", "F4")
"""Dtypes of two E2M1 numbers in a byte, which DeepSeek-V4 has in experts."""


class Fp8Layout(Layout):
    """`quant_method` fp8: a scale for each block of `weight_block_size` weights, of which the last of a row and of a
    column may be cut; or for a matrix or each of its rows. Transformers divides rows and columns evenly by the number
    of scales, and so gives 192 rows in blocks of 128 the wrong ones.
    """

    suffixes = (".weight", ".weight_scale_inv")
    fused = ("_proj", "_proj_scale_inv")
    renamed: Mapping[str, str] = {
        ".weight_scale": ".weight_scale_inv",
        ".qscale_weight": ".weight_scale_inv",  # Mistral's
        ".scale": ".weight_scale_inv",  # DeepSeek-V4's
        "_proj_scale": "_proj_scale_inv",
    }
    ignored = (*Layout.ignored, ".qscale_act")

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        block = quantization.get("weight_block_size", (BLOCK, BLOCK))
        is_block = isinstance(block, list | tuple) and len(block) == 2
        if block is not None and not (is_block and all(type(size) is int and 0 < size < 1 << 31 for size in block)):
            raise UnsupportedModelError(
                f"{WHERE}.weight_block_size={block!r:.80}: must be two whole numbers above 0, or null"
            )
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        self._may_be_one = quantization.get("weight_block_size") is None
        self._is_fp4 = quantization.get("expert_dtype") == "fp4"

    def check(self, stem: str, tensors: Mapping[str, Header]) -> None:
        numbers, (dtype, shape) = next(iter(tensors.items()))
        is_fp4 = self._is_fp4 and dtype in _IN_FP4
        if is_plain(tensors) or not (dtype.startswith("F8_") or is_fp4) or len(shape) < 2:
            return
        ending = (self.fused if numbers in self.fused else self.suffixes)[1]
        if ending not in tensors:
            raise CheckpointError(f"tensor '{stem}{numbers}': {dtype}, and there is no {stem}{ending} beside it")
        scales = tensors[ending]
        try:
            self._block_of((*shape[:-1], shape[-1] * 2) if is_fp4 else shape, scales[1], is_fp4)
        except CheckpointError as error:
            raise CheckpointError(f"scales of tensor '{stem}{numbers}': {error}") from None

    def _block_of(self, shape: Sequence[int], scales: Sequence[int], is_fp4: bool) -> tuple[int, int]:
        """The rows and columns that share a scale. Raises CheckpointError where scales of this shape are none of it."""
        *lead, rows, columns = shape
        block = (1, 32) if is_fp4 else self._block or (1, columns)
        expected = [*lead, -(-rows // block[0]), -(-columns // block[1])]
        if list(scales) == expected:
            return block
        made = block_of(shape, scales, None) if self._may_be_one and not is_fp4 else None
        if made is not None and made[1] == columns:
            return made
        raise CheckpointError(
            f"shape {list(scales)}: must be {expected} for {list(shape)} weights, as config.json has it "
            f"(weight_block_size={self._block and list(self._block)})"
        )

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        (dtype, shape), *scales = tensors.values()
        if len(scales) != 1 or not dtype.startswith("F8_"):
            return None
        return fp8_form(tuple(tensors), shape, scales[0][1])

    def usual_form(self) -> TiledFormat | None:
        return FP8 if self._block == (BLOCK, BLOCK) else None

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In float32; one without scales as it is."""
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        codes, scales = tensors.values()
        is_fp4 = codes.dtype in (torch.int8, torch.uint8)
        if is_fp4 and not self._is_fp4:
            raise CheckpointError(f"weights in {codes.dtype}: must be FP8, as config.json has it")
        values = e2m1_values(codes) if is_fp4 else fp8_values(codes)
        block = self._block_of(values.shape, scales.shape, is_fp4)
        return values.mul_(spread(scales_of(scales), values.shape, block))


def fp8_values(codes: torch.Tensor) -> torch.Tensor:
    """In float32. Raises CheckpointError where one is NaN."""
    values = codes.float()
    if bool(values.isnan().any()):
        raise CheckpointError("a weight is 0x7f or 0xff, which stands for NaN: must be a number")
    return values


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] in float32 from bytes [..., n], the lower four bits first."""
    pairs = codes.view(torch.uint8)
    return torch.tensor(VALUES, device=codes.device)[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).int()]

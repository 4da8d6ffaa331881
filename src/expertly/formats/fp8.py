"""FP8 (OCP's E4M3): with a scale for each 128 x 128 weights, as in DeepSeek-V3, Qwen3-FP8 and MiniMax-M2, for a
whole matrix, as AutoFP8 has it, or for a row.

A tile is, for each 4 inputs, 16 words of 4 bytes, one for each output, the first input in the lowest bits; then the
scale, a float32, or (fp8_rows) one for each output. A byte is a checkpoint's own with its sign moved: from the top
exponent (4 bits), sign, mantissa (3), so that sign and mantissa together are an index of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.layouts import WHERE, Accepted, Header, Layout
from expertly.formats.matrix import Bytes, Matrix, block_of, torch
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat, transposed

BLOCK = 128
_CODES_NBYTES = TILE_OUTPUTS * BLOCK


class Fp8Format(TiledFormat):
    group = BLOCK

    def __init__(self, name: str, kernel: int, num_scales: int) -> None:
        """`num_scales`: of a tile."""
        self.name, self.kernel, self._num_scales = name, kernel, num_scales
        self.tile_nbytes = _CODES_NBYTES + 4 * num_scales

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        codes, scales = matrix.numbers.view(torch.uint8).numpy(), matrix.finite_scales().float()
        rows, width = len(codes), codes.shape[1] // BLOCK
        if (codes & 0x7F == 0x7F).any():
            raise CheckpointError("a weight is 0x7f or 0xff, which stands for NaN: must be a number")
        if self._num_scales == 1 and scales.numel() > 1:  # of blocks
            factors = scales.reshape(-1, width).repeat_interleave(BLOCK, 0)[:rows].contiguous()
        else:
            factors = scales.reshape(-1, 1).repeat(rows // scales.numel(), width)
        return codes.reshape(rows, width, BLOCK), factors.numpy().view(np.uint8).reshape(rows, width, 4)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, scales = parts
        words = transposed(sign_moved(codes), 4)  # [..., 32 words, 16 outputs, 4]
        of_tile = scales[..., : self._num_scales, :].reshape(*codes.shape[:-2], -1)
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


FP8, FP8_ROWS = Fp8Format("fp8", 23, 1), Fp8Format("fp8_rows", 24, TILE_OUTPUTS)


def fp8_form(numbers: Header, scales: tuple[int, ...]) -> TiledFormat | None:
    """The format of weights with scales of this shape."""
    dtype, shape = numbers
    if dtype != "F8_E4M3":
        return None
    block = block_of(shape, scales, (BLOCK, BLOCK))
    if block in ((BLOCK, BLOCK), tuple(shape[-2:])):
        return FP8
    return FP8_ROWS if block == (1, shape[-1]) else None


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

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> tuple[str, ...]:
        numbers, (dtype, shape) = next(iter(tensors.items()))
        endings = next((each for each in (self.suffixes, self.fused) if each[0] == numbers), ())
        is_quantised = tensors.keys() > {numbers} or dtype.startswith("F8_") or (self._is_fp4 and dtype in _IN_FP4)
        return endings if len(shape) > 1 and is_quantised else ()

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        dtype, shape = next(iter(tensors.values()))
        return [*shape[:-1], shape[-1] * 2 if dtype in _IN_FP4 else shape[-1]]

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        (numbers, (dtype, shape)), (scales, (_, of_scales)) = tensors.items()
        (*lead, rows, columns), is_fp4 = size, dtype in _IN_FP4
        block = (1, 32) if is_fp4 else self._block or (1, columns)
        shapes = [[*lead, -(-rows // block[0]), -(-columns // block[1])]]
        if self._may_be_one and not is_fp4:
            shapes += [[*lead, *of_all] for of_all in ([], [1], [1, 1], [rows, 1])] + ([] if lead else [[rows]])
        elif not lead and not is_fp4 and of_scales in ((), (1,)):
            shapes.append([*of_scales])  # of a table beside blocks, as in Qwen3.8-Flash-Next
        return {numbers: ((dtype,), [shape]), scales: (("F32", "BF16", "F16", "F8_E8M0", "U8"), shapes)}

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        numbers, *scales = tensors.values()
        if numbers[0] in _IN_FP4:
            return MXFP4 if scales[0][0] in ("F8_E8M0", "U8") else None
        return fp8_form(numbers, scales[0][1]) if len(scales) == 1 else None

    def usual_form(self) -> TiledFormat | None:
        if self._is_fp4:
            return MXFP4
        return FP8 if self._block == (BLOCK, BLOCK) else None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        codes, scales = tensors.values()
        is_exponent = scales.dtype == torch.float8_e8m0fnu and codes.dtype in (torch.int8, torch.uint8)
        scales = scales.view(torch.uint8) if is_exponent else scales
        scales = scales if scales.dtype == torch.uint8 else scales.float()
        if codes.dtype not in (torch.int8, torch.uint8):
            return Matrix(codes, scales, block=self._block)
        if not self._is_fp4:
            raise CheckpointError(f"weights in {codes.dtype}: must be FP8, as config.json has it")
        return Matrix(codes, scales, 4, 2 * codes.shape[-1], is_e2m1=True, block=(1, 32))


class FbgemmLayout(Fp8Layout):
    """`quant_method` fbgemm_fp8: a scale for each output. Llama 4's stacked experts are [E, inputs, outputs]."""

    is_fused_turned = True

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        super().__init__({"weight_block_size": None}, dtype)

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        if self.fused[0] not in tensors:
            return super().accepted(stem, tensors, size)
        *lead, _, outputs = size
        shapes = [[*lead, 1, outputs], [*lead, outputs, 1]]  # the latter of down, whatever the order of its numbers
        return {self.fused[0]: (("F8_E4M3",), [size]), self.fused[1]: (("F32", "BF16", "F16"), shapes)}

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return None if self.fused[0] in tensors else super().form_of(stem, tensors)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        if self.fused[0] not in tensors:
            return super().read(tensors)
        codes, scales = tensors.values()
        *lead, inputs, outputs = codes.shape
        return Matrix(codes, scales.float().reshape(*lead, 1, outputs), block=(inputs, 1))

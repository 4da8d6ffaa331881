"""The block types of GGUF files, of which llama.cpp's quantisations are made, and their tiles.

A row of a GGUF matrix is blocks of 32, 64 or 256 inputs, each with its scales beside its codes. A tile is 16 such
blocks, one for each output: as they are, or rearranged:

- 4-bit codes like in MXFP4: for each 8 inputs 16 words, one for each output;
- 8-bit codes in words of 4 inputs: of every 8 inputs those at even places, then those at odd ones, which is how a
  kernel gets 4-bit codes out of a word with a mask;
- 2-bit codes, or further bits of a code, at the byte of the word where such a mask leaves its 4 bits;
- scales and minima: 16 numbers each.

The reference is the package gguf (quants.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import CheckpointError
from expertly.formats.mxfp4 import _Mxfp4
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, RoundingFormat, TiledFormat, nearest_codes, torch

_MAX_HALF = 65504.0

_Halves = np.ndarray[Any, np.dtype[np.float16]]


class _GgufBlocks(TiledFormat):
    """A matrix is one tensor, bytes [rows, blocks of a row * their bytes], and one part, a block for each group."""

    suffixes = ("",)
    type: str
    """GGUF's name of the type."""
    halves: tuple[int, ...]
    """Places of the float16 numbers in a block."""

    @property
    def block_nbytes(self) -> int:
        return self.tile_nbytes // TILE_OUTPUTS

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (((self.type,), (rows, columns)),)

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        (tensor,) = tensors
        blocks = tensor.numpy().reshape(rows, columns // self.group, self.block_nbytes)
        if any(not np.isfinite(scales).all() for scales in self._scales(blocks)):
            raise CheckpointError(f"a scale that is no finite number, in a block of {self.type}")
        return (blocks,)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (blocks,) = parts
        return np.concatenate([one.reshape(*blocks.shape[:-2], -1) for one in self._split(blocks)], axis=-1)

    def _scales(self, blocks: Bytes) -> Iterable[_Halves]:
        return [np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16) for place in self.halves]

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        """The parts of a tile, in order, from its 16 blocks [..., 16, block_nbytes]."""
        raise NotImplementedError


class _ScaledCodes(_GgufBlocks, RoundingFormat):
    """A scale times codes of 32 inputs."""

    codes: tuple[int, int]
    """The least and the largest."""
    shares: tuple[float, ...]
    """Scales to try, as shares of the one that gives a group's largest weight the least code; smaller ones clip it."""

    def encode(self, weights: torch.Tensor) -> tuple[Bytes, ...]:
        """The largest weight gets the least code, as there is one more code below 0; so the scale may be negative."""
        groups, least = weights.reshape(len(weights), -1, self.group), self.codes[0]
        largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        scales = [(largest * (one / least)).clamp_(-_MAX_HALF, _MAX_HALF).half().float() for one in self.shares]
        codes, chosen = nearest_codes(groups, scales, self.codes)
        return (
            np.concatenate((chosen.half().view(torch.uint8).numpy(), self._bytes_of(codes.char().numpy())), axis=-1),
        )

    def _bytes_of(self, codes: npt.NDArray[np.int8]) -> Bytes:
        """A block's bytes of codes [..., 32]."""
        raise NotImplementedError


class _Q8_0(_ScaledCodes):
    codes, shares = (-128, 127), (1.0,)
    name, type, kernel = "q8_0", "Q8_0", 1
    group, tile_nbytes, halves = 32, TILE_OUTPUTS * 34, (0,)

    def _bytes_of(self, codes: npt.NDArray[np.int8]) -> Bytes:
        return codes.view(np.uint8)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        apart = blocks[..., 2:].reshape(*blocks.shape[:-1], 4, 4, 2).swapaxes(-1, -2)
        return _dwords(apart.reshape(*blocks.shape[:-1], 32)), blocks[..., :2]

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        words = tiles[..., :512].view(torch.int8).unflatten(-1, (4, 2, 16, 4))  # [8 inputs, even or odd, output, place]
        codes = words.permute(*range(words.dim() - 4), -2, -4, -1, -3).flatten(-3)
        return codes.float() * _numbers(tiles, 512).unsqueeze(-1)


class _Q32(_GgufBlocks):
    """Codes of 4 or 5 bits of 32 inputs: (code - 8 or 16) * scale, or code * scale + minimum."""

    group = 32

    def __init__(self, type: str, kernel: int, has_fifth_bits: bool, has_minimum: bool) -> None:
        self.name, self.type, self.kernel = type.lower(), type, kernel
        self._has_fifth_bits, self._has_minimum = has_fifth_bits, has_minimum
        self.halves = (0, 2) if has_minimum else (0,)
        self._scales_at = 320 if has_fifth_bits else 256
        self.tile_nbytes = self._scales_at + 32 * len(self.halves)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        parts = [_packed(_fields(blocks[..., -16:], 16, 4), 4)]
        if self._has_fifth_bits:
            parts.append(_packed(np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little"), 1))
        return *parts, *(blocks[..., place : place + 2] for place in self.halves)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        codes = _unpacked(tiles[..., :256], 4)
        if self._has_fifth_bits:
            codes |= _unpacked(tiles[..., 256:320], 1) << 4
        scales = _numbers(tiles, self._scales_at).unsqueeze(-1)
        if not self._has_minimum:
            return (codes.float() - (16 if self._has_fifth_bits else 8)) * scales
        return codes.float() * scales + _numbers(tiles, self._scales_at + 32).unsqueeze(-1)


class _Q4_0(_Q32, _ScaledCodes):
    codes, shares = (-8, 7), (1.0, 0.9)

    def __init__(self) -> None:
        super().__init__("Q4_0", 2, has_fifth_bits=False, has_minimum=False)

    def _bytes_of(self, codes: npt.NDArray[np.int8]) -> Bytes:
        nibbles: Bytes = (codes + 8).astype(np.uint8)
        return _pairs(np.stack((nibbles[..., :16], nibbles[..., 16:]), axis=-1).reshape(nibbles.shape))


class _ScaledGroups(_GgufBlocks):
    """Codes of 4 or 5 bits of 256 inputs. Each 32 have a scale and a minimum of 6 bits, multiples of the block's."""

    group, halves = 256, (0, 2)

    def __init__(self, type: str, kernel: int, has_fifth_bits: bool) -> None:
        self.name, self.type, self.kernel = type.lower(), type, kernel
        self._has_fifth_bits = has_fifth_bits
        self.tile_nbytes = TILE_OUTPUTS * (176 if has_fifth_bits else 144)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        parts = [_packed(_fields(blocks[..., -128:], 32, 4), 4)]
        if self._has_fifth_bits:
            parts.append(_packed(_fields(blocks[..., 16:48], 32, 1), 1))
        return *parts, _dwords(blocks[..., 4:16]), blocks[..., :2], blocks[..., 2:4]

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        codes, scales_at = _unpacked(tiles[..., :2048], 4), 2048
        if self._has_fifth_bits:
            codes, scales_at = codes | _unpacked(tiles[..., 2048:2560], 1) << 4, 2560
        rest = tiles[..., scales_at:]
        low, high, both = rest[..., :192].unflatten(-1, (3, 16, 4)).unbind(-3)  # [..., 16, 4]
        scales = torch.cat((low & 63, both & 15 | low >> 6 << 4), dim=-1).float() * _numbers(rest, 192).unsqueeze(-1)
        minima = torch.cat((high & 63, both >> 4 | high >> 6 << 4), dim=-1).float() * _numbers(rest, 224).unsqueeze(-1)
        return codes.float() * scales.repeat_interleave(32, dim=-1) - minima.repeat_interleave(32, dim=-1)


class _Q6_K(_GgufBlocks):
    """6-bit codes less 32, of 256 inputs. Each 16 have a scale of 8 bits, a multiple of the block's."""

    name, type, kernel = "q6_k", "Q6_K", 5
    group, tile_nbytes, halves = 256, TILE_OUTPUTS * 210, (208,)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        low, high = _fields(blocks[..., :128], 64, 4), _fields(blocks[..., 128:192], 32, 2)
        return _packed(low, 4), _packed(high, 2), blocks[..., 192:208].swapaxes(-1, -2), blocks[..., 208:]

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        codes = _unpacked(tiles[..., :2048], 4) | _unpacked(tiles[..., 2048:3072], 2) << 4
        scales = _of_rows(tiles[..., 3072:3328].view(torch.int8)).float() * _numbers(tiles, 3328).unsqueeze(-1)
        return (codes.float() - 32) * scales.repeat_interleave(16, dim=-1)


class _Q2_K(_GgufBlocks):
    """2-bit codes of 256 inputs. Each 16 have a scale and a minimum of 4 bits, multiples of the block's."""

    name, type, kernel = "q2_k", "Q2_K", 9
    group, tile_nbytes, halves = 256, TILE_OUTPUTS * 84, (80, 82)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        codes = _packed(_fields(blocks[..., 16:80], 32, 2), 2)
        return codes, blocks[..., :16].swapaxes(-1, -2), blocks[..., 80:82], blocks[..., 82:]

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        both = _of_rows(tiles[..., 1024:1280])
        scales = (both & 15).float() * _numbers(tiles, 1280).unsqueeze(-1)
        minima = (both >> 4).float() * _numbers(tiles, 1312).unsqueeze(-1)
        codes = _unpacked(tiles[..., :1024], 2).float()
        return codes * scales.repeat_interleave(16, dim=-1) - minima.repeat_interleave(16, dim=-1)


class _Q3_K(_GgufBlocks):
    """3-bit codes less 4, of 256 inputs. Each 16 have a scale of 6 bits, less 32, a multiple of the block's."""

    name, type, kernel = "q3_k", "Q3_K", 10
    group, tile_nbytes, halves = 256, TILE_OUTPUTS * 110, (108,)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        low, high = _fields(blocks[..., 32:96], 32, 2), _fields(blocks[..., :32], 32, 1)
        return _packed(low, 2), _packed(high, 1), _dwords(blocks[..., 96:108]), blocks[..., 108:]

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        codes = _unpacked(tiles[..., :1024], 2) | _unpacked(tiles[..., 1024:1536], 1) << 2
        bits = tiles[..., 1536:1728].unflatten(-1, (3, 16, 4))
        low = torch.cat([bits[..., i, :, :] >> shift & 15 for shift in (0, 4) for i in (0, 1)], dim=-1)
        high = torch.cat([bits[..., 2, :, :] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
        scales = ((low | high << 4).float() - 32) * _numbers(tiles, 1728).unsqueeze(-1)
        return (codes.float() - 4) * scales.repeat_interleave(16, dim=-1)


class _IQ4_NL(_Q32):
    """Codes of 4 bits, which number 16 values."""

    def __init__(self) -> None:
        super().__init__("IQ4_NL", 11, has_fifth_bits=False, has_minimum=False)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        return _iq4_values(_unpacked(tiles[..., :256], 4)) * _numbers(tiles, 256).unsqueeze(-1)


class _IQ4_XS(_GgufBlocks):
    """The same of 256 inputs. Each 32 have a scale of 6 bits, less 32, a multiple of the block's."""

    name, type, kernel = "iq4_xs", "IQ4_XS", 12
    group, tile_nbytes, halves = 256, TILE_OUTPUTS * 136, (0,)

    def _split(self, blocks: Bytes) -> Sequence[Bytes]:
        codes = _packed(_fields(blocks[..., 8:], 16, 4), 4)
        return codes, blocks[..., 4:8], blocks[..., 2:4], blocks[..., :2]

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        low, high = tiles[..., 2048:2112].unflatten(-1, (16, 4)), tiles[..., 2112:2144].unflatten(-1, (16, 2))
        low = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
        high = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
        scales = ((low | high << 4).float() - 32) * _numbers(tiles, 2144).unsqueeze(-1)
        return _iq4_values(_unpacked(tiles[..., :2048], 4)) * scales.repeat_interleave(32, dim=-1)


class _AsStored(_GgufBlocks):
    """A tile is the blocks as they are, one after the other. The package decodes them, on the host."""

    def __init__(self, type: str, kernel: int, group: int, block_nbytes: int, *halves: int) -> None:
        self.name, self.type, self.kernel = type.lower(), type, kernel
        self.group, self.tile_nbytes, self.halves = group, TILE_OUTPUTS * block_nbytes, halves

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (blocks,) = parts
        return blocks.reshape(*blocks.shape[:-2], -1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        from gguf import GGMLQuantizationType, quants

        if tiles.is_meta:
            return torch.empty(*tiles.shape[:-1], TILE_OUTPUTS, self.group, device=tiles.device)
        blocks = tiles.cpu().unflatten(-1, (TILE_OUTPUTS, -1)).numpy()
        return torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[self.type])).to(tiles.device)


class _IQ1_M(_AsStored):
    """Whose float16 number lies in four places."""

    def _scales(self, blocks: Bytes) -> Iterable[_Halves]:
        words = np.ascontiguousarray(blocks[..., 48:56]).view(np.uint16) & np.uint16(0xF000)
        return [np.bitwise_or.reduce(words >> np.array([12, 8, 4, 0], np.uint16), axis=-1).view(np.float16)]


class _GgufMxfp4(_Mxfp4):
    """GGUF's MXFP4: a block is its scale, then 16 bytes, whose low halves are the first 16 inputs."""

    suffixes: tuple[str, ...] = ("",)

    def is_of(self, quantization: Mapping[str, Any], dtypes: Mapping[str, str], dtype: str) -> bool:
        return False

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return ((("MXFP4",), (rows, columns)),)

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        blocks = tensors[0].numpy().reshape(rows, columns // 32, 17)
        codes = _pairs(_fields(blocks[..., 1:], 16, 4))
        parts = (torch.from_numpy(np.ascontiguousarray(one)) for one in (codes, blocks[..., 0]))
        return super().parts_of(tuple(parts), rows, columns)


Q8_0, Q4_0 = _Q8_0(), _Q4_0()
_Q4_K, _Q5_K = _ScaledGroups("Q4_K", 3, has_fifth_bits=False), _ScaledGroups("Q5_K", 4, has_fifth_bits=True)
_Q4_1 = _Q32("Q4_1", 6, has_fifth_bits=False, has_minimum=True)
_Q5_0 = _Q32("Q5_0", 7, has_fifth_bits=True, has_minimum=False)
_Q5_1 = _Q32("Q5_1", 8, has_fifth_bits=True, has_minimum=True)
GGUF_FORMATS = (
    *(Q8_0, Q4_0, _Q4_K, _Q5_K, _Q6_K(), _Q4_1, _Q5_0, _Q5_1),
    *(_Q2_K(), _Q3_K(), _IQ4_NL(), _IQ4_XS()),
    _AsStored("IQ2_XXS", 14, 256, 66, 0),
    _AsStored("IQ2_XS", 15, 256, 74, 0),
    _AsStored("IQ2_S", 16, 256, 82, 0),
    _AsStored("IQ3_XXS", 17, 256, 98, 0),
    _AsStored("IQ3_S", 18, 256, 110, 0),
    _AsStored("IQ1_S", 19, 256, 50, 0),
    _IQ1_M("IQ1_M", 20, 256, 56),
    _AsStored("TQ1_0", 21, 256, 54, 52),
    _AsStored("TQ2_0", 22, 256, 66, 64),
    _AsStored("NVFP4", 23, 64, 36),
)

OF_GGUF_TYPE: dict[str, TiledFormat] = {**{one.type: one for one in GGUF_FORMATS}, "MXFP4": _GgufMxfp4()}
"""The format of a GGUF matrix, by GGUF's name of its type."""


def grids() -> bytes:
    """GRIDS of native/blocks.h: the package's grids, and the values of IQ4_NL, more by 128."""
    from gguf import quants

    tables = []
    for kind in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S, quants.IQ1_S):
        kind.init_grid()
        tables.append(np.asarray(kind.grid, np.int8).tobytes())
    return b"".join(tables) + (np.array(quants.IQ4_NL.kvalues) + 128).astype(np.uint8).tobytes()


# -- bytes of blocks, [..., 16 outputs, n] -----------------------------------------------------------------------------


def _fields(data: Bytes, width: int, num_bits: int) -> Bytes:
    """Numbers [..., 8 / num_bits * n] of n bytes: of each `width` bytes those in the lowest bits, then the next."""
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    fields = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts & np.uint8((1 << num_bits) - 1)
    return fields.reshape(*data.shape[:-1], -1)


def _pairs(codes: Bytes) -> Bytes:
    """Bytes with two codes each, the first in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] * np.uint8(16)


def _dwords(data: Bytes) -> Bytes:
    """[..., n / 4, 16, 4]: 4-byte words, for each the 16 outputs."""
    return data.reshape(*data.shape[:-1], -1, 4).swapaxes(-2, -3)


def _packed(numbers: Bytes, num_bits: int) -> Bytes:
    """Words of numbers: of all inputs of a word first those whose 4-bit codes are in byte 0 of theirs, then byte 1."""
    if num_bits == 4:
        return _dwords(_pairs(numbers))
    apart = numbers.reshape(*numbers.shape[:-1], -1, 4 // num_bits, 4, 2)  # words, of 8 inputs, byte, even or odd
    packed = np.zeros((*apart.shape[:-3], 4), np.uint8)
    for place in range(8 // num_bits):
        packed |= apart[..., place // 2, :, place % 2] << np.uint8(place * num_bits)
    return _dwords(packed.reshape(*numbers.shape[:-1], -1))


# -- numbers of tiles, [..., bytes] ------------------------------------------------------------------------------------


def _numbers(tiles: torch.Tensor, place: int) -> torch.Tensor:
    """The 16 float16 numbers at `place`, as float32 [..., 16]."""
    return tiles[..., place : place + 32].contiguous().view(torch.float16).float()


def _unpacked(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The inverse of `_packed`: numbers [..., 16, inputs]."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=words.device)
    numbers = (words.unflatten(-1, (-1, 16, 4, 1)) >> shifts) & (1 << num_bits) - 1  # [..., words, 16, 4, of a byte]
    apart = numbers.unflatten(-1, (-1, 2)).transpose(-2, -3)  # of 8 inputs, byte, even or odd
    return apart.movedim(-5, -4).flatten(-4)


def _of_rows(numbers: torch.Tensor) -> torch.Tensor:
    """[..., 16 outputs, n] of n times 16 numbers."""
    return numbers.unflatten(-1, (-1, 16)).transpose(-1, -2)


def _iq4_values(codes: torch.Tensor) -> torch.Tensor:
    from gguf.quants import IQ4_NL

    return torch.tensor(IQ4_NL.kvalues, dtype=torch.float32, device=codes.device)[codes.int()]

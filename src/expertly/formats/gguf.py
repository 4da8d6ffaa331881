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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from expertly.core.errors import CheckpointError
from expertly.formats.halves import HALVES
from expertly.formats.layouts import FLOATS, Accepted, Header, Layout
from expertly.formats.matrix import Bytes, Matrix, torch
from expertly.formats.mxfp4 import Mxfp4Format
from expertly.formats.nvfp4 import Nvfp4Format
from expertly.formats.tiles import TILE_OUTPUTS, RoundingFormat, TiledFormat, nearest_codes

_MAX_HALF = 65504.0

_Halves = np.ndarray[Any, np.dtype[np.float16]]


class _GgufBlocks(TiledFormat):
    """A matrix is bytes [rows, blocks of a row * their bytes], and one part, a block for each group."""

    def __init__(self, type: str, kernel: int, group: int, block_nbytes: int, *halves: int) -> None:
        """`type`: GGUF's name of it. `halves`: the places of the float16 numbers in a block."""
        self.name, self.type, self.kernel, self.group = type.lower(), type, kernel, group
        self.block_nbytes, self.tile_nbytes, self._halves = block_nbytes, TILE_OUTPUTS * block_nbytes, halves

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        blocks = matrix.numbers.numpy().reshape(len(matrix.numbers), -1, self.block_nbytes)
        if any(not np.isfinite(scales).all() for scales in self._scales(blocks)):
            raise CheckpointError(f"a scale that is no finite number, in a block of {self.type}")
        return (blocks,)

    def _scales(self, blocks: Bytes) -> Iterable[_Halves]:
        return [np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16) for place in self._halves]


class _AsStored(_GgufBlocks):
    """A tile is the blocks as they are, one after the other. The package decodes them, on the host."""

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (blocks,) = parts
        return blocks.reshape(*blocks.shape[:-2], -1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        from gguf import GGMLQuantizationType, quants

        if tiles.is_meta:
            return torch.empty(*tiles.shape[:-1], TILE_OUTPUTS, self.group, device=tiles.device)
        blocks = tiles.cpu().unflatten(-1, (TILE_OUTPUTS, -1)).numpy()
        return torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[self.type])).to(tiles.device)


class _TQ1_0(_GgufBlocks):
    """A tile is words of 4 bytes, each of which has five digits or four; then the scales."""

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (blocks,) = parts
        words, scales = _dwords(blocks[..., :52]), blocks[..., 52:]
        return np.concatenate([part.reshape(*blocks.shape[:-2], -1) for part in (words, scales)], axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        bytes_of = tiles[..., :832].unflatten(-1, (-1, 16, 4)).transpose(-2, -3).flatten(-2).int()  # [..., 16, 52]
        parts = [
            (part.unsqueeze(-2) * 3 ** torch.arange(num, device=tiles.device).unsqueeze(-1) & 255).flatten(-2)
            for part, num in zip(bytes_of.split((32, 16, 4), dim=-1), (5, 5, 4), strict=True)
        ]
        return ((torch.cat(parts, dim=-1) * 3 >> 8) - 1).float() * _numbers(tiles, 832).unsqueeze(-1)


class _IQ1_M(_AsStored):
    """Whose float16 number lies in four places."""

    def _scales(self, blocks: Bytes) -> Iterable[_Halves]:
        words = np.ascontiguousarray(blocks[..., 48:56]).view(np.uint16) & np.uint16(0xF000)
        return [np.bitwise_or.reduce(words >> np.array([12, 8, 4, 0], np.uint16), axis=-1).view(np.float16)]


Scales: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""Scales and minima [..., 16, n], each of group / n inputs."""
Rest = int | tuple[int, int, Callable[[Bytes], Bytes]]


class _Rearranged(_GgufBlocks):
    """A weight is (code - middle) * scale - minimum. A tile is planes of codes, then 16 times each of the `rest`."""

    def __init__(
        self,
        type: str,
        kernel: int,
        group: int,
        planes: Sequence[tuple[int, int, int, int]],
        rest: Sequence[Rest],
        scales: Callable[[torch.Tensor], Scales],
        middle: int = 0,
    ) -> None:
        """`planes`: from, to, width, bits: of each `width` bytes the lowest bits are codes, then the next; a code's
        further bits are in a further plane. `rest`: a float16 number's place, or from, to, and how these bytes of 16
        blocks lie in a tile. `scales`: of the rest of a tile.
        """
        halves = [item for item in rest if isinstance(item, int)]
        self._rest = [(item, item + 2, _as_it_is) if isinstance(item, int) else item for item in rest]
        self._planes, self._scales_of, self._middle = planes, scales, middle
        ends = [plane[:2] for plane in planes] + [item[:2] for item in self._rest]
        super().__init__(type, kernel, group, sum(end - begin for begin, end in ends), *halves)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (blocks,) = parts
        made = [_packed(_fields(blocks[..., begin:end], width, bits), bits) for begin, end, width, bits in self._planes]
        made += [arranged(blocks[..., begin:end]) for begin, end, arranged in self._rest]
        return np.concatenate([part.reshape(*blocks.shape[:-2], -1) for part in made], axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        codes: Any = 0
        place = shift = 0
        for begin, end, _, bits in self._planes:
            plane = tiles[..., place : place + TILE_OUTPUTS * (end - begin)]
            codes = codes | _unpacked(plane, bits) << shift
            place, shift = place + plane.shape[-1], shift + bits
        scales, minima = self._scales_of(tiles[..., place:])
        weights = self._values(codes) * scales.repeat_interleave(self.group // scales.shape[-1], dim=-1)
        return weights if minima is None else weights - minima.repeat_interleave(self.group // minima.shape[-1], dim=-1)

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float() - self._middle if self._middle else codes.float()


class _Iq4(_Rearranged):
    """Whose codes number 16 values."""

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        from gguf.quants import IQ4_NL

        return torch.tensor(IQ4_NL.kvalues, dtype=torch.float32, device=codes.device)[codes.int()]


class _Q8_0(_GgufBlocks, RoundingFormat):
    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        (blocks,) = parts
        apart = blocks[..., 2:].reshape(*blocks.shape[:-1], 4, 4, 2).swapaxes(-1, -2)
        words = _dwords(apart.reshape(*blocks.shape[:-1], 32))
        return np.concatenate([part.reshape(*blocks.shape[:-2], -1) for part in (words, blocks[..., :2])], axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        words = tiles[..., :512].view(torch.int8).unflatten(-1, (4, 2, 16, 4))  # [8 inputs, even or odd, output, place]
        codes = words.permute(*range(words.dim() - 4), -2, -4, -1, -3).flatten(-3)
        return codes.float() * _numbers(tiles, 512).unsqueeze(-1)

    def encode(self, weights: torch.Tensor) -> tuple[Bytes, ...]:
        codes, scales = _rounded(weights, -128, (1.0,))
        return (np.concatenate((scales, codes.view(np.uint8)), axis=-1),)


class _Q4_0(_Rearranged, RoundingFormat):
    def encode(self, weights: torch.Tensor) -> tuple[Bytes, ...]:
        codes, scales = _rounded(weights, -8, (1.0, 0.9))
        nibbles: Bytes = (codes + 8).astype(np.uint8)
        pairs = _pairs(np.stack((nibbles[..., :16], nibbles[..., 16:]), axis=-1).reshape(nibbles.shape))
        return (np.concatenate((scales, pairs), axis=-1),)


def _rounded(weights: torch.Tensor, least: int, shares: Sequence[float]) -> tuple[npt.NDArray[np.int8], Bytes]:
    """Codes [rows, groups, 32] from `least` on, and the bytes of float16 scales. The largest weight of a group gets the
    least code, as there is one more code below 0; so the scale may be negative. `shares`: of that scale, which are
    tried; smaller ones clip the largest weight.
    """
    groups = weights.reshape(len(weights), -1, 32)
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scales = [(largest * (share / least)).clamp_(-_MAX_HALF, _MAX_HALF).half().float() for share in shares]
    codes, chosen = nearest_codes(groups, scales, (least, -least - 1))
    return codes.char().numpy(), chosen.half().view(torch.uint8).numpy()


class _GgufMxfp4(Mxfp4Format):
    """GGUF's MXFP4: a block is its scale, then 16 bytes, whose low halves are the first 16 inputs."""

    type = "MXFP4"

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        blocks = matrix.numbers.numpy().reshape(len(matrix.numbers), -1, 17)
        codes, scales = _pairs(_fields(blocks[..., 1:], 16, 4)), np.ascontiguousarray(blocks[..., 0])
        return super().parts_of(Matrix(torch.from_numpy(codes), torch.from_numpy(scales)))


class _GgufNvfp4(Nvfp4Format):
    """GGUF's NVFP4, and where a further tensor has a scale of the matrix: bytes as `nvfp4_of` takes them."""

    type = "NVFP4"

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        return super().parts_of(nvfp4_of(matrix.numbers))


def nvfp4_of(rows: torch.Tensor) -> Matrix:
    """From rows of blocks, and the matrix's scale behind them where it has one: a block is 4 scales, then for each 8
    bytes of which the low halves are the first 8 inputs.
    """
    is_scaled = rows.shape[1] % 36 == 4
    blocks = rows[:, : -4 if is_scaled else None].numpy().reshape(len(rows), -1, 36)
    scales = np.where(blocks[..., :4] == 0x7F, np.uint8(0), blocks[..., :4])  # as llama.cpp takes it
    if (scales > 0x7F).any():
        raise CheckpointError("a scale whose top bit is set, in a block of NVFP4")
    codes = torch.from_numpy(_pairs(_fields(blocks[..., 4:], 8, 4)).reshape(len(rows), -1))
    numbers = torch.from_numpy(scales.reshape(len(rows), -1)).view(torch.float8_e4m3fn)
    whole = float(rows[0, -4:].clone().view(torch.float32)) if is_scaled else 1.0
    return Matrix(codes, numbers, 4, 2 * codes.shape[1], is_e2m1=True, factor=whole)


# -- the types ---------------------------------------------------------------------------------------------------------


def _as_it_is(data: Bytes) -> Bytes:
    return data


def _turned(data: Bytes) -> Bytes:
    return data.swapaxes(-1, -2)


def _dwords(data: Bytes) -> Bytes:
    """[..., n / 4, 16, 4]: 4-byte words, for each the 16 outputs."""
    return data.reshape(*data.shape[:-1], -1, 4).swapaxes(-2, -3)


def _one_scale(rest: torch.Tensor) -> Scales:
    return _numbers(rest, 0).unsqueeze(-1), None


def _one_minimum(rest: torch.Tensor) -> Scales:
    return _numbers(rest, 0).unsqueeze(-1), -_numbers(rest, 32).unsqueeze(-1)


def _of_32(rest: torch.Tensor) -> Scales:
    """Each 32 have a scale and a minimum of 6 bits, multiples of the block's."""
    low, high, both = rest[..., :192].unflatten(-1, (3, 16, 4)).unbind(-3)  # [..., 16, 4]
    scales = torch.cat((low & 63, both & 15 | low >> 6 << 4), dim=-1).float() * _numbers(rest, 192).unsqueeze(-1)
    minima = torch.cat((high & 63, both >> 4 | high >> 6 << 4), dim=-1).float() * _numbers(rest, 224).unsqueeze(-1)
    return scales, minima


def _of_q6_k(rest: torch.Tensor) -> Scales:
    """Each 16 have a scale of 8 bits, a multiple of the block's."""
    return _of_rows(rest[..., :256].view(torch.int8)).float() * _numbers(rest, 256).unsqueeze(-1), None


def _of_q2_k(rest: torch.Tensor) -> Scales:
    """Each 16 have a scale and a minimum of 4 bits, multiples of the block's."""
    both = _of_rows(rest[..., :256])
    scales, minima = (both & 15).float(), (both >> 4).float()
    return scales * _numbers(rest, 256).unsqueeze(-1), minima * _numbers(rest, 288).unsqueeze(-1)


def _of_q3_k(rest: torch.Tensor) -> Scales:
    """Each 16 have a scale of 6 bits, less 32, a multiple of the block's."""
    bits = rest[..., :192].unflatten(-1, (3, 16, 4))
    low = torch.cat([bits[..., i, :, :] >> shift & 15 for shift in (0, 4) for i in (0, 1)], dim=-1)
    high = torch.cat([bits[..., 2, :, :] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return ((low | high << 4).float() - 32) * _numbers(rest, 192).unsqueeze(-1), None


def _of_iq4_xs(rest: torch.Tensor) -> Scales:
    """The same of each 32."""
    low, high = rest[..., :64].unflatten(-1, (16, 4)), rest[..., 64:96].unflatten(-1, (16, 2))
    low = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    high = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    return ((low | high << 4).float() - 32) * _numbers(rest, 96).unsqueeze(-1), None


_K4_REST: list[Rest] = [(4, 16, _dwords), 0, 2]
Q8_0, Q4_0 = _Q8_0("Q8_0", 1, 32, 34, 0), _Q4_0("Q4_0", 2, 32, [(2, 18, 16, 4)], [0], _one_scale, middle=8)
GGUF_FORMATS = (
    *(Q8_0, Q4_0),
    _Rearranged("Q4_K", 3, 256, [(16, 144, 32, 4)], _K4_REST, _of_32),
    _Rearranged("Q5_K", 4, 256, [(48, 176, 32, 4), (16, 48, 32, 1)], _K4_REST, _of_32),
    _Rearranged("Q6_K", 5, 256, [(0, 128, 64, 4), (128, 192, 32, 2)], [(192, 208, _turned), 208], _of_q6_k, middle=32),
    _Rearranged("Q4_1", 6, 32, [(4, 20, 16, 4)], [0, 2], _one_minimum),
    _Rearranged("Q5_0", 7, 32, [(6, 22, 16, 4), (2, 6, 1, 1)], [0], _one_scale, middle=16),
    _Rearranged("Q5_1", 8, 32, [(8, 24, 16, 4), (4, 8, 1, 1)], [0, 2], _one_minimum),
    _Rearranged("Q2_K", 9, 256, [(16, 80, 32, 2)], [(0, 16, _turned), 80, 82], _of_q2_k),
    _Rearranged("Q3_K", 10, 256, [(32, 96, 32, 2), (0, 32, 32, 1)], [(96, 108, _dwords), 108], _of_q3_k, middle=4),
    _Iq4("IQ4_NL", 11, 32, [(2, 18, 16, 4)], [0], _one_scale),
    _Iq4("IQ4_XS", 12, 256, [(8, 136, 16, 4)], [(4, 8, _as_it_is), (2, 4, _as_it_is), 0], _of_iq4_xs),
    _TQ1_0("TQ1_0", 14, 256, 54, 52),
    _Rearranged("TQ2_0", 15, 256, [(0, 64, 32, 2)], [64], _one_scale, middle=1),
    _AsStored("IQ2_XXS", 16, 256, 66, 0),
    _AsStored("IQ2_XS", 17, 256, 74, 0),
    _AsStored("IQ2_S", 18, 256, 82, 0),
    _AsStored("IQ3_XXS", 19, 256, 98, 0),
    _AsStored("IQ3_S", 20, 256, 110, 0),
    _AsStored("IQ1_S", 21, 256, 50, 0),
    _IQ1_M("IQ1_M", 22, 256, 56),
)
SCALED_NVFP4 = "NVFP4 with a scale beside it"
OF_GGUF_TYPE: dict[str, TiledFormat] = {
    **{form.type: form for form in (*GGUF_FORMATS, *HALVES)},
    "MXFP4": _GgufMxfp4(),
    "NVFP4": _GgufNvfp4(),
    SCALED_NVFP4: _GgufNvfp4(),
}
"""The format of a GGUF matrix, by GGUF's name of its type."""


class GgufLayout(Layout):
    """A matrix is one tensor, whose dtype is a GGUF type."""

    suffixes = ("",)
    ignored = ()
    least_dimensions = 1

    def __init__(self) -> None:
        pass

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> Sequence[str]:
        return self.suffixes

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        return list(tensors[""][1])

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        return {"": (tuple(dict.fromkeys((*FLOATS, "F64", *OF_GGUF_TYPE))), [size])}

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return OF_GGUF_TYPE.get(tensors[""][0])

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        return Matrix(tensors[""], tensors[""])


def grids() -> bytes:
    """GRIDS of native/blocks.h: the package's grids, more by 64, and the values of IQ4_NL, more by 128."""
    from gguf import quants

    tables = []
    for kind in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ3_XXS, quants.IQ3_S, quants.IQ1_S):
        kind.init_grid()
        numbers = np.asarray(kind.grid) * 8 + 1 if kind is quants.IQ1_S else np.asarray(kind.grid)
        tables.append((numbers + 64).astype(np.uint8).tobytes())
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

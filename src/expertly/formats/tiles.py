"""The base of weight formats: an expert is blocks of neurons, and a block is tiles, which kernels take whole.

Shapes: H hidden, I intermediate, M matrices of an expert, G `group` (inputs that share a scale), B neurons of a block
(down's group). A tile is 16 outputs by G inputs. A block is first the tiles of its inner matrices (gate and up, or up):
for each 16 outputs the tiles over all inputs. Then come the tiles of down, each 16 outputs by the block's B neurons,
and padding. A linear layer's matrix by itself is blocks of 16 outputs by all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from expertly.core.errors import ConfigError
from expertly.core.geometry import PAGE_NBYTES, SECTOR_NBYTES, LayerGeometry
from expertly.formats.matrix import Bytes, Matrix, torch

TILE_OUTPUTS = 16

_LEAST_SHARE = 200
"""Bytes of a block to one of padding, at least."""

_PACKED_NBYTES = 2 << 20
"""Of an expert at a time, that what is made of it stays in a processor's cache."""


class TiledFormat(Protocol):
    """A weight format. A checkpoint's matrix comes as its `parts` (codes, scales, ...): bytes [rows, columns / G, n]
    each; rows are outputs.
    """

    name: str
    kernel: int
    """Its number in native/products.h."""
    group: int
    """G, a multiple of 16."""
    tile_nbytes: int

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        """The parts of a matrix. Raises CheckpointError for a value that is no number (NaN, infinity) or beyond the
        format.
        """

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        """[..., tile_nbytes] from parts [..., 16, n]."""

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        """Float32 weights [..., 16, G] from bytes [..., tile_nbytes], on their device."""

    # -- the same for all ------------------------------------------------------------------------------------

    def block_nbytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a block of a matrix by itself. Raises ConfigError where its sizes are not whole tiles."""
        for side, size, group in (("outputs", rows, TILE_OUTPUTS), ("inputs", columns, self.group)):
            if size % group:
                raise ConfigError(f"{size} {side}: {self.name} needs a multiple of {group}")
        return columns // self.group * self.tile_nbytes

    def pack(self, parts: Sequence[Bytes]) -> Bytes:
        """A matrix by itself: blocks [rows / 16, block_nbytes] from its parts."""
        blocks = self.tiles([_inner_tiles(part, TILE_OUTPUTS) for part in parts])
        return blocks.reshape(len(blocks), -1)

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`: float32 weights [rows, columns], on the device of the blocks."""
        tiles = self.decode_tiles(blocks.unflatten(-1, (-1, self.tile_nbytes)))  # [blocks, tiles, 16, G]
        return tiles.transpose(1, 2).reshape(TILE_OUTPUTS * len(blocks), -1)


class RoundingFormat(TiledFormat, Protocol):
    """A format to which expertly can round weights."""

    def encode(self, weights: torch.Tensor) -> tuple[Bytes, ...]:
        """The parts of a matrix [rows, columns] of finite float32 weights. A scale is chosen for each group; with it
        each weight is rounded to the nearest number of the format.
        """


def nearest_codes(
    groups: torch.Tensor, scales: Sequence[torch.Tensor], codes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of weights [..., G], within the range `codes`, and their scales [..., 1]: of `scales` the one with the
    least squared error.
    """
    best: tuple[torch.Tensor, ...] | None = None  # codes, scales, squared errors
    for scale in scales:
        code = torch.where(scale == 0, 0.0, groups / scale).round_().clamp_(*codes)
        error = code * scale - groups
        # The quotient was rounded, so the next code may be nearer.
        beside = (code - (error * scale).sign()).clamp_(*codes)
        other = beside * scale - groups
        is_nearer = other.abs() < error.abs()
        code, error = torch.where(is_nearer, beside, code), torch.where(is_nearer, other, error)
        tried: tuple[torch.Tensor, ...] = code, scale, error.square_().sum(dim=-1, keepdim=True)
        if best is not None:
            is_better = tried[2] < best[2]
            tried = tuple(torch.where(is_better, new, old) for new, old in zip(tried, best, strict=True))
        best = tried
    assert best is not None
    return best[0], best[1]


@dataclass(frozen=True)
class ExpertFormat:
    """How an expert lies in bytes: the formats of its matrices, which are mostly the same. Where there is no gate, up
    has that of `gate`.
    """

    gate: TiledFormat
    up: TiledFormat
    down: TiledFormat

    @property
    def name(self) -> str:
        gate, up, down = self.gate.name, self.up.name, self.down.name
        return f"{gate}+{up}+{down}" if gate != up else gate if gate == down else f"{gate}+{down}"

    @property
    def kernels(self) -> tuple[int, int, int]:
        return self.gate.kernel, self.up.kernel, self.down.kernel

    def inner(self, num_matrices: int) -> tuple[TiledFormat, ...]:
        """Of gate and up, or of up."""
        return (self.gate, self.up) if num_matrices == 3 else (self.gate,)

    def geometry(self, layer: LayerGeometry) -> LayerGeometry:
        """The layer with its experts in this format. Raises ConfigError where its sizes are not whole groups."""
        inner = self.inner(layer.num_matrices)
        for field, form in (*(("hidden_size", form) for form in inner), ("intermediate_size", self.down)):
            if getattr(layer, field) % form.group:
                raise ConfigError(f"{field}={getattr(layer, field)}: {form.name} needs a multiple of {form.group}")
        size = self.down.group
        nbytes = self._block_nbytes(layer.num_matrices, layer.hidden_size, layer.intermediate_size // size)
        return replace(layer, format=self.name, block_size=size, block_nbytes=nbytes)

    def fits(self, layer: LayerGeometry) -> bool:
        """Whether the layer's sizes are whole groups."""
        inner = any(layer.hidden_size % form.group for form in self.inner(layer.num_matrices))
        return not (inner or layer.intermediate_size % self.down.group)

    def pack(self, inner: Sequence[Sequence[Bytes]], down: Sequence[Bytes]) -> Iterator[Bytes]:
        """An expert's blocks [I / B, block_nbytes], some at a time, from the parts of its inner matrices [I, H] and of
        down [H, I].
        """
        size, (hidden_size, num_blocks) = self.down.group, down[0].shape[:2]
        nbytes = self._block_nbytes(len(inner) + 1, hidden_size, num_blocks)
        step = max(1, _PACKED_NBYTES * num_blocks // sum(part.nbytes for parts in (*inner, down) for part in parts))
        forms = self.inner(len(inner) + 1)
        for first in range(0, num_blocks, step):
            some, rows = slice(first, first + step), slice(first * size, (first + step) * size)
            blocks = [
                form.tiles([_inner_tiles(part[rows], size) for part in parts])
                for form, parts in zip(forms, inner, strict=True)
            ]
            blocks.append(self.down.tiles([_down_tiles(part[:, some]) for part in down]))
            matrices = [tiles.reshape(len(tiles), -1) for tiles in blocks]
            pad = np.zeros((len(matrices[0]), nbytes - sum(matrix.shape[1] for matrix in matrices)), np.uint8)
            yield np.concatenate([*matrices, pad], axis=1)

    def decode(self, blocks: torch.Tensor, num_matrices: int, hidden_size: int) -> torch.Tensor:
        """Float32 weights [r, M, H] of r neurons from their blocks [r / B, block_nbytes], on the blocks' device."""
        num, size, forms = len(blocks), self.down.group, (*self.inner(num_matrices), self.down)
        sizes = [self._inner_nbytes(form, hidden_size) for form in forms[:-1]] + [self._down_nbytes(hidden_size)]
        *inner, down = (
            form.decode_tiles(part.reshape(num, -1, form.tile_nbytes))  # [blocks, tiles, 16, G]
            for form, part in zip(forms, blocks[:, : sum(sizes)].split(sizes, dim=1), strict=True)
        )
        rows = [
            tiles.unflatten(1, (size // TILE_OUTPUTS, -1)).transpose(2, 3).reshape(num * size, 1, hidden_size)
            for tiles in inner
        ]
        return torch.cat((*rows, down.permute(0, 3, 1, 2).reshape(num * size, 1, hidden_size)), dim=1)

    def _block_nbytes(self, num_matrices: int, hidden_size: int, num_blocks: int) -> int:
        """Bytes of a block with its padding, by which the expert is whole pages, or else each block whole sectors: no
        other reads go past the page cache.
        """
        nbytes = self.least_nbytes(num_matrices, hidden_size)
        for unit in (PAGE_NBYTES // math.gcd(num_blocks, PAGE_NBYTES), SECTOR_NBYTES):
            if -nbytes % unit <= nbytes // _LEAST_SHARE:
                return nbytes + -nbytes % unit
        return nbytes

    def least_nbytes(self, num_matrices: int, hidden_size: int) -> int:
        """Bytes of a block without padding."""
        return self.inner_nbytes(num_matrices, hidden_size) + self._down_nbytes(hidden_size)

    def inner_nbytes(self, num_matrices: int, hidden_size: int) -> int:
        """Bytes of a block's inner matrices."""
        return sum(self._inner_nbytes(form, hidden_size) for form in self.inner(num_matrices))

    def _inner_nbytes(self, form: TiledFormat, hidden_size: int) -> int:
        return self.down.group // TILE_OUTPUTS * (hidden_size // form.group) * form.tile_nbytes

    def _down_nbytes(self, hidden_size: int) -> int:
        return hidden_size // TILE_OUTPUTS * self.down.tile_nbytes


def transposed(part: Bytes, num_bytes: int) -> Bytes:
    """[..., b, a, num_bytes] from [..., a, b * num_bytes], whose items are moved as one number where they can be."""
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}.get(num_bytes)
    if kind is None:
        return part.reshape(*part.shape[:-1], -1, num_bytes).swapaxes(-2, -3)
    items = np.ascontiguousarray(part).view(kind).swapaxes(-1, -2)
    return np.ascontiguousarray(items).view(np.uint8).reshape(*items.shape, num_bytes)


def _inner_tiles(part: Bytes, size: int) -> Bytes:
    """[I / B, tiles, 16, n] from a part [I, H / G, n]."""
    rows, groups, width = part.shape
    tiles = transposed(part.reshape(rows // size, size // TILE_OUTPUTS, TILE_OUTPUTS, groups * width), width)
    return tiles.reshape(rows // size, -1, TILE_OUTPUTS, width)


def _down_tiles(part: Bytes) -> Bytes:
    """[I / B, tiles, 16, n] from a part [H, I / B, n]."""
    rows, groups, width = part.shape
    tiles = transposed(part.reshape(rows, groups * width), width)  # [I / B, H, n]
    return tiles.reshape(groups, rows // TILE_OUTPUTS, TILE_OUTPUTS, width)

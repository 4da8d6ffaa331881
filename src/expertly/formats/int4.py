"""INT4 with a scale, and in some checkpoints a zero point, for each group of inputs: the tiles. compressed.py and
gptq.py have the layouts of checkpoints. Groups of another multiple of 32 inputs become several with the same scale.

A weight is (a number from 0 to 15 - its group's zero point, or 8) * its group's scale, rounded to the dtype of the
scales, as transformers rounds it. A tile is, for each 32 inputs, 16 bytes of each of 16 outputs, the first input in the
lowest bits; then 16 scales of 2 bytes; then 16 zero points of 4 bits, where there are any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.core.errors import CheckpointError
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, TiledFormat, torch, transposed

GROUPS = (32, 128)

_MAX_SCALE = 2048.0
"""16 times that is still finite in float16."""

_NAMES = [f"int4_g{group}{zeros}{half}" for zeros in ("", "_zeros") for half in ("", "_f16") for group in GROUPS]
"""In the order of native/products.h."""

_FIRST_KERNEL = 27


class Int4Format(TiledFormat):
    """The tiles. Subclasses read those of checkpoints: `suffixes`, `shapes`, `parts_of`."""

    def __init__(self, group: int, scales: str, has_zeros: bool = False) -> None:
        """`scales`: their dtype, BF16 or F16."""
        self.name = f"int4_g{group}{'_zeros' if has_zeros else ''}{'_f16' if scales == 'F16' else ''}"
        self.kernel = _FIRST_KERNEL + _NAMES.index(self.name)
        self.group, self.scales, self.has_zeros = group, scales, has_zeros
        self.tile_nbytes = TILE_OUTPUTS * (group // 2 + 2) + (TILE_OUTPUTS // 2 if has_zeros else 0)

    def scales_of(self, scales: torch.Tensor, rows: int, groups: int) -> Bytes:
        """The scales' part [rows, groups, 2], from numbers [rows, n], each of `groups` / n neighbours."""
        size = float(scales.abs().amax()) if scales.numel() else 0.0  # NaN where one is
        if not size <= _MAX_SCALE:
            raise CheckpointError(f"a scale of {size:g} in size: must be at most {_MAX_SCALE:g}")
        stored: Bytes = scales.reshape(-1).view(torch.uint8).numpy().reshape(rows, -1, 2)
        return stored.repeat(groups // stored.shape[1], axis=1)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        """From numbers [..., 16, G / 2], scales [..., 16, 2] and zero points [..., 16, 1]."""
        numbers, scales, *zeros = parts
        rows = transposed(numbers, 16)  # [..., G / 32, 16 outputs, 16]
        flat = [rows.reshape(*numbers.shape[:-2], -1), scales.reshape(*scales.shape[:-2], -1)]
        flat += [one[..., 0::2, 0] | one[..., 1::2, 0] << np.uint8(4) for one in zeros]
        return np.concatenate(flat, axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        end = self.group * TILE_OUTPUTS // 2
        rows = tiles[..., :end].unflatten(-1, (-1, TILE_OUTPUTS, 16))
        numbers = rows.transpose(-3, -2).flatten(-2)  # [..., 16, G / 2]
        scales = tiles[..., end : end + 32].unflatten(-1, (TILE_OUTPUTS, 2))
        zeros = [_nibbles(tiles[..., end + 32 :]).unsqueeze(-1)] if self.has_zeros else []
        return self._weights(numbers, scales, *zeros).float()

    def _weights(self, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
        """Weights [..., G] in the dtype of the scales, from numbers [..., G / 2], scales [..., 2], zeros [..., 1]."""
        dtype = torch.bfloat16 if self.scales == "BF16" else torch.float16
        values = _nibbles(numbers).float() - (8 if zeros is None else zeros.float())
        return (values * scales.contiguous().view(dtype).float()).to(dtype)


def tile_group(stored_group: int) -> int | None:
    """The largest group of tiles for one of a checkpoint."""
    return next((group for group in reversed(GROUPS) if stored_group and stored_group % group == 0), None)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] from bytes [..., n], the lower four bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

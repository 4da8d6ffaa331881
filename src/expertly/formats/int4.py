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
from expertly.formats.matrix import Bytes, Matrix, nibbles, torch
from expertly.formats.tiles import TILE_OUTPUTS, TiledFormat, transposed

_MAX_SCALE = 2048.0
"""16 times that is still finite in float16."""

_FIRST_KERNEL = 27


class Int4Format(TiledFormat):
    def __init__(self, number: int, group: int, scales: str, has_zeros: bool) -> None:
        """`number`: in the order of native/products.h; `scales`: their dtype, BF16 or F16."""
        self.name = f"int4_g{group}{'_zeros' if has_zeros else ''}{'_f16' if scales == 'F16' else ''}"
        self.kernel, self.group, self._has_zeros = _FIRST_KERNEL + number, group, has_zeros
        self._scales = scales
        self.tile_nbytes = TILE_OUTPUTS * (group // 2 + 2) + (TILE_OUTPUTS // 2 if has_zeros else 0)

    def parts_of(self, matrix: Matrix) -> tuple[Bytes, ...]:
        rows, groups = len(matrix.numbers), matrix.columns // self.group
        size = float(matrix.scales.abs().amax()) if matrix.scales.numel() else 0.0  # NaN where one is
        if not size <= _MAX_SCALE:
            raise CheckpointError(f"a scale of {size:g} in size: must be at most {_MAX_SCALE:g}")
        scales: Bytes = matrix.scales.reshape(-1).view(torch.uint8).numpy().reshape(rows, -1, 2)
        num = scales.shape[1]
        order = np.arange(matrix.columns) * num // matrix.columns
        if matrix.order is not None and not np.array_equal(matrix.order.numpy(), order):
            raise CheckpointError(
                f"g_idx: inputs in another order than their groups of {matrix.columns // num} (desc_act): their bytes "
                "cannot be kept; name a dtype to convert them"
            )
        parts = [matrix.numbers.contiguous().numpy().view(np.uint8).reshape(rows, groups, -1)]
        parts.append(scales.repeat(groups // num, axis=1))
        zeros = None if matrix.zeros is None else matrix.zeros.numpy()
        if zeros is not None and self._has_zeros:
            parts.append(zeros[..., None].repeat(groups // num, axis=1))
        elif zeros is not None and (wrong := zeros[zeros != 8]).size:
            raise CheckpointError(f"a zero point of {wrong[0]}: must be 8, as quantization_config.sym is true")
        return tuple(parts)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        """From numbers [..., 16, G / 2], scales [..., 16, 2] and zero points [..., 16, 1]."""
        numbers, scales, *zeros = parts
        rows = transposed(numbers, 16)  # [..., G / 32, 16 outputs, 16]
        flat = [rows.reshape(*numbers.shape[:-2], -1), scales.reshape(*scales.shape[:-2], -1)]
        flat += [points[..., 0::2, 0] | points[..., 1::2, 0] << np.uint8(4) for points in zeros]
        return np.concatenate(flat, axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        end = self.group * TILE_OUTPUTS // 2
        rows = tiles[..., :end].unflatten(-1, (-1, TILE_OUTPUTS, 16))
        numbers = nibbles(rows.transpose(-3, -2).flatten(-2)).float()  # [..., 16, G]
        dtype = torch.bfloat16 if self._scales == "BF16" else torch.float16
        scales = tiles[..., end : end + 32].unflatten(-1, (TILE_OUTPUTS, 2)).contiguous().view(dtype)
        zeros = nibbles(tiles[..., end + 32 :]).float().unsqueeze(-1) if self._has_zeros else 8
        return ((numbers - zeros) * scales.float()).to(dtype).float()


_KINDS = [
    (group, scales, has_zeros) for has_zeros in (False, True) for scales in ("BF16", "F16") for group in (32, 128)
]
_FORMS = {kind: Int4Format(number, *kind) for number, kind in enumerate(_KINDS)}
INT4 = tuple(_FORMS.values())


def int4_form(stored_group: int, columns: int, scales: str, has_zeros: bool) -> Int4Format | None:
    """The format of a checkpoint's groups of so many inputs (-1: of all): the largest whole part of them."""
    size = columns if stored_group == -1 else stored_group
    if not size or columns % size:
        return None
    group = next((group for group in (128, 32) if size % group == 0), None)
    return None if group is None else _FORMS.get((group, scales, has_zeros))

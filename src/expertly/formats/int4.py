"""INT4 with a scale for each group of inputs, as compressed-tensors' `pack-quantized` checkpoints have it (Kimi-K2).

A weight is a number of -8 to 7 times the scale of its group, rounded to the dtype of the scales, as transformers
rounds it. A tile is, for each 8 inputs, 16 words of 4 bytes, one an output, the first input in the lowest bits; then 16
scales of 2 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, TiledFormat

if TYPE_CHECKING:
    import torch

GROUPS = (32, 128)

_MAX_SCALE = 2048.0
"""16 times that is a number in float16."""


class _Int4(TiledFormat):
    """Symmetric: without zero points."""

    suffixes: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape")

    def __init__(self, name: str, kernel: int, group: int, scales: str) -> None:
        """`scales`: their dtype, BF16 or F16."""
        self.name, self.kernel, self.group, self._scales = name, kernel, group, scales
        self.tile_nbytes = TILE_OUTPUTS * (group // 2 + 2)

    def is_of(self, quantization: Mapping[str, Any], dtypes: Mapping[str, str]) -> bool:
        if quantization.get("quant_method") != "compressed-tensors" or group_size(quantization) != self.group:
            return False
        scales = {dtype for name, dtype in dtypes.items() if name.endswith(self.suffixes[1])}
        return self._scales in (scales or {"BF16"})

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (
            (("I32",), (rows, columns // 8)),
            ((self._scales,), (rows, columns // self.group)),
            (("I64", "I32"), (2,)),
        )

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, shape = tensors
        if shape.tolist() != [rows, columns]:
            raise CheckpointError(f"a shape of {shape.tolist()}: must be {[rows, columns]}")
        codes = words.numpy().view(np.uint8) ^ 0x88  # from 0 to 15 to two's complement
        return codes.reshape(rows, columns // self.group, -1), self._scales_of(scales, rows)

    def _scales_of(self, scales: torch.Tensor, rows: int) -> Bytes:
        """[rows, columns / G, 2] from numbers [rows, columns / G]."""
        import torch

        size = float(scales.abs().amax()) if scales.numel() else 0.0  # NaN where one is
        if not size <= _MAX_SCALE:
            raise CheckpointError(f"a scale of {size:g} in size: must be at most {_MAX_SCALE:g}")
        return scales.contiguous().view(torch.uint8).numpy().reshape(rows, -1, 2)

    def tiles(self, parts: Sequence[Bytes]) -> Bytes:
        codes, *others = parts
        words = codes.reshape(*codes.shape[:-1], -1, 4).swapaxes(-2, -3)  # [..., G / 8 words, 16 outputs, 4]
        flat = [part.reshape(*part.shape[:-2], -1) for part in others]
        return np.concatenate((words.reshape(*codes.shape[:-2], -1), *flat), axis=-1)

    def decode_tiles(self, tiles: torch.Tensor) -> torch.Tensor:
        end = self.group * TILE_OUTPUTS // 2
        words = tiles[..., :end].unflatten(-1, (-1, TILE_OUTPUTS, 4))
        codes = words.transpose(-3, -2).flatten(-2)  # [..., 16, G / 2]
        return self._weights(codes, tiles[..., end : end + 32].unflatten(-1, (TILE_OUTPUTS, 2))).float()

    def _weights(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Weights [..., G] in the dtype of the scales, from bytes [..., G / 2] and [..., 2]."""
        import torch

        dtype = torch.bfloat16 if self._scales == "BF16" else torch.float16
        numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = (numbers ^ 8).float() - 8  # from two's complement
        return (values * scales.contiguous().view(dtype).float()).to(dtype)

    def dequantised(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """A matrix [rows, columns] in the dtype of the scales. Raises CheckpointError where a tensor does not fit."""
        import torch

        parts = self.parts_of(tensors, rows, columns)
        return self._weights(*(torch.from_numpy(part) for part in parts)).reshape(rows, columns)


INT4 = (
    _Int4("int4_g32", 1, 32, "BF16"),
    _Int4("int4_g128", 2, 128, "BF16"),
    _Int4("int4_g32_f16", 3, 32, "F16"),
    _Int4("int4_g128_f16", 4, 128, "F16"),
)

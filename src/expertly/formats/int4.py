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

_DTYPES = {"BF16": "bfloat16", "F16": "float16"}

_MAX_SCALE = 2048.0
"""16 times that is a number in float16."""


class Int4Format(TiledFormat):
    """As compressed-tensors has it: symmetric, without zero points."""

    quant_method = "compressed-tensors"
    suffixes: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape")

    scales_at = 1  # among the suffixes
    refused: Mapping[str, str] = {
        ".weight_zero_point": "of asymmetric weights, which are not supported",
        ".weight_g_idx": "inputs in another order (actorder 'group'), which is not supported",
        ".weight_global_scale": "of NVFP4, which is not supported",
    }
    """Endings of other tensors of a matrix, without which its weights would be wrong, and what they say."""

    def __init__(self, name: str, kernel: int, group: int, scales: str) -> None:
        """`scales`: their dtype, BF16 or F16."""
        self.name, self.kernel, self.group, self._scales = name, kernel, group, scales
        self.tile_nbytes = TILE_OUTPUTS * (group // 2 + 2)

    @property
    def scales_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self._scales == "BF16" else torch.float16

    def is_of(self, quantization: Mapping[str, Any], dtypes: Mapping[str, str], dtype: str) -> bool:
        if quantization.get("quant_method") != self.quant_method or not self.has_groups_of(quantization):
            return False
        scales = {one for name, one in dtypes.items() if name.endswith(self.suffixes[self.scales_at])} or {"BF16"}
        return self._scales in scales and dtype in ("float32", _DTYPES[self._scales])

    def has_groups_of(self, quantization: Mapping[str, Any]) -> bool:
        """Whether a config of this `quant_method` says that groups have this size."""
        groups = quantization.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        return isinstance(weights, dict) and weights.get("group_size") == self.group

    def size_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Rows and columns of the matrix that tensors make."""
        rows, width = _shape2(tensors[0], self.suffixes[0])
        return rows, width * 8

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
        codes = words.numpy().view(np.uint8) ^ np.uint8(0x88)  # from 0 to 15 to two's complement
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

        dtype = self.scales_dtype
        numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = (numbers ^ 8).float() - 8  # from two's complement
        return (values * scales.contiguous().view(dtype).float()).to(dtype)

    def dequantised(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """A matrix [rows, columns] in the dtype of the scales. Raises CheckpointError where a tensor does not fit."""
        import torch

        if columns % self.group:
            raise CheckpointError(f"{columns} inputs: {self.name} needs a multiple of {self.group}")
        for suffix, tensor, (_, shape) in zip(self.suffixes, tensors, self.shapes(rows, columns), strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{suffix}: {list(tensor.shape)}: must be {list(shape)}")
        parts = self.parts_of(tensors, rows, columns)
        return self._weights(*(torch.from_numpy(part) for part in parts)).reshape(rows, columns)


def _shape2(tensor: torch.Tensor, suffix: str) -> tuple[int, int]:
    import torch

    if tensor.dim() != 2 or tensor.dtype != torch.int32:
        raise CheckpointError(f"{suffix}: {tensor.dtype} {list(tensor.shape)}: must be torch.int32 of two dimensions")
    return tensor.shape[0], tensor.shape[1]


INT4 = (
    Int4Format("int4_g32", 7, 32, "BF16"),
    Int4Format("int4_g128", 8, 128, "BF16"),
    Int4Format("int4_g32_f16", 9, 32, "F16"),
    Int4Format("int4_g128_f16", 10, 128, "F16"),
)


# -- what a config must say --------------------------------------------------------------------------------------------

_WEIGHTS: Mapping[str, Sequence[object]] = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "group_size": GROUPS,
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None, False, "static", "weight"),  # others permute the inputs
}


def check_config(quantization: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError where a config of compressed-tensors is of another format than these: names the
    field, its value and what is accepted.
    """
    where = "quantization_config"
    check_field(quantization, "format", ("pack-quantized",), where)
    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        check_field(quantization, field, (None, {}), where)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        found = list(groups) if isinstance(groups, dict) else groups
        raise UnsupportedModelError(f"{where}.config_groups={found!r:.200}: must be an object of one group")
    ((name, group),) = groups.items()
    where = f"{where}.config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise UnsupportedModelError(f"{where}={group!r:.200}: must be an object with `weights`")
    check_field(group, "format", (None, "pack-quantized"), where)
    for field in ("input_activations", "output_activations"):
        check_field(group, field, (None,), where)
    for field, accepted in _WEIGHTS.items():
        check_field(group["weights"], field, accepted, f"{where}.weights")


def check_field(fields: Mapping[str, Any], field: str, accepted: Sequence[object], where: str) -> None:
    """Raises UnsupportedModelError where a field has another value; one that is missing is None."""
    value = fields.get(field)
    if not any(type(value) is type(one) and value == one for one in accepted):
        listed = " or ".join(map(repr, accepted))
        raise UnsupportedModelError(f"{where}.{field}={value!r:.80}: must be {listed}")

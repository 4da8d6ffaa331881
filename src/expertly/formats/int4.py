"""INT4 with a scale, and in some checkpoints a zero point, for each group of inputs: the tiles, and the layout of
compressed-tensors' `pack-quantized` (Kimi-K2). gptq.py has the layouts of GPTQ and AWQ.

A weight is (a number from 0 to 15 - its group's zero point, or 8) * its group's scale, rounded to the dtype of the
scales, as transformers rounds it. A tile is, for each 32 inputs, 16 bytes of each of 16 outputs, the first input in the
lowest bits; then 16 scales of 2 bytes; then 16 zero points of 4 bits, where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.tiles import TILE_OUTPUTS, Bytes, TiledFormat, torch, transposed

GROUPS = (32, 128)

_DTYPES = {"BF16": "bfloat16", "F16": "float16"}

_MAX_SCALE = 2048.0
"""16 times that is still finite in float16."""

_NAMES = [f"int4_g{group}{zeros}{half}" for zeros in ("", "_zeros") for half in ("", "_f16") for group in GROUPS]
"""In the order of native/products.h."""

_FIRST_KERNEL = 25


class Int4Format(TiledFormat):
    """The tiles. Subclasses have the layouts of checkpoints: `suffixes` (the second is that of the scales), `shapes`,
    `parts_of`, `size_of`.
    """

    quant_method: str
    usual_scales = "BF16"  # assumed where only the config is known
    refused: Mapping[str, str] = {}
    """Endings of further tensors of a matrix, which are not supported, and why."""

    def __init__(self, group: int, scales: str, has_zeros: bool = False) -> None:
        """`scales`: their dtype, BF16 or F16."""
        self.name = f"int4_g{group}{'_zeros' if has_zeros else ''}{'_f16' if scales == 'F16' else ''}"
        self.kernel = _FIRST_KERNEL + _NAMES.index(self.name)
        self.group, self.scales, self.has_zeros = group, scales, has_zeros
        self.tile_nbytes = TILE_OUTPUTS * (group // 2 + 2) + (TILE_OUTPUTS // 2 if has_zeros else 0)

    @property
    def stored_scales(self) -> tuple[str, ...]:
        """Accepted dtypes of a checkpoint's scales (safetensors' names), the usual one first."""
        return (self.scales,)

    def is_of(self, quantization: Mapping[str, Any], dtypes: Mapping[str, str], dtype: str) -> bool:
        """Of a format that `group_formats` gave for this config."""
        stored = {one for name, one in dtypes.items() if name.endswith(self.suffixes[1])} or {self.usual_scales}
        is_stored = quantization.get("quant_method") == self.quant_method and stored & {*self.stored_scales}
        return bool(is_stored) and dtype in ("float32", _DTYPES[self.scales])

    def size_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        raise NotImplementedError

    def scales_of(self, scales: torch.Tensor, rows: int) -> Bytes:
        """The scales' part [rows, columns / G, 2], from numbers [rows, columns / G]."""
        size = float(scales.abs().amax()) if scales.numel() else 0.0  # NaN where one is
        if not size <= _MAX_SCALE:
            raise CheckpointError(f"a scale of {size:g} in size: must be at most {_MAX_SCALE:g}")
        return scales.reshape(-1).view(torch.uint8).numpy().reshape(rows, -1, 2)

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

    def dequantised(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> torch.Tensor:
        """A matrix [rows, columns] in the dtype of the scales. Raises CheckpointError where a tensor does not fit."""
        if columns % self.group:
            raise CheckpointError(f"{columns} inputs: {self.name} needs a multiple of {self.group}")
        for suffix, tensor, (_, shape) in zip(self.suffixes, tensors, self.shapes(rows, columns), strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{suffix}: {list(tensor.shape)}: must be {list(shape)}")
        parts = self.parts_of(tensors, rows, columns)
        return self._weights(*(torch.from_numpy(part) for part in parts)).reshape(rows, columns)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] from bytes [..., n], the lower four bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def shape2(tensor: torch.Tensor, suffix: str) -> tuple[int, int]:
    """The shape of a matrix of packed words. Raises CheckpointError where the tensor is none."""
    if tensor.dim() != 2 or tensor.dtype != torch.int32:
        raise CheckpointError(f"{suffix}: {tensor.dtype} {list(tensor.shape)}: must be torch.int32 of two dimensions")
    return tensor.shape[0], tensor.shape[1]


# -- compressed-tensors ------------------------------------------------------------------------------------------------


class PackQuantized(Int4Format):
    """The layout of compressed-tensors: symmetric, without zero points."""

    quant_method = "compressed-tensors"
    suffixes: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape")
    refused: Mapping[str, str] = {
        ".weight_zero_point": "of asymmetric weights, which are not supported",
        ".weight_g_idx": "inputs in another order (actorder 'group'), which is not supported",
        ".weight_global_scale": "of NVFP4, which is not supported",
    }

    def size_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        rows, width = shape2(tensors[0], self.suffixes[0])
        return rows, width * 8

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (
            (("I32",), (rows, columns // 8)),
            ((self.scales,), (rows, columns // self.group)),
            (("I64", "I32"), (2,)),
        )

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, shape = tensors
        if shape.tolist() != [rows, columns]:
            raise CheckpointError(f"a shape of {shape.tolist()}: must be {[rows, columns]}")
        return words.numpy().view(np.uint8).reshape(rows, columns // self.group, -1), self.scales_of(scales, rows)


PACK_QUANTIZED = tuple(PackQuantized(group, scales) for scales in ("BF16", "F16") for group in GROUPS)


def pack_quantized(quantization: Mapping[str, Any], dtype: str) -> Sequence[Int4Format]:
    where = "quantization_config"
    check_field(quantization, "format", ("pack-quantized",), where)
    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        check_field(quantization, field, (None, {}), where)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        names = list(groups) if isinstance(groups, dict) else groups
        raise UnsupportedModelError(f"{where}.config_groups={names!r:.200}: must be an object of one group")
    ((name, group),) = groups.items()
    where = f"{where}.config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise UnsupportedModelError(f"{where}={group!r:.200}: must be an object with `weights`")
    check_field(group, "format", (None, "pack-quantized"), where)
    for field in ("input_activations", "output_activations"):
        check_field(group, field, (None,), where)
    for field, accepted in {
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group",),
        "group_size": GROUPS,
        "symmetric": (True,),
        "dynamic": (False, None),
        "actorder": (None, False, "static", "weight"),  # others permute the inputs
    }.items():
        check_field(group["weights"], field, accepted, f"{where}.weights")
    return [one for one in PACK_QUANTIZED if one.group == group["weights"]["group_size"]]


def check_field(fields: Mapping[str, Any], field: str, accepted: Sequence[object], where: str) -> None:
    """Raises UnsupportedModelError where a field has another value. A missing field counts as None."""
    value = fields.get(field)
    if not any(type(value) is type(one) and value == one for one in accepted):
        listed = " or ".join(map(repr, accepted))
        raise UnsupportedModelError(f"{where}.{field}={value!r:.80}: must be {listed}")

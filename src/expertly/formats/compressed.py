"""The layouts of compressed-tensors (llm-compressor, Kimi-K2) and of NVIDIA's modelopt.

A weight is (a number - its zero point) * its scale. In compressed-tensors' INT4, INT8 and FP8, difference and product
are in the dtype of the scales, as in its `dequantize`. In NVFP4 a weight is a number of E2M1 times the scale of 16
inputs, which is a number of E4M3 divided by the matrix's global scale (modelopt: times), all in float32. How
activations and caches would be rounded says nothing about weights, and is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.fp8 import BLOCK, e2m1_values, fp8_form, fp8_values, scales_of
from expertly.formats.int4 import Int4Format, tile_group
from expertly.formats.layouts import (
    WHERE,
    Header,
    Layout,
    NamePattern,
    block_of,
    check_field,
    is_plain,
    order_of,
    spread,
    unpacked,
)
from expertly.formats.mxfp4 import _Mxfp4
from expertly.formats.nvfp4 import NVFP4, nvfp4_form
from expertly.formats.tiles import Bytes, TiledFormat, torch

_PACKED, _WEIGHT, _SCALE, _SHAPE = ".weight_packed", ".weight", ".weight_scale", ".weight_shape"
_ZEROS, _ORDER, _GLOBAL, _FACTOR = ".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".weight_scale_2"

NVFP4_GROUP = 16

_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class PackQuantized(Int4Format):
    """INT4 of compressed-tensors, numbers and zero points stored as those of 0 to 15."""

    def __init__(self, group: int, scales: str, has_zeros: bool = False, stored_group: int | None = None) -> None:
        """`stored_group`: inputs that share a scale in the checkpoint, a multiple of `group`."""
        super().__init__(group, scales, has_zeros)
        self.suffixes = (_PACKED, _SCALE, *([_ZEROS] if has_zeros else []), _SHAPE)
        self._stored_group = stored_group or group

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        num = columns // self._stored_group
        zeros = [(("I32",), (-(-rows // 8), num))] if self.has_zeros else []
        return ((("I32",), (rows, columns // 8)), ((self.scales,), (rows, num)), *zeros, (("I64", "I32"), (2,)))

    def parts_of(self, tensors: Sequence[torch.Tensor], rows: int, columns: int) -> tuple[Bytes, ...]:
        words, scales, *zeros, shape = tensors
        if shape.tolist() != [rows, columns]:
            raise CheckpointError(f"a shape of {shape.tolist()}: must be {[rows, columns]}")
        groups = columns // self.group
        parts = [words.numpy().view(np.uint8).reshape(rows, groups, -1), self.scales_of(scales, rows, groups)]
        for points in (unpacked(one.numpy().T, 4, rows).T[..., None] for one in zeros):
            parts.append(points.repeat(groups // points.shape[1], axis=1))
        return tuple(parts)


PACK_QUANTIZED = tuple(PackQuantized(group, scales) for scales in ("BF16", "F16") for group in (32, 128))

_packed_form = cache(PackQuantized)


class CompressedLayout(Layout):
    suffixes = (_PACKED, _WEIGHT, _SCALE, _ZEROS, _ORDER, _GLOBAL, _SHAPE)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        self._dtype = dtype
        for field in ("sparsity_config", "transform_config"):
            check_field(quantization, field, (None, {}), WHERE)
        groups = quantization.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise UnsupportedModelError(f"{WHERE}.config_groups={groups!r:.200}: must be an object of groups")
        self._groups = [Scheme(f"{WHERE}.config_groups.{name}", one, quantization) for name, one in groups.items()]

    def check(self, stem: str, tensors: Mapping[str, Header]) -> None:
        if is_plain(tensors):
            return
        scheme = self._scheme(stem)
        self.check_beside(stem, tensors, [*scheme.endings, *(end for end in scheme.further if end in tensors)])
        for ending, (dtype, shape) in tensors.items():
            accepted = scheme.dtypes(ending)
            if dtype not in accepted:
                raise CheckpointError(
                    f"tensor '{stem}{ending}': {dtype}: must be {' or '.join(accepted)}, as {scheme.where} has it"
                )
            expected = scheme.shape_of(ending, tensors)
            if expected is not None and list(shape) not in expected:
                listed = " or ".join(map(str, expected))
                raise CheckpointError(
                    f"tensor '{stem}{ending}': {list(shape)}: must be {listed}, as {scheme.where} has it"
                )

    def _scheme(self, stem: str) -> Scheme:
        """As compressed-tensors: of names, patterns and classes the first kind that matches counts."""
        return min(self._groups, key=lambda scheme: scheme.rank(stem))

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return None if is_plain(tensors) else self._scheme(stem).form(tensors, self._dtype)

    def usual_form(self) -> TiledFormat | None:
        scheme = self._groups[0]
        headers: dict[str, Header] = dict.fromkeys(scheme.endings, ("", (8 * BLOCK, 8 * BLOCK)))
        headers[_SCALE] = "BF16", tuple(scheme.num_scales(scheme.size_of(headers))[0])
        return scheme.form(headers, self._dtype)

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In the dtype of the scales; NVFP4 and MXFP4 in float32, one without scales as it is."""
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        codes, scales = next(iter(tensors.values())), tensors[_SCALE]
        if codes.dtype == torch.uint8:
            return fp4_weight(codes, scales, tensors.get(_GLOBAL), is_factor=False)
        if codes.dtype == torch.int32:
            columns = int(tensors[_SHAPE][-1])
            bits = max(1, 32 * codes.shape[-1] // max(1, columns))
            codes = _signed(codes, bits, columns)
        else:
            bits, columns = 8, codes.shape[-1]
        values = codes.to(scales.dtype) if codes.dtype == torch.int8 else fp8_values(codes).to(scales.dtype)
        if not bool(scales.isfinite().all()):
            raise CheckpointError("a scale is NaN or infinite: must be finite")
        blocks = [scheme.block for scheme in self._groups if scheme.block]
        block = next(filter(None, (block_of(values.shape, scales.shape, one) for one in (*blocks, None))), None)
        if block is None:
            raise CheckpointError(f"{_SCALE}: {list(scales.shape)}: not so many scales in {list(values.shape)} weights")
        zeros = tensors.get(_ZEROS)
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = _signed(zeros.T, bits, len(values)).T
        order = tensors.get(_ORDER)
        for tensor, change in ((zeros, torch.Tensor.sub_), (scales, torch.Tensor.mul_)):
            if tensor is None:
                continue
            if order is None:
                change(values, spread(tensor.to(scales.dtype), values.shape, block))
            else:
                change(values, tensor.to(scales.dtype)[:, order_of(order, tensor.shape[1], columns)])
        return values


def _signed(words: torch.Tensor, bits: int, num: int) -> torch.Tensor:
    """Numbers [..., num] from words [..., n], whose middle stands for 0."""
    return torch.from_numpy((unpacked(words.numpy(), bits, num).astype(np.int16) - (1 << bits - 1)).astype(np.int8))


def fp4_weight(codes: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor | None, is_factor: bool) -> torch.Tensor:
    """In float32, from two numbers in a byte. `whole`: the global scale of NVFP4, a divisor or a factor of scales."""
    values = e2m1_values(codes)
    if scales.dtype == torch.uint8:
        factors = scales_of(scales)
    else:
        whole = torch.ones(1) if whole is None else whole.float().reshape(-1)
        factors = fp8_values(scales) * whole if is_factor else fp8_values(scales) / whole
    if not bool(factors.isfinite().all()):
        raise CheckpointError("a scale is NaN or infinite: must be finite")
    block = block_of(values.shape, factors.shape, None)
    if block is None:
        raise CheckpointError(f"{_SCALE}: {list(scales.shape)}: not so many scales in {list(values.shape)} weights")
    return values.mul_(spread(factors, values.shape, block))


# -- a group of the config ---------------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[str, tuple[str, ...], range, tuple[str, ...]]] = {
    "pack-quantized": (_PACKED, ("int",), range(2, 9), ("group", "channel")),
    "int-quantized": (_WEIGHT, ("int",), range(8, 9), ("tensor", "channel", "group", "block")),
    "float-quantized": (_WEIGHT, ("float",), range(8, 9), ("tensor", "channel", "group", "block")),
    "naive-quantized": (_WEIGHT, ("int", "float"), range(8, 9), ("tensor", "channel", "group", "block")),
    "nvfp4-pack-quantized": (_PACKED, ("float",), range(4, 5), ("tensor_group",)),
    "mxfp4-pack-quantized": (_PACKED, ("float",), range(4, 5), ("group",)),
}
"""By `format`: the ending of numbers, and what `weights` may say: type, num_bits, strategy."""

_CLASSES = 2


class Scheme:
    """What a group of a config says of weights."""

    def __init__(self, where: str, group: Any, quantization: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError naming the field that is not supported."""
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise UnsupportedModelError(f"{where}={group!r:.200}: must be an object with `weights`")
        self.where = where
        weights, kind = group["weights"], str(group.get("format") or quantization.get("format"))
        check_field({"format": kind}, "format", tuple(_KINDS), where if group.get("format") else WHERE)
        self._numbers, types, bits, strategies = _KINDS[kind]
        is_fp4 = self._numbers == _PACKED and types == ("float",)
        size = {"nvfp4-pack-quantized": NVFP4_GROUP, "mxfp4-pack-quantized": 32}.get(kind)
        for field, accepted in {
            "num_bits": tuple(bits),
            "type": types,
            "strategy": strategies,
            "symmetric": (True, None) if types == ("float",) else (True, False, None),
            "dynamic": (False, None),
            "actorder": (None, False, "static", "weight", "group", "dynamic"),
            "group_size": (size, None) if size else (weights.get("group_size"),),
        }.items():
            check_field(weights, field, accepted, f"{where}.weights")
        self._bits, self._type, self._strategy = weights["num_bits"], weights["type"], weights["strategy"]
        self._is_symmetric = weights.get("symmetric") is not False
        self.group = size or weights.get("group_size")
        if self._strategy == "group" and not (type(self.group) is int and self.group > 0):
            raise UnsupportedModelError(
                f"{where}.weights.group_size={self.group!r:.80}: must be a whole number above 0"
            )
        block = weights.get("block_structure")
        block = [int(size) for size in re.findall(r"\d+", block)] if isinstance(block, str) else block
        self.block: tuple[int, int] | None = None
        if self._strategy == "block":
            if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
                raise UnsupportedModelError(f"{where}.weights.block_structure={block!r:.80}: must be two whole numbers")
            self.block = block[0], block[1]
        targets = group.get("targets")
        self._targets = [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []
        self._patterns = [
            NamePattern(target.removeprefix("re:"), f"{where}.targets")
            for target in self._targets
            if target.startswith("re:")
        ]
        zeros = [] if self._is_symmetric else [_ZEROS]
        has_shape = [_SHAPE] if self._type == "int" and self._numbers == _PACKED else []
        of_all = [_GLOBAL] if size == NVFP4_GROUP else []
        self.endings = (self._numbers, _SCALE, *zeros, *of_all, *has_shape)
        self.further = () if is_fp4 else (_ORDER,) if has_shape else (_ZEROS, _ORDER)
        """Of some checkpoints, beside `endings`."""

    def rank(self, stem: str) -> int:
        """0 to 3: whether this name is a target, matches one, may be of a class that is, or not."""
        if stem in self._targets:
            return 0
        if any(pattern.matches(stem) for pattern in self._patterns):
            return 1
        return _CLASSES if len(self._patterns) < len(self._targets) else _CLASSES + 1

    def dtypes(self, ending: str) -> tuple[str, ...]:
        if ending == self._numbers:
            of_plain = "I8" if self._type == "int" else "F8_E4M3"
            return (of_plain,) if ending == _WEIGHT else ("I32",) if self._type == "int" else ("U8",)
        if ending == _SCALE and self._numbers == _PACKED and self._type == "float":
            return ("F8_E4M3",) if self.group == NVFP4_GROUP else ("U8",)
        zeros = ("I32",) if self._numbers == _PACKED else ("I8", "F8_E4M3")
        return {_ZEROS: zeros, _GLOBAL: ("F32",), _SHAPE: ("I64", "I32"), _ORDER: ("I32", "I64")}.get(
            ending, ("BF16", "F16", "F32")
        )

    def size_of(self, tensors: Mapping[str, Header]) -> tuple[int, int]:
        """Rows and columns of a matrix. Raises CheckpointError where its numbers are none."""
        shape = tensors[self._numbers][1]
        if len(shape) != 2:
            raise CheckpointError(f"{self._numbers}: {list(shape)}: must have two dimensions")
        if self._numbers == _WEIGHT:
            return shape[0], shape[1]
        return shape[0], shape[1] * 2 if self._type == "float" else shape[1] * 32 // self._bits

    def num_scales(self, size: tuple[int, int]) -> list[list[int]]:
        """The shapes that the scales of such a matrix may have."""
        rows, columns = size
        if self.block:
            return [[-(-rows // self.block[0]), -(-columns // self.block[1])]]
        if self._strategy == "tensor":
            return [[1], [], [1, 1]]
        return [[rows, 1], [rows]] if self._strategy == "channel" else [[rows, columns // self.group]]

    def shape_of(self, ending: str, tensors: Mapping[str, Header]) -> list[list[int]] | None:
        rows, columns = self.size_of(tensors)
        if ending == _SCALE:
            return self.num_scales((rows, columns))
        if ending == _ZEROS and self._numbers == _PACKED:
            num = columns // self.group if self._strategy == "group" else 1
            return [[-(-rows * self._bits // 32), num]]
        return {_ZEROS: self.num_scales((rows, columns)), _GLOBAL: [[1], []], _ORDER: [[columns]], _SHAPE: [[2]]}.get(
            ending
        )

    def form(self, tensors: Mapping[str, Header], dtype: str) -> TiledFormat | None:
        """The format that keeps such a matrix where the model computes in `dtype`."""
        shape, (scales, num_scales) = self.size_of(tensors), tensors[_SCALE]
        is_kept = dtype == _TORCH_DTYPES.get(scales)  # to which products are rounded
        if self._numbers == _WEIGHT:
            is_plain_fp8 = self._type == "float" and tuple(tensors) == (_WEIGHT, _SCALE)
            return (
                fp8_form(tuple(tensors), shape, num_scales) if is_plain_fp8 and (is_kept or scales == "F32") else None
            )
        if self._type == "float":
            is_nvfp4 = self.group == NVFP4_GROUP
            return nvfp4_form(tuple(tensors), tensors[_GLOBAL][1], is_factor=False) if is_nvfp4 else _MXFP4
        stored = self.group if self._strategy == "group" else shape[1]
        size = tile_group(stored)
        if self._bits != 4 or _ORDER in tensors or size is None or shape[1] % stored or scales == "F32":
            return None
        return _packed_form(size, scales, not self._is_symmetric, stored) if is_kept or dtype == "float32" else None


class _PackedMxfp4(_Mxfp4):
    """compressed-tensors' MXFP4: the groups of a row are one dimension."""

    suffixes: tuple[str, ...] = (_PACKED, _SCALE)

    def shapes(self, rows: int, columns: int) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        return (("U8",), (rows, columns // 2)), (("U8",), (rows, columns // 32))


_MXFP4 = _PackedMxfp4()


# -- modelopt ----------------------------------------------------------------------------------------------------------

_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")


class ModelOptLayout(Layout):
    """`quant_method` modelopt: tensors say which of NVFP4 and FP8 a matrix is in."""

    suffixes = (_WEIGHT, _SCALE, _FACTOR)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        check_field(quantization, "quant_algo", _ALGORITHMS, WHERE)

    def check(self, stem: str, tensors: Mapping[str, Header]) -> None:
        if is_plain(tensors):
            return
        dtype, shape = tensors.get(_WEIGHT, ("", ()))
        if dtype not in ("U8", "F8_E4M3", ""):
            raise CheckpointError(f"tensor '{stem}{_WEIGHT}': {dtype}: must be U8 (NVFP4) or F8_E4M3")
        self.check_beside(stem, tensors, (_WEIGHT, _SCALE, *([_FACTOR] if dtype == "U8" else [])))
        size = (*shape[:-1], shape[-1] * 2) if dtype == "U8" and shape else shape
        scales = tensors[_SCALE][1]
        if len(size) < 2 or (block_of(size, scales, (BLOCK, BLOCK)) is None):
            raise CheckpointError(
                f"tensor '{stem}{_SCALE}': {list(scales)}: not so many scales in {list(size)} weights"
            )

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        if tuple(tensors) == NVFP4.suffixes:
            return nvfp4_form(NVFP4.suffixes, tensors[_FACTOR][1])
        if tuple(tensors) != (_WEIGHT, _SCALE):
            return None
        return fp8_form(tuple(tensors), tensors[_WEIGHT][1], tensors[_SCALE][1])

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """In float32; one without scales as it is."""
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        codes, scales = tensors[_WEIGHT], tensors[_SCALE]
        if codes.dtype == torch.uint8:
            return fp4_weight(codes, scales, tensors[_FACTOR], is_factor=True)
        block = block_of(codes.shape, scales.shape, (BLOCK, BLOCK))
        if block is None:
            raise CheckpointError(f"{_SCALE}: {list(scales.shape)}: not so many scales in {list(codes.shape)} weights")
        return fp8_values(codes).mul_(spread(scales_of(scales), codes.shape, block))

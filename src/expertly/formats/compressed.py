"""The layouts of compressed-tensors (llm-compressor, Kimi-K2) and of NVIDIA's modelopt.

A weight is (a number - its zero point) * its scale. In compressed-tensors' INT4, INT8 and FP8, difference and product
are in the dtype of the scales, as in its `dequantize`. In NVFP4 a weight is a number of E2M1 times the scale of 16
inputs, which is a number of E4M3 divided by the matrix's global scale (modelopt: times), all in float32. How
activations and caches would be rounded says nothing about weights, and is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.fp8 import BLOCK, fp8_form
from expertly.formats.int4 import int4_form
from expertly.formats.layouts import FLOATS, WHERE, Accepted, Header, Layout, NamePattern, check_field, is_plain
from expertly.formats.matrix import Matrix, block_of, torch, unpacked
from expertly.formats.mxfp4 import GROUP as MXFP4_GROUP
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.nvfp4 import NVFP4
from expertly.formats.tiles import TiledFormat

_PACKED, _WEIGHT, _SCALE, _SHAPE = ".weight_packed", ".weight", ".weight_scale", ".weight_shape"
_ZEROS, _ORDER, _GLOBAL, _FACTOR = ".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".weight_scale_2"

_NVFP4_GROUP = 16

_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class CompressedLayout(Layout):
    suffixes = (_PACKED, _WEIGHT, _SCALE, _ZEROS, _ORDER, _GLOBAL, _SHAPE)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        self._dtype = dtype
        self._of_stem: dict[str, _Scheme] = {}  # patterns may be asked for so long only
        for field, nothing in (("sparsity_config", {"format": "dense"}), ("transform_config", {"config_groups": {}})):
            said = quantization.get(field) or {}
            if not isinstance(said, dict) or any(said.get(key, value) != value for key, value in nothing.items()):
                accepted = f"none, or one with {json.dumps(nothing)}"
                raise UnsupportedModelError(f"{WHERE}.{field}={said!r:.200}: must be {accepted}")
        groups = quantization.get("config_groups")
        of_weights = groups if isinstance(groups, dict) else {}
        of_weights = {name: group for name, group in of_weights.items() if not _is_of_activations(group)}
        if not of_weights:
            problem = "must be an object of groups, one of them with `weights`"
            raise UnsupportedModelError(f"{WHERE}.config_groups={groups!r:.200}: {problem}")
        self._groups = [
            _Scheme(f"{WHERE}.config_groups.{name}", each, quantization) for name, each in of_weights.items()
        ]

    def _scheme(self, stem: str) -> _Scheme:
        """As compressed-tensors: of names, patterns and classes the first kind that matches counts."""
        if stem not in self._of_stem:
            self._of_stem[stem] = min(self._groups, key=lambda scheme: scheme.rank(stem))
        return self._of_stem[stem]

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> Sequence[str]:
        scheme = self._scheme(stem)
        return [*scheme.endings, *(ending for ending in scheme.further if ending in tensors)]

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        return self._scheme(stem).size(tensors)

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        if len(size) != 2:
            raise CheckpointError(f"{stem}: {len(size)} dimensions: a matrix of compressed-tensors has 2")
        accepted = self._scheme(stem).accepted(tensors, *size)
        return {ending: accepted[ending] for ending in tensors}

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        return None if is_plain(tensors) else self._scheme(stem).form(tensors, self._dtype)

    def usual_form(self) -> TiledFormat | None:
        scheme = self._groups[0]
        headers: dict[str, Header] = dict.fromkeys(scheme.endings, ("F8_E4M3", (8 * BLOCK, 8 * BLOCK)))
        headers[_SCALE] = "BF16", tuple(scheme.scale_shapes(*scheme.size(headers))[0])
        return scheme.form(headers, self._dtype)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        codes, scales, zeros = next(iter(tensors.values())), tensors[_SCALE], tensors.get(_ZEROS)
        if codes.dtype == torch.uint8:
            factor = float(tensors[_GLOBAL]) if _GLOBAL in tensors else None
            return Matrix(codes, scales, 4, 2 * codes.shape[1], is_e2m1=True, factor=factor, is_divisor=True)
        if codes.dtype != torch.int32:
            blocks = [scheme.block for scheme in self._groups]
            block = next((each for each in blocks if each and block_of(codes.shape, scales.shape, each)), None)
            return Matrix(codes, scales, zeros=zeros, order=tensors.get(_ORDER), block=block)
        rows, columns = tensors[_SHAPE].tolist()
        bits = 32 * codes.shape[1] // max(1, columns)
        if rows != len(codes) or not 2 <= bits <= 8:
            rule = f"must be {len(codes)} rows in numbers of 2 to 8 bits"
            raise CheckpointError(f"a shape of {[rows, columns]}: {rule}")
        if zeros is not None:
            zeros = torch.from_numpy(unpacked(zeros.numpy().T, bits, rows).T)
        return Matrix(codes, scales, bits, columns, zeros=zeros, order=tensors.get(_ORDER))


# -- a group of the config ---------------------------------------------------------------------------------------------


class _SchemeKind(NamedTuple):
    """A `format`: the ending of numbers, and what `weights` may say."""

    numbers: str
    types: tuple[str, ...]
    bits: Sequence[int]
    strategies: tuple[str, ...]
    group: int | None = None  # inputs that share a scale


_STRATEGIES = ("tensor", "channel", "group", "block")
_KINDS = {
    "pack-quantized": _SchemeKind(_PACKED, ("int",), range(2, 9), ("group", "channel")),
    "int-quantized": _SchemeKind(_WEIGHT, ("int",), (8,), _STRATEGIES),
    "float-quantized": _SchemeKind(_WEIGHT, ("float",), (8,), _STRATEGIES),
    "naive-quantized": _SchemeKind(_WEIGHT, ("int", "float"), (8,), _STRATEGIES),
    "nvfp4-pack-quantized": _SchemeKind(_PACKED, ("float",), (4,), ("tensor_group",), _NVFP4_GROUP),
    "mxfp4-pack-quantized": _SchemeKind(_PACKED, ("float",), (4,), ("group",), MXFP4_GROUP),
}


def _is_of_activations(group: object) -> bool:
    """Whether it says nothing of weights, as that of a cache."""
    return isinstance(group, dict) and group.get("weights") is None


class _Scheme:
    """What a group of a config says of weights."""

    def __init__(self, place: str, group: Any, quantization: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError naming the field that is not supported."""
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise UnsupportedModelError(f"{place}={group!r:.200}: must be an object with `weights`")
        weights: dict[str, Any] = dict(group["weights"])
        named = str(group.get("format") or quantization.get("format"))
        if weights.get("strategy") is None:  # as compressed-tensors then takes it
            size = weights.get("group_size")
            weights["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
        check_field({"format": named}, "format", tuple(_KINDS), place if group.get("format") else WHERE)
        kind = _KINDS[named]
        for field, accepted in {
            "num_bits": kind.bits,
            "type": kind.types,
            "strategy": kind.strategies,
            "symmetric": (True, None) if kind.types == ("float",) else (True, False, None),
            "dynamic": (False, None),
            "actorder": (None, False, "static", "weight", "group", "dynamic"),
            "group_size": (kind.group, None) if kind.group else (weights.get("group_size"),),
        }.items():
            check_field(weights, field, tuple(accepted), f"{place}.weights")
        self._bits, self._strategy, self._is_int = weights["num_bits"], weights["strategy"], weights["type"] == "int"
        self._has_zeros = weights.get("symmetric") is False
        self._group: Any = kind.group or weights.get("group_size")
        if self._strategy == "group" and not (type(self._group) is int and self._group > 0):
            raise UnsupportedModelError(
                f"{place}.weights.group_size={self._group!r:.80}: must be a whole number above 0"
            )
        self.block: tuple[int, int] | None = None
        if self._strategy == "block":
            block = weights.get("block_structure")
            block = [int(size) for size in re.findall(r"\d+", block)] if isinstance(block, str) else block
            if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
                raise UnsupportedModelError(f"{place}.weights.block_structure={block!r:.80}: must be two whole numbers")
            self.block = block[0], block[1]
        targets = group.get("targets")
        self._targets = [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
        patterns = [target.removeprefix("re:") for target in self._targets if target.startswith("re:")]
        self._patterns = [NamePattern(pattern, f"{place}.targets") for pattern in patterns]
        self._numbers, self._is_packed = kind.numbers, kind.numbers == _PACKED
        self._is_fp4 = self._is_packed and not self._is_int
        endings = {
            self._numbers: True,
            _SCALE: True,
            _ZEROS: self._has_zeros,
            _GLOBAL: kind.group == _NVFP4_GROUP,
            _SHAPE: self._is_packed and self._is_int,
        }
        self.endings = tuple(ending for ending, is_needed in endings.items() if is_needed)
        self.further = () if self._is_fp4 else (_ORDER,) if self._is_packed else (_ZEROS, _ORDER)
        """Of some checkpoints, beside `endings`."""

    def rank(self, stem: str) -> int:
        """0 to 3: whether this name is a target, matches one, may be of a class that is, or not."""
        if stem in self._targets:
            return 0
        if any(pattern.matches(stem) for pattern in self._patterns):
            return 1
        return 2 if len(self._patterns) < len(self._targets) else 3

    def size(self, tensors: Mapping[str, Header]) -> list[int]:
        _, (*lead, width) = tensors[self._numbers]
        return [*lead, width if not self._is_packed else 2 * width if self._is_fp4 else 32 * width // self._bits]

    def scale_shapes(self, rows: int, columns: int) -> list[list[int]]:
        if self.block:
            return [[-(-rows // self.block[0]), -(-columns // self.block[1])]]
        if self._strategy == "tensor":
            return [[1], [], [1, 1]]
        return [[rows, 1], [rows]] if self._strategy == "channel" else [[rows, columns // self._group]]

    def accepted(self, tensors: Mapping[str, Header], rows: int, columns: int) -> Accepted:
        scales = self.scale_shapes(rows, columns)
        numbers = ("U8" if self._is_fp4 else "I32") if self._is_packed else "I8" if self._is_int else "F8_E4M3"
        of_scales = ("F8_E4M3",) if self._group == _NVFP4_GROUP else ("U8",)
        return {
            self._numbers: ((numbers,), [tensors[self._numbers][1]]),
            _SCALE: (of_scales if self._is_fp4 else FLOATS, scales),
            _ZEROS: (("I32",), [[-(-rows * self._bits // 32), scales[0][-1]]])
            if self._is_packed
            else (("I8", "F8_E4M3"), scales),
            _GLOBAL: (("F32",), [[1], []]),
            _SHAPE: (("I64", "I32"), [[2]]),
            _ORDER: (("I32", "I64"), [[columns]]),
        }

    def form(self, tensors: Mapping[str, Header], dtype: str) -> TiledFormat | None:
        """The format that keeps such a matrix where the model computes in `dtype`."""
        numbers, (scales, shape), (_, columns) = tensors[self._numbers], tensors[_SCALE], self.size(tensors)
        is_kept = dtype == _TORCH_DTYPES.get(scales)  # to which products are rounded
        if self._is_fp4:
            return NVFP4 if self._group == _NVFP4_GROUP else MXFP4
        if not self._is_packed:
            is_plain_fp8 = not self._is_int and len(tensors) == 2
            return fp8_form(numbers, shape) if is_plain_fp8 and (is_kept or scales == "F32") else None
        if self._bits != 4 or _ORDER in tensors or not (is_kept or dtype == "float32"):
            return None
        return int4_form(self._group if self._strategy == "group" else -1, columns, scales, self._has_zeros)


# -- modelopt ----------------------------------------------------------------------------------------------------------

_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")


class ModelOptLayout(Layout):
    """`quant_method` modelopt: tensors say which of NVFP4 and FP8 a matrix is in."""

    suffixes = (_WEIGHT, _SCALE, _FACTOR)

    def __init__(self, quantization: Mapping[str, Any], dtype: str) -> None:
        check_field(quantization, "quant_algo", _ALGORITHMS, WHERE)

    def endings(self, stem: str, tensors: Mapping[str, Header]) -> Sequence[str]:
        dtype, _ = tensors.get(_WEIGHT, ("", ()))
        return self.suffixes if dtype == "U8" else self.suffixes[:2]

    def size(self, stem: str, tensors: Mapping[str, Header]) -> list[int]:
        dtype, (*lead, width) = tensors[_WEIGHT]
        return [*lead, 2 * width if dtype == "U8" else width]

    def accepted(self, stem: str, tensors: Mapping[str, Header], size: list[int]) -> Accepted:
        (dtype, shape), scales, (*lead, rows, columns) = tensors[_WEIGHT], tensors[_SCALE][1], size
        numbers: Accepted = {_WEIGHT: (("U8", "F8_E4M3"), [shape])}
        if dtype == "U8":
            groups = [*lead, rows, columns // _NVFP4_GROUP]
            return {**numbers, _SCALE: (("F8_E4M3",), [groups]), _FACTOR: (("F32",), [[], [1]])}
        is_fitting = block_of(size, scales, (BLOCK, BLOCK)) is not None
        blocks = [*lead, -(-rows // BLOCK), -(-columns // BLOCK)]
        return {**numbers, _SCALE: ((*FLOATS, "F8_E8M0", "U8"), [scales if is_fitting else blocks])}

    def form_of(self, stem: str, tensors: Mapping[str, Header]) -> TiledFormat | None:
        if tuple(tensors) == self.suffixes:
            return NVFP4
        return fp8_form(tensors[_WEIGHT], tensors[_SCALE][1]) if tuple(tensors) == self.suffixes[:2] else None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Matrix:
        codes, scales, *factors = tensors.values()
        if factors:
            return Matrix(codes, scales, 4, 2 * codes.shape[-1], is_e2m1=True, factor=float(factors[0]))
        scales = scales if scales.dtype == torch.uint8 else scales.float()
        return Matrix(codes, scales, block=(BLOCK, BLOCK))

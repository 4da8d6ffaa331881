"""Undoes quantisations in groups of inputs and FP8 in blocks with our own code, without the packages that made them.

Only this file and conversion.py use `transformers.core_model_loading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.fp8 import BLOCK, scales_of
from expertly.formats.int4 import Int4Format
from expertly.formats.mxfp4 import VALUES
from expertly.store.checkpoint import TensorRef


class GroupDequantizer:
    """A quantizer for `Conversion`. `forms`: formats that matrices may have, which differ in dtypes alone."""

    renamed: Mapping[str, str] = {}
    """Endings of names, and what transformers is to take them for."""

    def __init__(self, forms: Sequence[Int4Format]) -> None:
        self.forms = forms
        self.suffixes = forms[0].suffixes

    def check(self, tensors: Mapping[str, TensorRef]) -> None:
        """Raises CheckpointError where a quantised matrix lacks a tensor, or has one that is not supported."""
        for name in tensors:
            for ending, reason in self.forms[0].refused.items():
                if name.endswith(ending):
                    beside = ", ".join(self.suffixes)
                    raise CheckpointError(f"tensor {name!r}: {reason}; accepted beside each other: {beside}")
            for stem in (name.removesuffix(suffix) for suffix in self.suffixes if name.endswith(suffix)):
                absent = next((stem + suffix for suffix in self.suffixes if stem + suffix not in tensors), None)
                if absent is not None:
                    raise CheckpointError(f"tensor {name!r}: there is no {absent} beside it")

    def weight(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A decoded matrix, in the dtype of its scales. Raises CheckpointError where it has none of the formats."""
        rows, columns = self.forms[0].size_of(tensors)
        stored = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(tensors[1].dtype)  # the scales
        for form in self.forms:
            if stored in form.stored_scales:
                return form.dequantised(tensors, rows, columns)
        accepted = " or ".join(name for form in self.forms for name in form.stored_scales)
        raise CheckpointError(f"{self.suffixes[1]}: {tensors[1].dtype}: must be {accepted}")


def extended(transforms: Sequence[Any], quantizer: GroupDequantizer | BlockDequantizer) -> list[Any]:
    """A model's transforms, which make weights from quantised tensors first; one more makes these alone."""
    suffixes = tuple(dict.fromkeys((".weight", *quantizer.suffixes)))
    made: list[Any] = [WeightRenaming(_ending(name), to) for name, to in quantizer.renamed.items()]
    for transform in transforms:
        sources = transform.source_patterns if isinstance(transform, WeightConverter) else []
        if not sources or not all(source.endswith(".weight") for source in sources):
            made.append(transform)
            continue
        stems = [source.removesuffix(".weight") for source in sources]
        names = [f"{stem}{suffix}$" for stem in stems for suffix in suffixes]
        copy = WeightConverter(names, transform.target_patterns, [Dequantize(quantizer), *transform.operations])
        copy.scope_prefix = getattr(transform, "scope_prefix", None)
        copy.base_model_prefix = getattr(transform, "base_model_prefix", None)
        made.append(copy)
    alone = WeightConverter(list(map(_ending, quantizer.suffixes)), ".weight", [Dequantize(quantizer, is_alone=True)])
    return [*made, alone]


def _ending(suffix: str) -> str:
    return suffix.replace(".", r"\.") + "$"


class Dequantize(ConversionOps):  # type: ignore[misc]
    """The operation of these quantizers. `is_alone`: its result is the parameter; no other operation follows."""

    def __init__(self, hf_quantizer: GroupDequantizer | BlockDequantizer, is_alone: bool = False) -> None:
        self.hf_quantizer = hf_quantizer
        self._is_alone = is_alone

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **others: Any,
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        matrices: dict[str, dict[str, Any]] = {}
        suffixes = self.hf_quantizer.suffixes
        for pattern in filter(input_dict.__contains__, source_patterns):
            name = pattern.removesuffix("$").replace(r"\.", ".")
            suffix = next((one for one in suffixes if name.endswith(one)), None)
            if suffix is None:
                made[pattern] = input_dict[pattern]
            else:
                matrices.setdefault(name.removesuffix(suffix), {})[suffix] = pattern
        for patterns in matrices.values():
            in_order = [patterns[suffix] for suffix in suffixes if suffix in patterns]
            tensors = [each if isinstance(each, list) else [each] for each in map(input_dict.__getitem__, in_order)]
            try:
                made[in_order[0]] = [self.hf_quantizer.weight(parts) for parts in zip(*tensors, strict=True)]
            except CheckpointError as error:
                raise CheckpointError(f"{full_layer_name}: {error}") from None
        if self._is_alone:
            ((only,),) = made.values()
            return {full_layer_name: only}
        return made


# -- FP8 ---------------------------------------------------------------------------------------------------------------

_WEIGHT, _SCALE = ".weight", ".weight_scale_inv"

_SCALES = (_SCALE, ".weight_scale", ".qscale_weight", ".scale")
"""Endings of the names of scales, which are all factors; the last two are DeepSeek-V4's and Mistral's."""

_IN_FP4 = ("I8", "U8", "F4")
"""Dtypes of two E2M1 numbers in a byte, which DeepSeek-V4 has in experts."""


class BlockDequantizer:
    """Takes the place of a transformers quantizer in `Conversion`, for FP8: a scale for each block of
    `weight_block_size` weights, of which the last of a row and of a column may be cut. Transformers divides rows and
    columns evenly by the number of scales, and so gives 192 rows in blocks of 128 the wrong ones.
    """

    suffixes = (_WEIGHT, _SCALE)
    renamed: Mapping[str, str] = dict.fromkeys(_SCALES[1:], _SCALE)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """Raises UnsupportedModelError naming the field of the config that is not supported."""
        block = quantization.get("weight_block_size", (BLOCK, BLOCK))
        is_block = isinstance(block, list | tuple) and len(block) == 2
        if block is not None and not (is_block and all(type(size) is int and 0 < size < 1 << 31 for size in block)):
            raise UnsupportedModelError(
                f"quantization_config.weight_block_size={block!r:.80}: must be two whole numbers above 0, or null"
            )
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        # A scale for a whole matrix, as AutoFP8 has it.
        self._may_be_one = quantization.get("weight_block_size") is None
        self._is_fp4 = quantization.get("expert_dtype") == "fp4"

    def check(self, tensors: Mapping[str, TensorRef]) -> None:
        """Raises CheckpointError where a quantised matrix lacks its scales, or these are not as many as its blocks."""
        for name, ref in tensors.items():
            is_fp4 = self._is_fp4 and ref.dtype in _IN_FP4
            if not name.endswith(_WEIGHT) or not (ref.dtype.startswith("F8_") or is_fp4) or len(ref.shape) < 2:
                continue
            stem = name.removesuffix(_WEIGHT)
            scales = [stem + ending for ending in _SCALES if stem + ending in tensors]
            if len(scales) != 1:
                beside = f"{' and '.join(scales)} are" if scales else f"there is no {stem}{_SCALE}"
                raise CheckpointError(f"{ref.path}: tensor {name!r}: {ref.dtype}, and {beside} beside it")
            shape = (*ref.shape[:-1], ref.shape[-1] * 2) if is_fp4 else ref.shape
            try:
                self._block_of(shape, tensors[scales[0]].shape, is_fp4)
            except CheckpointError as error:
                raise CheckpointError(f"{tensors[scales[0]].path}: tensor {scales[0]!r}: {error}") from None

    def _block_of(self, shape: Sequence[int], scales: Sequence[int], is_fp4: bool) -> tuple[int, int]:
        """The rows and columns that share a scale. Raises CheckpointError where scales of this shape are none of it."""
        rows, columns = shape[-2:]
        block = (1, 32) if is_fp4 else self._block or (1, columns)
        expected = [*shape[:-2], -(-rows // block[0]), -(-columns // block[1])]
        if list(scales) == expected:
            return block
        if self._may_be_one and not is_fp4 and len(shape) == 2 and all(size == 1 for size in scales):
            return rows, columns
        raise CheckpointError(
            f"shape {list(scales)}: must be {expected} for {list(shape)} weights, as config.json has it "
            f"(weight_block_size={self._block and list(self._block)})"
        )

    def weight(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A decoded matrix in float32; one without scales as it is. Raises CheckpointError where the scales are none of
        it, or no numbers.
        """
        if len(tensors) == 1:
            return tensors[0]
        codes, scales = tensors
        is_fp4 = codes.dtype in (torch.int8, torch.uint8)
        if is_fp4 and not self._is_fp4:
            raise CheckpointError(f"weights in {codes.dtype}: must be FP8, as config.json has it")
        values = codes.float()
        if is_fp4:
            pairs = codes.view(torch.uint8)
            values = torch.tensor(VALUES)[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).int()]
        block = self._block_of(values.shape, scales.shape, is_fp4)
        if bool(values.isnan().any()):
            raise CheckpointError("a weight is 0x7f or 0xff, which stands for NaN: must be a number")
        factors = scales_of(scales).reshape(*scales.shape[:-2], *(scales.shape[-2:] if scales.dim() > 1 else (1, 1)))
        rows, columns = values.shape[-2:]
        for dim, size in ((-2, rows), (-1, columns)):
            factors = factors.repeat_interleave(min(block[dim], size), dim).narrow(dim, 0, size)
        return values.mul_(factors)

"""Undoes quantisations in groups of inputs with our own weight formats, without the packages that made them.

Only this file and conversion.py use `transformers.core_model_loading`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from expertly.core.errors import CheckpointError
from expertly.formats import Int4Format

Tensors = dict[str, Any]
"""By pattern: a tensor, or a list with one for each expert."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


class GroupDequantizer:
    """Takes the place of a transformers quantizer in `Conversion`. `forms`: the formats that a checkpoint's matrices
    may have; their tensors have the same names and differ in dtypes.
    """

    def __init__(self, forms: Sequence[Int4Format]) -> None:
        self.forms = forms
        self.suffixes = forms[0].suffixes

    def check_names(self, names: Collection[str]) -> None:
        """Raises CheckpointError where a quantised matrix lacks a tensor, or has one that is not supported."""
        for name in names:
            refused = next((one for one in self.forms[0].refused if name.endswith(one)), None)
            if refused is not None:
                raise CheckpointError(
                    f"tensor {name!r}: {self.forms[0].refused[refused]}; accepted beside each other: "
                    f"{', '.join(self.suffixes)}"
                )
            suffix = next((one for one in self.suffixes if name.endswith(one)), None)
            if suffix is None:
                continue
            stem = name.removesuffix(suffix)
            for other in self.suffixes:
                if stem + other not in names:
                    raise CheckpointError(f"tensor {name!r}: there is no {stem}{other} beside it")

    def converted(self, transforms: Sequence[Any]) -> list[Any]:
        """The model's transforms, extended to make weights from quantised tensors, too."""
        found: list[Any] = []
        for one in transforms:
            sources = one.source_patterns if isinstance(one, WeightConverter) else []
            if not sources or not all(source.endswith(".weight") for source in sources):
                found.append(one)
                continue
            stems = [source.removesuffix(".weight") for source in sources]
            names = [f"{stem}{suffix}$" for stem in stems for suffix in (".weight", *self.suffixes)]
            operations = [GroupDequantize(self), *one.operations]
            copy = WeightConverter(names, one.target_patterns, operations)
            copy.scope_prefix = getattr(one, "scope_prefix", None)
            copy.base_model_prefix = getattr(one, "base_model_prefix", None)
            found.append(copy)
        escaped = [suffix.replace(".", r"\.") + "$" for suffix in self.suffixes]
        return [*found, WeightConverter(escaped, ".weight", [GroupDequantize(self, is_alone=True)])]

    def weight(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A decoded matrix, in the dtype of its scales. Raises CheckpointError where it has none of the formats."""
        rows, columns = self.forms[0].size_of(tensors)
        at = self.forms[0].scales_at
        for form in self.forms:
            if tensors[at].dtype in (_DTYPES[one] for one in form.stored_scales):
                return form.dequantised(tensors, rows, columns)
        accepted = " or ".join(str(_DTYPES[one]) for form in self.forms for one in form.stored_scales)
        raise CheckpointError(f"{self.suffixes[at]}: {tensors[at].dtype}: must be {accepted}")


class GroupDequantize(ConversionOps):  # type: ignore[misc]
    """The operation of a GroupDequantizer. `is_alone`: its result is the parameter; no other operation follows."""

    def __init__(self, hf_quantizer: GroupDequantizer, is_alone: bool = False) -> None:
        self.hf_quantizer = hf_quantizer
        self._is_alone = is_alone

    @torch.no_grad()
    def convert(
        self,
        input_dict: Tensors,
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **others: Any,
    ) -> Tensors:
        made: Tensors = {}
        matrices: dict[str, dict[str, Any]] = {}
        suffixes = self.hf_quantizer.suffixes
        for pattern in source_patterns:
            name = pattern.removesuffix("$").replace(r"\.", ".")
            suffix = next((one for one in suffixes if name.endswith(one)), None)
            if pattern in input_dict and suffix is None:
                made[pattern] = input_dict[pattern]
            elif pattern in input_dict and suffix is not None:
                matrices.setdefault(name.removesuffix(suffix), {})[suffix] = pattern
        for found in matrices.values():
            tensors = [_listed(input_dict[found[suffix]]) for suffix in suffixes]
            try:
                weights = [self.hf_quantizer.weight(parts) for parts in zip(*tensors, strict=True)]
            except CheckpointError as error:
                raise CheckpointError(f"{full_layer_name}: {error}") from None
            made[found[suffixes[0]]] = weights
        if self._is_alone:
            ((only,),) = made.values()
            return {full_layer_name: only}
        return made


def _listed(tensors: Any) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]

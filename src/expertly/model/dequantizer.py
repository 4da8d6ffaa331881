"""Undoes quantisations that have a layout in `expertly.formats`, without the packages that made them.

Only this file and conversion.py use `transformers.core_model_loading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming

from expertly.core.errors import CheckpointError
from expertly.formats.layouts import Layout
from expertly.store.checkpoint import TensorRef

_WEIGHT, _FUSED = ".weight", "_proj"
"""Endings of parameters: of a layer, and of stacked experts."""


def check_matrices(layout: Layout, tensors: Mapping[str, TensorRef]) -> None:
    """Raises CheckpointError where the tensors of a quantised matrix do not fit together."""
    for stem, matrix in layout.matrices(tensors).items():
        try:
            layout.check(stem, {ending: (ref.dtype, ref.shape) for ending, ref in matrix.items()})
        except CheckpointError as error:
            raise CheckpointError(f"{next(iter(matrix.values())).path}: {error}") from None


def extended(transforms: Sequence[Any], layout: Layout) -> list[Any]:
    """A model's transforms, which make weights from quantised tensors first; further ones make these alone."""
    endings = {_WEIGHT: tuple(dict.fromkeys((_WEIGHT, *layout.suffixes))), _FUSED: layout.fused}
    made: list[Any] = [WeightRenaming(_ending(name), to) for name, to in layout.renamed.items()]
    for transform in transforms:
        sources = [source.removesuffix("$") for source in getattr(transform, "source_patterns", ())]
        last = next((end for end in endings if sources and all(source.endswith(end) for source in sources)), None)
        if not isinstance(transform, WeightConverter) or last is None or not endings[last]:
            made.append(transform)
            continue
        names = [f"{source.removesuffix(last)}{ending}$" for source in sources for ending in endings[last]]
        copy = WeightConverter(names, transform.target_patterns, [Dequantize(layout), *transform.operations])
        copy.scope_prefix = getattr(transform, "scope_prefix", None)
        copy.base_model_prefix = getattr(transform, "base_model_prefix", None)
        made.append(copy)
    for target, stems in layout.stacked.items():
        names = [_ending(stem + ending) for stem in stems for ending in layout.suffixes]
        made.append(WeightConverter(names, target, [Dequantize(layout), Concatenate(dim=1)]))
    for last, suffixes in ((_WEIGHT, layout.suffixes), (_FUSED, layout.fused)):
        if suffixes:
            made.append(WeightConverter(list(map(_ending, suffixes)), last, [Dequantize(layout, is_alone=True)]))
    return made


def _ending(suffix: str) -> str:
    return suffix.replace(".", r"\.") + "$"


def plain_name(pattern: str) -> str:
    """The name in a pattern that `extended` made of it."""
    return pattern.removesuffix("$").replace(r"\.", ".")


class Dequantize(ConversionOps):  # type: ignore[misc]
    """The operation of a layout. `is_alone`: its result is the parameter; no other operation follows."""

    def __init__(self, layout: Layout, is_alone: bool = False) -> None:
        self._layout, self._is_alone = layout, is_alone

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        **_: Any,
    ) -> dict[str, Any]:
        names = {plain_name(pattern): pattern for pattern in source_patterns if pattern in input_dict}
        layout = self._layout
        made = {pattern: input_dict[pattern] for name, pattern in names.items() if layout.split(name) is None}
        for matrix in layout.matrices(names).values():
            tensors = map(input_dict.__getitem__, matrix.values())
            lists = [each if isinstance(each, list) else [each] for each in tensors]
            try:
                made[next(iter(matrix.values()))] = [
                    layout.weight(dict(zip(matrix, parts, strict=True))) for parts in zip(*lists, strict=True)
                ]
            except CheckpointError as error:
                raise CheckpointError(f"{full_layer_name}: {error}") from None
        if self._is_alone:
            ((only,),) = made.values()
            return {full_layer_name: only}
        return made

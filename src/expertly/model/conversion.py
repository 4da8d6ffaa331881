"""Checkpoint names and layouts to the model's, by transformers' own conversion mapping, one expert at a time.

The only file that touches `transformers.core_model_loading`, `conversion_mapping` and the quantizers, none of which
is a stable interface: it is tested on the oldest and the newest version that the package accepts.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping, core_model_loading
from transformers.quantizers.auto import AutoHfQuantizer

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.model.adapter import build_meta_model

QUANT_METHODS = ("fp8", "mxfp4")
"""Quantisations that packing undoes: those for which transformers has an operation that does."""

_ROWWISE_OPERATIONS = ("Concatenate", "Transpose", "Interleave", "Mxfp4Dequantize", "Fp8Dequantize")

Tensors = Mapping[str, Sequence[torch.Tensor]]
"""Source pattern to the tensors that matched it, in order."""


@dataclass(slots=True)
class Group:
    """The checkpoint tensors that make one parameter of the model (or several: then it is the first's group)."""

    target: str
    converter: Any | None  # WeightConverter; None where a tensor is the parameter
    sources: dict[str, list[str]] = field(default_factory=dict)  # pattern to names, in transformers' order

    @property
    def is_per_expert(self) -> bool:
        """Do several tensors, one an expert, become one parameter?"""
        return self.converter is not None and any("*" in pattern for pattern in self.sources)

    @property
    def is_rowwise(self) -> bool:
        """Is row e of the parameter made of the e-th tensors, or of row e of the one tensor, alone?"""
        operations = [] if self.converter is None else self.converter.operations
        return all(_is_rowwise(operation) for operation in operations)

    @property
    def is_dequantized(self) -> bool:
        operations = [] if self.converter is None else self.converter.operations
        return any(getattr(operation, "hf_quantizer", None) is not None for operation in operations)

    def expert_indices(self, pattern: str) -> list[int]:
        """The number that each name has where `pattern` has its star; empty where renaming hides it."""
        shape = re.compile(pattern.removesuffix("$").replace("*", r"(\d+)"))
        found = [shape.search(name) for name in self.sources[pattern]]
        return [int(match.group(match.lastindex or 0)) for match in found if match] if all(found) else []

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


def _is_rowwise(operation: Any) -> bool:
    name = type(operation).__name__
    if name == "MergeModulelist":
        return bool(operation.dim == 0)
    if name not in _ROWWISE_OPERATIONS:
        return False
    return all(getattr(operation, dim, 1) >= 1 for dim in ("dim", "dim0", "dim1"))


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device with parameters of `dtype`, as from_pretrained makes it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build_meta_model(config)
    finally:
        torch.set_default_dtype(before)


def make_quantizer(quantization: object) -> Any | None:
    """The quantizer that undoes `config.quantization_config`, or None where there is none.

    Raises UnsupportedModelError naming the method and what is supported.
    """
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    accepted = f"supported: none, {', '.join(QUANT_METHODS)}"
    if method not in QUANT_METHODS:
        raise UnsupportedModelError(
            f"quantization_config.quant_method={method!r:.80}: packing cannot undo it; {accepted}; or give an "
            "unquantised checkpoint of the model"
        )
    assert isinstance(quantization, dict)
    try:
        with _quiet():
            return AutoHfQuantizer.from_config({**quantization, "dequantize": True}, pre_quantized=True)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise UnsupportedModelError(f"quantization_config={quantization!r:.200}: {error}; {accepted}") from error


class Conversion:
    """transformers' mapping for one model, from checkpoint names to parameters."""

    def __init__(self, model: PreTrainedModel, quantizer: Any | None = None) -> None:
        self._model = model
        self._quantizer = quantizer
        transforms = conversion_mapping.get_model_conversion_mapping(model, hf_quantizer=quantizer)
        self._renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        self._of_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._parameters = model.state_dict()

    def target(self, name: str) -> tuple[str, str | None]:
        """The parameter that a checkpoint tensor (first) makes, and the converter's pattern that it matched."""
        prefix = self._model.base_model_prefix
        found: tuple[str, str | None] = core_model_loading.rename_source_key(
            name, self._renamings, self._converters, prefix, self._parameters
        )
        if found[0] not in self._parameters and name in self._parameters:
            found = core_model_loading.rename_source_key(
                name, [], [], base_model_prefix=prefix, meta_state_dict=self._parameters
            )
        return found

    def groups(self, names: Iterable[str]) -> tuple[dict[str, Group], list[str]]:
        """Groups by the parameter that they (first) make, and the names that transformers would ignore."""
        groups: dict[str, Group] = {}
        unexpected = []
        for name in sorted(names, key=core_model_loading.dot_natural_key):
            target, pattern = self.target(name)
            if target not in self._parameters:
                unexpected.append(name)
                continue
            if target not in groups:
                converter = None if pattern is None else copy.deepcopy(self._of_pattern[pattern])
                groups[target] = Group(target, converter)
            groups[target].sources.setdefault(pattern or name, []).append(name)
        return groups, unexpected

    def targets(self, group: Group) -> list[str]:
        """All parameters that a group makes."""
        if group.converter is None:
            return [group.target]
        first, *others = group.converter.target_patterns
        return [group.target, *(group.target.replace(first, other) for other in others)]

    def shape(self, target: str) -> tuple[int, ...]:
        """What the config says."""
        return tuple(self._parameters[target].shape)

    def missing(self, groups: Mapping[str, Group]) -> list[str]:
        """Parameters that no group makes, other than tied ones and those that transformers lets go missing."""
        made = {target for group in groups.values() for target in self.targets(group)}
        tied: dict[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        ignored = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        return [
            name
            for name, _ in self._model.named_parameters(remove_duplicate=False)
            if name not in made
            and tied.get(name) not in made
            and not any(tied.get(other) == name and other in made for other in tied)
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def convert(
        self, group: Group, tensors: Tensors, target: str | None = None, is_one_row: bool = False
    ) -> torch.Tensor:
        """The parameter that `tensors` make, which are as `group.sources`, or (`is_one_row`) one row's part of it.

        Raises CheckpointError naming the sources where they do not fit together.
        """
        if group.converter is None:
            (only,) = tensors.values()
            return only[0]
        converter = group.converter
        for pattern, found in tensors.items():
            for tensor in found:
                converter.add_tensor(group.target, group.target, pattern, tensor)
        model = _OneRow(self._model) if is_one_row else self._model
        try:
            made = converter.convert(group.target, model=model, config=self._model.config, hf_quantizer=self._quantizer)
        except (ValueError, RuntimeError, KeyError, IndexError, AttributeError, TypeError) as error:
            converter.collected_tensors.clear()
            shapes = [f"{n}" for n in group.names[:3]]
            raise CheckpointError(
                f"tensors {', '.join(shapes)}, ...: cannot be made into {group.target}: {error}"
            ) from error
        wanted = target or group.target
        if wanted not in made:
            raise CheckpointError(f"tensors {_some(group)}: make {list(made)}, but not {wanted}")
        tensor = made[wanted]
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        return tensor.detach()


class _OneRow:
    """A model whose parameters have but one row, for operations that compare shapes with the model's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, target: str) -> torch.Tensor:
        return self._model.get_parameter(target)[:1]


def _some(group: Group) -> str:
    return ", ".join(group.names[:3]) + (", ..." if len(group.names) > 3 else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Quantizers warn that they will dequantise, which is what is asked of them."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

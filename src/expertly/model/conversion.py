"""From a checkpoint's tensors to a model's parameters and to an expert's bytes, by transformers' conversion mapping.

Only this file and dequantizer.py use `transformers.core_model_loading` and `conversion_mapping`. None of these is a
stable interface: it is tested with the oldest and the newest accepted version of transformers.
E experts, H hidden, I intermediate, M matrices of an expert.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, conversion_mapping, core_model_loading
from transformers.modeling_utils import str_to_torch_dtype

from expertly.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from expertly.formats import LAYOUTS, expert_format, layout_of
from expertly.formats.gguf import nvfp4_of
from expertly.formats.layouts import Header, Layout
from expertly.formats.tiles import ExpertFormat, RoundingFormat, TiledFormat
from expertly.model.dequantizer import Dequantize, extended, plain_name
from expertly.model.hooks import Altered
from expertly.model.structure import ExpertsSite, first_line
from expertly.store.checkpoint import Bytes, Checkpoint
from expertly.store.manifest import IS_FLOAT

ACCEPTED = "must be BF16, F16, F32 or F64 (or quantised, with a quantization_config that transformers can undo)"
"""Of dtypes of weights."""

Tensors = Mapping[str, Sequence[torch.Tensor]]
"""The tensors that match each source pattern, in order."""


@dataclass(slots=True)
class Group:
    """The checkpoint tensors that make a parameter of the model, or several: then `target` is the first of these."""

    target: str
    converter: Any | None  # WeightConverter; None where a single tensor is the parameter
    sources: dict[str, list[str]] = field(default_factory=dict)  # names by pattern, in transformers' order

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def is_per_expert(self) -> bool:
        """Whether each expert has a tensor of its own, which are merged into one parameter."""
        return self.converter is not None and any("*" in pattern for pattern in self.sources)

    @property
    def is_rowwise(self) -> bool:
        """Whether row e of the parameter depends on the e-th tensors, or row e of a tensor, alone."""
        known = ("Concatenate", "ConcatenateRows", "Transpose", "Interleave", "Dequantize")
        return all(
            operation.dim == 0
            if type(operation).__name__ == "MergeModulelist"
            else type(operation).__name__ in known
            and all(getattr(operation, dim, 1) >= 1 for dim in ("dim", "dim0", "dim1"))
            for operation in self.operations
        )

    @property
    def is_dequantized(self) -> bool:
        return any(isinstance(operation, Dequantize) for operation in self.operations)

    @property
    def patterns(self) -> list[str]:
        """The patterns of `sources`, in the order in which transformers concatenates their results."""
        in_order = self.sources if self.converter is None else self.converter.source_patterns
        return [pattern for pattern in in_order if pattern in self.sources]

    @property
    def operations(self) -> Sequence[Any]:
        return () if self.converter is None else self.converter.operations

    def expert_numbers(self, pattern: str) -> set[int]:
        """The number in each name at the star of `pattern`; empty where renaming hides one."""
        shape = re.compile(pattern.removesuffix("$").replace("*", r"(\d+)"))
        matches = [shape.search(name) for name in self.sources[pattern]]
        return (
            {int(match[match.lastindex]) for match in matches if match and match.lastindex} if all(matches) else set()
        )


def make_layout(quantization: object, dtype: str) -> Layout | None:
    """What undoes `config.quantization_config` for a model in `dtype`, or None. Raises UnsupportedModelError."""
    if not quantization:
        return None
    layout = layout_of(quantization, dtype)
    if layout is None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"quantization_config.quant_method={method!r:.80}: packing cannot undo it, whatever the dtype; "
            f"supported: none, {', '.join(LAYOUTS)}; or give an unquantised checkpoint of the model"
        )
    return layout


def _of_single_experts(sites: Sequence[ExpertsSite], transforms: Sequence[Any]) -> list[Any]:
    """Converters of `experts.0.gate_proj.weight` and its like, as llm-compressor writes them, for sites of which
    transformers only reads stacked experts.
    """
    of_single = [transform for transform in transforms if any("*" in each for each in transform.source_patterns)]
    targets = tuple(pattern for transform in of_single for pattern in transform.target_patterns)
    made: dict[str, Any] = {}
    for site in sites:
        path = ".".join(site.name.split(".")[-2:])
        if not site.is_concatenated or any(f"{path}.{site.weight_names[0]}".endswith(target) for target in targets):
            continue
        turn = [core_model_loading.Transpose(dim0=1, dim1=2)] if site.is_transposed else []
        for name in site.weight_names:
            parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
            join = [core_model_loading.Concatenate(dim=1)] if parts[1:] else []
            made[f"{path}.{name}"] = core_model_loading.WeightConverter(
                [f"{path}.*.{part}.weight" for part in parts],
                f"{path}.{name}",
                [core_model_loading.MergeModulelist(dim=0), *join, *turn],
            )
    return list(made.values())


class Conversion:
    """transformers' mapping for one model, from checkpoint names to parameters."""

    def __init__(self, model: PreTrainedModel, layout: Layout | None = None, sites: Sequence[ExpertsSite] = ()) -> None:
        """`sites`: whose experts may also have a tensor each where transformers' mapping has none such."""
        self._model, self._layout = model, layout
        self._turned = {parameter for site in sites if site.is_transposed for parameter in site.parameters}
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        transforms = [*transforms, *_of_single_experts(sites, transforms)]
        transforms = transforms if layout is None else extended(transforms, layout)
        self._renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        self._of_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self.parameters = model.state_dict()

    def keeps_rows(self, group: Group) -> bool:
        """Whether a parameter's (or an expert's) rows are those of its group's matrices, in the order of `patterns`."""
        places = {"MergeModulelist": 0, "Concatenate": 1, "ConcatenateRows": 1}
        is_turned = group.is_per_expert and group.target in self._turned  # so that an expert's own matrices are not
        layout, first = self._layout, plain_name(group.patterns[0])
        if layout is not None and layout.is_fused_turned and first.endswith(layout.fused[0]):
            return False
        return group.is_dequantized and all(
            isinstance(operation, Dequantize)
            or (is_turned and isinstance(operation, core_model_loading.Transpose))
            or places.get(type(operation).__name__) == getattr(operation, "dim", None)
            for operation in group.operations
        )

    def matrices(self, group: Group, checkpoint: Checkpoint) -> dict[str, dict[str, Header]]:
        """Of each matrix of a group that keeps rows, or of one expert's, the tensors' headers by ending."""
        assert self._layout is not None
        is_of_all = len(self.shape(group.target)) == 3 and not group.is_per_expert  # experts in one tensor
        refs = {name: checkpoint.tensors[name] for name in (group.sources[pattern][0] for pattern in group.patterns)}
        return self._layout.matrices({name: (ref.dtype, ref.shape[is_of_all:]) for name, ref in refs.items()})

    def forms(self, group: Group, checkpoint: Checkpoint) -> list[TiledFormat]:
        """The format of each matrix that keeps its bytes; empty where one has none, or they are changed."""
        if self._layout is None or not self.keeps_rows(group):
            return []
        matrices = self.matrices(group, checkpoint)
        dtypes = [next(iter(tensors.values()))[0] for tensors in matrices.values()]
        if not checkpoint.gguf and not {*IS_FLOAT}.isdisjoint(dtypes):
            return []
        forms = [self._layout.form_of(stem, tensors) for stem, tensors in matrices.items()]
        return [form for form in forms if form is not None] if None not in forms else []

    def check_sizes(self, group: Group, checkpoint: Checkpoint, rows: int, columns: int) -> None:
        """Raises CheckpointError where a group's matrices are not those of a parameter [rows, columns]."""
        assert self._layout is not None
        matrices = self.matrices(group, checkpoint)
        for stem, tensors in matrices.items():
            size, expected = self._layout.check(stem, tensors), [rows // len(matrices), columns]
            if size != expected:
                raise CheckpointError(
                    f"{checkpoint.folder}: tensor '{stem}{next(iter(tensors))}' is of {size} weights; must be "
                    f"{expected}, as {checkpoint.sizes_from} has it"
                )

    def parts(
        self, forms: Sequence[TiledFormat], group: Group, checkpoint: Checkpoint, expert: int | None = None
    ) -> list[tuple[Bytes, ...]]:
        """The parts of each of a group's matrices (of an expert), in `forms`. Raises CheckpointError naming tensors."""
        assert self._layout is not None
        is_of_all = expert is not None and not group.is_per_expert
        tensors = read_group(checkpoint, group, expert, as_bytes=True)
        matrices = self._layout.matrices({plain_name(pattern): pattern for pattern in group.patterns})
        parts = []
        for form, patterns in zip(forms, matrices.values(), strict=True):
            stored = {ending: tensors[pattern][0] for ending, pattern in patterns.items()}
            try:
                parts.append(form.parts_of(self._layout.read({e: t[0] if is_of_all else t for e, t in stored.items()})))
            except CheckpointError as error:
                number = 0 if expert is None or is_of_all else expert
                names = ", ".join(group.sources[pattern][number] for pattern in patterns.values())
                label = "" if expert is None else f"expert {expert} of "
                raise CheckpointError(f"{label}{names}: {error}") from None
        return parts

    def target(self, name: str) -> tuple[str, str | None]:
        """The (first) parameter that a checkpoint tensor makes, and the converter's pattern that it matches."""
        rename, prefix = core_model_loading.rename_source_key, self._model.base_model_prefix
        renamed: tuple[str, str | None] = rename(name, self._renamings, self._converters, prefix, self.parameters)
        if renamed[0] not in self.parameters and name in self.parameters:
            return rename(name, [], [], prefix, self.parameters)  # type: ignore[no-any-return]
        return renamed

    def groups(self, names: Iterable[str]) -> tuple[dict[str, Group], list[str]]:
        """Groups by their (first) parameter, and the names that transformers would ignore."""
        groups: dict[str, Group] = {}
        unexpected = []
        ignored = () if self._layout is None else self._layout.ignored
        for name in sorted(names, key=core_model_loading.dot_natural_key):
            if name.endswith(ignored):
                continue
            target, pattern = self.target(name)
            if target not in self.parameters:
                unexpected.append(name)
                continue
            if target not in groups:
                groups[target] = Group(target, copy.deepcopy(self._of_pattern.get(pattern or "")))
            groups[target].sources.setdefault(pattern or name, []).append(name)
        return groups, unexpected

    def targets(self, group: Group) -> list[str]:
        if group.converter is None:
            return [group.target]
        first, *rest = group.converter.target_patterns
        return [group.target, *(group.target.replace(first, pattern) for pattern in rest)]

    def shape(self, target: str) -> tuple[int, ...]:
        return tuple(self.parameters[target].shape)

    def missing(self, groups: Mapping[str, Group]) -> list[str]:
        """Parameters and persistent buffers that no group makes, without tied ones and those that transformers allows
        to be missing.
        """
        made = {target for group in groups.values() for target in self.targets(group)}
        tied: dict[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        made |= {name for pair in tied.items() if made.intersection(pair) for name in pair}
        ignored = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        names = (name for name in self.parameters if name not in made)
        return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]

    def why_missing(self, checkpoint: Checkpoint, target: str, num_experts: int = 0) -> str:
        """Why a checkpoint makes no parameter `target`, as far as the names of its tensors tell. `num_experts`: of the
        layer, where it is one of experts.
        """
        names = sorted(checkpoint.tensors, key=core_model_loading.dot_natural_key)
        model_type = self._model.config.model_type
        unknown = [name for name in names if self.target(name)[0] not in self.parameters]
        if len(unknown) == len(names):
            return f"none of its {len(names)} tensors is one of a {model_type} ({', '.join(names[:2])}, ...)"
        for stack, number in re.findall(r"(\w+)\.(\d+)\.", target)[:1]:
            present = {int(each) for name in names for each in re.findall(rf"\b{stack}\.(\d+)\.", name)}
            if present and int(number) not in present:
                return (
                    f"its tensors are of {len(present)} {stack}, from {min(present)} to {max(present)}, and "
                    f"{checkpoint.sizes_from} makes more; or a file of weights is not whole"
                )
        block = target.rpartition(".experts.")[0].rpartition(".")[2] or target.split(".")[-2]
        near = next((name for name in unknown if block in name), None)
        if near is not None:
            return f"{near} and tensors like it are none of a {model_type}: renamed, or of another model_type"
        if num_experts:
            return f"{checkpoint.sizes_from} says {num_experts} experts"
        size = "x".join(map(str, self.shape(target)))
        return f"{checkpoint.sizes_from} makes it ({size}), and no tensor's name is like it"

    def row_order(self, group: Group) -> torch.Tensor | None:
        """Which rows of a group's tensors, one below another, are a parameter's, where that is not their order."""
        return None

    def convert(
        self, group: Group, tensors: Tensors, target: str | None = None, is_one_row: bool = False
    ) -> torch.Tensor:
        """The parameter from its `tensors`, ordered as `group.sources`; with `is_one_row` one row of it from the row's
        tensors. Raises CheckpointError naming the sources where they do not fit together.
        """
        if group.converter is None:
            (only,) = tensors.values()
            return only[0]
        converter = group.converter
        for pattern, several in tensors.items():
            for tensor in several:
                converter.add_tensor(group.target, group.target, pattern, tensor)
        model: Any = self._model
        if is_one_row:  # some operations compare shapes with the model's
            model = Altered(model, get_parameter=lambda name: self._model.get_parameter(name)[:1])
        try:
            made = converter.convert(group.target, model=model, config=self._model.config)
        except (ValueError, RuntimeError, KeyError, IndexError, AttributeError, TypeError) as error:
            converter.collected_tensors.clear()
            raise CheckpointError(
                f"tensors {', '.join(group.names[:3])}, ...: cannot be made into {group.target}: {first_line(error)}"
            ) from error
        target = target or group.target
        if target not in made:
            raise CheckpointError(f"tensors {', '.join(group.names[:3])}: make {list(made)}, but not {target}")
        tensor = made[target]
        return (tensor[0] if isinstance(tensor, list) else tensor).detach()  # type: ignore[no-any-return]


# -- experts -----------------------------------------------------------------------------------------------------------

_ROUNDED_AT_ONCE = 1 << 18
"""Weights, so that the temporaries of rounding stay in a processor's cache."""

_CHUNK_NBYTES = 8 << 20
"""An expert, which can be hundreds of MiB, is assembled in parts of this size."""


class ExpertsReader:
    """Reads the experts of one site, [I, M, H], one at a time; a whole layer only where an operation mixes experts."""

    def __init__(
        self,
        site: ExpertsSite,
        checkpoint: Checkpoint,
        conversion: Conversion,
        groups: dict[str, Group],
        kept: bool,
        rounding: RoundingFormat | None = None,
    ) -> None:
        """Checks counts, dtypes and shapes of all experts from the headers. `kept`: whether their bytes are, where a
        format can. Raises CheckpointError, or ConfigError where sizes do not fit the format of `rounding`.
        """
        self._site, self._checkpoint, self._conversion = site, checkpoint, conversion
        self._groups: dict[str, Group] = {}
        num_experts = site.geometry.num_experts
        for target in site.parameters:
            made_by = (group for group in groups.values() if target in conversion.targets(group))
            group = groups.get(target) or next(made_by, None)
            if group is None:
                reason = conversion.why_missing(checkpoint, target, num_experts)
                raise CheckpointError(f"{checkpoint.folder}: no tensor for {target}: {reason}")
            self._groups[target] = group
        self._forms: dict[str, list[TiledFormat]] = {}
        self._format = self._kept_format() if kept else None
        self._rounding = rounding
        stored_in = self._format if rounding is None else expert_format(rounding.name)
        try:
            self.geometry = site.geometry if stored_in is None else stored_in.geometry(site.geometry)
        except ConfigError as error:
            raise ConfigError(f"quantize: {site.name}: {error}") from None
        for target, group in self._groups.items():
            self._check(target, group)
        self._check_layout()
        self._whole: dict[str, torch.Tensor] = {}

    @property
    def is_decoded(self) -> bool:
        """Whether experts are quantised in the checkpoint, and not in the store."""
        names = self.source_names
        is_float = all(self._checkpoint.tensors[name].dtype in IS_FLOAT for name in names)
        return self._format is None and self._rounding is None and not is_float

    @property
    def source_names(self) -> set[str]:
        return {name for group in self._groups.values() for name in group.names}

    def experts(self, dtype: torch.dtype) -> Iterator[Bytes]:
        """The bytes of all experts in order, some neurons at a time: kept, in `dtype`, or rounded from it."""
        try:
            for expert in range(self.geometry.num_experts):
                if self._format is not None:
                    yield from self._kept(self._format, expert)
                elif self._rounding is not None:
                    yield from self._rounded(self._rounding, expert, dtype)
                else:
                    yield from self._cast(expert, dtype)
        finally:
            self._whole.clear()

    def _cast(self, expert: int, dtype: torch.dtype) -> Iterator[Bytes]:
        matrices, label = list(self._matrices(expert)), f"expert {expert} of {self._site.name}"
        step = max(1, _CHUNK_NBYTES // self.geometry.neuron_nbytes)
        for start in range(0, self.geometry.intermediate_size, step):
            yield to_bytes(
                torch.stack([cast(matrix[start : start + step], dtype, label) for matrix in matrices], dim=1)
            )

    def _matrices(self, expert: int) -> Iterator[torch.Tensor]:
        """Gate (if any), up, and down transposed: [I, H] each."""
        site = self._site
        first, second = site.parameters
        up = self._weight(first, expert)
        up = up.T if site.is_transposed else up
        yield from (up[rows] for rows in self._inner_rows(len(up), site.is_concatenated))
        down = self._weight(second, expert)
        yield down if site.is_transposed else down.T

    def _inner_rows(self, num_rows: int, is_concatenated: bool) -> list[slice]:
        """The rows of gate (if any) and of up in the matrix of both."""
        if not self._site.has_gate:
            return [slice(num_rows)]
        half = num_rows // 2
        return [slice(half), slice(half, None)] if is_concatenated else [slice(0, None, 2), slice(1, None, 2)]

    def _kept(self, form: ExpertFormat, expert: int) -> Iterator[Bytes]:
        inner, (down,) = (
            self._conversion.parts(self._forms[target], self._groups[target], self._checkpoint, expert)
            for target in self._site.parameters
        )
        if len(inner) == 1:  # of gate and up, or there is no gate
            (fused,) = inner
            rows = self._inner_rows(len(fused[0]), self._site.is_concatenated)
            inner = [tuple(part[some] for part in fused) for some in rows]
        return form.pack(inner, down)

    def _kept_format(self) -> ExpertFormat | None:
        """The checkpoint's format, if nothing is done with its experts but dequantise them; else None."""
        self._forms = {
            target: self._conversion.forms(group, self._checkpoint) for target, group in self._groups.items()
        }
        inner, down = self._forms.values()
        if not inner or not down:
            return None
        form = ExpertFormat(inner[0], inner[-1], down[0])
        return form if form.fits(self._site.geometry) else None

    def _rounded(self, form: RoundingFormat, expert: int, dtype: torch.dtype) -> Iterator[Bytes]:
        """The blocks of an expert with each weight rounded to a number of the format."""
        *inner, down = self._matrices(expert)
        label = f"expert {expert} of {self._site.name}"

        def parts(matrix: torch.Tensor) -> tuple[Bytes, ...]:
            step = max(1, _ROUNDED_AT_ONCE // matrix.shape[1])
            encoded = []
            for some in matrix.split(step):
                rows = cast(some, dtype, label).float()
                if not math.isfinite(rows.sum()) and not bool(rows.isfinite().all()):
                    raise CheckpointError(f"{label} holds NaN or infinity, for which {form.name} has no number")
                encoded.append(form.encode(rows))
            return tuple(np.concatenate(pieces) for pieces in zip(*encoded, strict=True))

        return expert_format(form.name).pack([parts(matrix) for matrix in inner], parts(down.T))

    def _rows_and_columns(self, target: str) -> tuple[int, int]:
        rows, columns = self._conversion.shape(target)[-2:]
        return (columns, rows) if self._site.is_transposed else (rows, columns)

    def _weight(self, target: str, expert: int) -> torch.Tensor:
        if self._groups[target].is_rowwise:
            return self._convert(target, expert)[0]
        if target not in self._whole:
            self._whole[target] = self._convert(target, None)
        return self._whole[target][expert]

    def _convert(self, target: str, expert: int | None) -> torch.Tensor:
        """The parameter, or an expert's row of it, [1, ...]."""
        group, shape = self._groups[target], self._conversion.shape(target)
        tensors = read_group(self._checkpoint, group, expert)
        tensor = self._conversion.convert(group, tensors, target, expert is not None)
        self._check_shape(target, group, tuple(tensor.shape), shape if expert is None else (1, *shape[1:]))
        return tensor

    # -- checks of headers -----------------------------------------------------------------------------------------

    def _check(self, target: str, group: Group) -> None:
        folder, num_experts = self._checkpoint.folder, self._site.geometry.num_experts
        for pattern, names in group.sources.items():
            if not group.is_per_expert and len(names) != 1:
                raise CheckpointError(f"{folder}: tensors {', '.join(names[:3])} all claim to be {target}")
            if group.is_per_expert and len(self._conversion.targets(group)) > 1:
                continue  # of several modules, in one numbering: `_check_made` sees how they are split
            numbers = group.expert_numbers(pattern) if group.is_per_expert else set()
            absent = sorted({*range(num_experts)} - numbers) if numbers else []
            problem = f": expert {absent[0]} is not in the checkpoint" if absent else ""
            if group.is_per_expert and len(names) not in (num_experts, self._conversion.shape(target)[0]):
                problem = (
                    f": the checkpoint has {len(names)} experts, but {self._checkpoint.sizes_from} says {num_experts} "
                    f"(tensor {names[0]!r} and its like){problem}"
                )
            if problem:
                raise CheckpointError(f"{folder}: {self._site.name}{problem}")
            self._check_alike(names, group)
        if self._conversion.keeps_rows(group):
            self._conversion.check_sizes(group, self._checkpoint, *self._rows_and_columns(target))
        elif not group.is_dequantized:
            self._check_made(target, group)

    def _check_layout(self) -> None:
        """Refuse a square matrix beside one that lies turned: transformers turns a matrix only by its shape."""
        squares, turned = [], []
        for target, group in self._groups.items():
            if not any(getattr(operation, "check_dims", False) for operation in group.operations):
                continue
            ref, expected = self._checkpoint.tensors[group.names[0]], self._conversion.shape(target)
            if expected[-1] == expected[-2]:
                squares.append(group.names[0])
            elif ref.shape[-2:] != expected[-2:]:
                turned.append(group.names[0])
        if squares and turned:
            raise CheckpointError(
                f"{self._checkpoint.label(squares[0])} is square and lies [inputs, outputs], as {turned[0]!r} does; "
                "transformers turns only the latter, by its shape, so that there is no model to be equal to; turn both"
            )

    def _check_alike(self, names: list[str], group: Group) -> None:
        refs = [self._checkpoint.tensors[name] for name in names]
        first, label = refs[0], self._checkpoint.label(names[0])
        ((dtype, shape), _), *_ = Counter((ref.dtype, ref.shape) for ref in refs).most_common(1)
        for name, ref in zip(names, refs, strict=True):
            if (ref.dtype, ref.shape) != (dtype, shape):
                unlike = f"{ref.dtype} {list(ref.shape)} is unlike that of other experts, {dtype} {list(shape)}"
                raise CheckpointError(f"{self._checkpoint.label(name)}: {unlike}")
        num_experts = self._site.geometry.num_experts
        if not group.is_per_expert and first.shape and first.shape[0] != num_experts:
            expected = f"{self._checkpoint.sizes_from} says {num_experts} experts in {self._site.name}"
            raise CheckpointError(f"{label}: shape {list(shape)} holds {shape[0]} experts, but {expected}")
        if not group.is_dequantized and dtype not in IS_FLOAT and not self._checkpoint.gguf:
            raise CheckpointError(f"{label}: dtype={dtype!r}: of experts {ACCEPTED}")

    def _check_made(self, target: str, group: Group) -> None:
        """Convert tensors without values to check shapes. One expert stands for all, as their tensors are alike."""
        is_part = group.is_rowwise

        def empty(name: str) -> torch.Tensor:
            ref = self._checkpoint.tensors[name]
            shape = (1, *ref.shape[1:]) if is_part and not group.is_per_expert else ref.shape
            return torch.empty(shape, dtype=_dtype(self._checkpoint, name), device="meta")

        some = slice(1 if is_part else None)
        tensors = {pattern: [empty(name) for name in names[some]] for pattern, names in group.sources.items()}
        shape = self._conversion.shape(target)
        made = tuple(self._conversion.convert(group, tensors, target, is_part).shape)
        self._check_shape(target, group, (shape[0], *made[1:]) if is_part and made[:1] == (1,) else made, shape)

    def _check_shape(self, target: str, group: Group, made: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if made != expected:
            label, shape = self._checkpoint.label(group.names[0]), list(self._checkpoint.tensors[group.names[0]].shape)
            problem = f"makes {target} of shape {list(made)}, but {self._checkpoint.sizes_from} says {list(expected)}"
            raise CheckpointError(f"{label} ({shape}): {problem}")


# -- tensors -----------------------------------------------------------------------------------------------------------

_DTYPES = {**str_to_torch_dtype, "F8_E8M0": torch.float8_e8m0fnu}
"""torch's dtypes by safetensors' names."""


def _dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """torch's dtype of a tensor; of GGUF's blocks float32. Raises CheckpointError where torch has none."""
    ref = checkpoint.tensors[name]
    if checkpoint.gguf and ref.dtype not in IS_FLOAT:
        return torch.float32
    if ref.dtype not in _DTYPES:
        raise CheckpointError(f"{checkpoint.label(name)}: dtype={ref.dtype!r}: cannot be read by this torch")
    return _DTYPES[ref.dtype]


def read_tensor(checkpoint: Checkpoint, name: str, row: int | None = None, *, as_bytes: bool = False) -> torch.Tensor:
    """A tensor, or `tensor[row : row + 1]`. GGUF's blocks are dequantised to float32, unless `as_bytes`."""
    ref, dtype = checkpoint.tensors[name], _dtype(checkpoint, name)
    row = row if ref.shape else None
    raw, shape = checkpoint.read(name, row), ref.shape if row is None else (1, *ref.shape[1:])
    if not checkpoint.gguf or ref.dtype in IS_FLOAT:
        return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)
    blocks = torch.from_numpy(raw.reshape(*shape[:-1], -1))
    if ref.factors:
        factors = torch.tensor(ref.factors if row is None else ref.factors[row : row + 1]).view(torch.uint8)
        factors = factors.view(-1, *(1,) * (len(shape) - 2), 4)
        blocks = torch.cat((blocks, factors.expand(*shape[:-1], 4)), dim=-1)
    if as_bytes:
        return blocks
    if ref.factors:
        return torch.stack([nvfp4_of(rows).weight() for rows in blocks.view(-1, *blocks.shape[-2:])]).view(shape)
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[ref.dtype]))


def read_group(checkpoint: Checkpoint, group: Group, expert: int | None = None, *, as_bytes: bool = False) -> Tensors:
    """All tensors of a group, or those of one expert. `as_bytes`: see `read_tensor`."""
    sources, row = group.sources, expert
    if expert is not None and group.is_per_expert:
        sources, row = {pattern: [names[expert]] for pattern, names in sources.items()}, None
    return {
        pattern: [read_tensor(checkpoint, name, row, as_bytes=as_bytes) for name in names]
        for pattern, names in sources.items()
    }


def cast(tensor: torch.Tensor, dtype: torch.dtype, label: str) -> torch.Tensor:
    """`tensor` in `dtype`. Raises ConfigError where a finite value becomes infinite (float16 ends at 65504)."""
    if tensor.dtype == dtype:
        return tensor
    result, largest = tensor.to(dtype), torch.finfo(dtype).max
    info = torch.finfo if tensor.is_floating_point() else torch.iinfo
    if largest < info(tensor.dtype).max and bool((result.isinf() & ~tensor.isinf()).any()):
        finite = tensor.float().nan_to_num(0.0, 0.0, 0.0)
        raise ConfigError(
            f"dtype={str(dtype).removeprefix('torch.')!r}: {label} holds {finite.abs().max().item():g}, beyond "
            f"its {largest:g}; accepted for this model: bfloat16, float32"
        )
    return result


def to_bytes(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat

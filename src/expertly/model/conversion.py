"""From a checkpoint's tensors to a model's parameters and to an expert's bytes, by transformers' conversion mapping.

Only this file and dequantizer.py use `transformers.core_model_loading`, `conversion_mapping` and the quantizers. None
of these is a stable interface: it is tested with the oldest and the newest accepted version of transformers.
E experts, H hidden, I intermediate, M matrices of an expert.
"""

from __future__ import annotations

import copy
import itertools
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
from transformers.quantizers.auto import AutoHfQuantizer

from expertly.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from expertly.formats import LAYOUTS, expert_format, layout_of
from expertly.formats.gguf import OF_GGUF_TYPE
from expertly.formats.layouts import Layout
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.tiles import ExpertFormat, RoundingFormat, TiledFormat
from expertly.model.dequantizer import extended
from expertly.model.structure import ExpertsSite, first_line, quiet
from expertly.store.checkpoint import Bytes, Checkpoint
from expertly.store.manifest import IS_FLOAT

QUANT_METHODS = (*LAYOUTS, MXFP4.name)
"""Quantisations that packing can undo, mxfp4 with transformers' operations, the others with our own code."""

_REFUSED = {
    "bitsandbytes": "NF4, FP4 or LLM.int8, in blocks that only bitsandbytes decodes",
    "hqq": "half-quadratic quantisation, whose tensors only the package hqq decodes",
    "torchao": "tensor subclasses of torchao",
    "quark": "AMD's Quark",
    "fbgemm_fp8": "FP8 of FBGEMM's kernels for GPUs",
    "eetq": "INT8 of EETQ's kernels for GPUs",
    "quanto": "optimum-quanto",
    "aqlm": "additive codebooks",
    "vptq": "vector codebooks",
    "spqr": "sparse outliers",
    "higgs": "lattice codebooks",
    "bitnet": "ternary weights",
    "metal": "Metal's affine quantisation; MLX's has no quant_method",
}
"""Quantisations that people have, and what they are."""

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
        known = ("Concatenate", "ConcatenateRows", "Transpose", "Interleave", "Mxfp4Dequantize", "Dequantize")
        return all(
            one.dim == 0
            if type(one).__name__ == "MergeModulelist"
            else type(one).__name__ in known and all(getattr(one, dim, 1) >= 1 for dim in ("dim", "dim0", "dim1"))
            for one in self.operations
        )

    @property
    def is_dequantized(self) -> bool:
        return any(_is_dequantizing(operation) for operation in self.operations)

    @property
    def is_stacked(self) -> bool:
        """Whether an expert's rows are those of its dequantised tensors, stacked in the order of `patterns`."""
        places = {"MergeModulelist": 0, "Concatenate": 1, "ConcatenateRows": 1}
        return all(
            _is_dequantizing(one) or places.get(type(one).__name__) == getattr(one, "dim", None)
            for one in self.operations
        )

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


def _is_dequantizing(operation: Any) -> bool:
    return getattr(operation, "hf_quantizer", None) is not None


def make_quantizer(quantization: object, dtype: str) -> Any | None:
    """What undoes `config.quantization_config` for a model in `dtype`, or None. Raises UnsupportedModelError."""
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    accepted = f"supported: none, {', '.join(QUANT_METHODS)}"
    if method not in QUANT_METHODS:
        kind = f" ({_REFUSED[method]})" if isinstance(method, str) and method in _REFUSED else ""
        raise UnsupportedModelError(
            f"quantization_config.quant_method={method!r:.80}{kind}: packing cannot undo it, whatever the dtype; "
            f"{accepted}; or give an unquantised checkpoint of the model"
        )
    assert isinstance(quantization, dict)
    if method in LAYOUTS:
        return layout_of(quantization, dtype)
    try:
        with quiet():
            return AutoHfQuantizer.from_config({**quantization, "dequantize": True}, pre_quantized=True)
    except Exception as error:  # the quantizers' own code, and the validators of their configs
        reason = f"quantization_config={quantization!r:.80}: {first_line(error)}"
        raise UnsupportedModelError(f"{reason}; {accepted}") from error


class Conversion:
    """transformers' mapping for one model, from checkpoint names to parameters."""

    def __init__(self, model: PreTrainedModel, quantizer: Any | None = None) -> None:
        self._model = model
        self._quantizer = quantizer
        if isinstance(quantizer, Layout):
            transforms = extended(conversion_mapping.get_model_conversion_mapping(model), quantizer)
        else:
            transforms = conversion_mapping.get_model_conversion_mapping(model, hf_quantizer=quantizer)
        self._renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        self._of_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self.parameters = model.state_dict()

    def form_of(self, group: Group, checkpoint: Checkpoint) -> TiledFormat | None:
        """The format that keeps the bytes of all a group's matrices; None where there is none, or they are changed."""
        refs = {name: checkpoint.tensors[name] for name in (group.sources[pattern][0] for pattern in group.patterns)}
        if not (group.is_dequantized and group.is_stacked) or all(ref.dtype in IS_FLOAT for ref in refs.values()):
            return None
        if not isinstance(self._quantizer, Layout):
            return MXFP4 if all(name.endswith(MXFP4.suffixes) for name in refs) else None
        is_of_all = len(self.shape(group.target)) == 3 and not group.is_per_expert  # experts in one tensor
        headers = {name: (ref.dtype, ref.shape[is_of_all:]) for name, ref in refs.items()}
        forms = {self._quantizer.form_of(stem, each) for stem, each in self._quantizer.matrices(headers).items()}
        return forms.pop() if len(forms) == 1 else None

    @property
    def must_keep(self) -> bool:
        """Whether experts whose sizes are not whole tiles are refused rather than converted."""
        return not isinstance(self._quantizer, Layout)

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
        ignored = self._quantizer.ignored if isinstance(self._quantizer, Layout) else ()
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
        """Parameters that no group makes, without tied ones and those that transformers allows to be missing."""
        made = {target for group in groups.values() for target in self.targets(group)}
        tied: dict[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        made |= {name for pair in tied.items() if made.intersection(pair) for name in pair}
        ignored = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        names = (name for name, _ in self._model.named_parameters(remove_duplicate=False) if name not in made)
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
                    "config.json makes more; or a file of weights is not whole"
                )
        block = target.rpartition(".experts.")[0].rpartition(".")[2] or target.split(".")[-2]
        near = next((name for name in unknown if block in name), None)
        if near is not None:
            return f"{near} and tensors like it are none of a {model_type}: renamed, or of another model_type"
        if num_experts:
            return f"config.json says {num_experts} experts"
        return f"config.json makes it ({'x'.join(map(str, self.shape(target)))}), and no tensor's name is like it"

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
        model = _OneRow(self._model) if is_one_row else self._model
        try:
            made = converter.convert(group.target, model=model, config=self._model.config, hf_quantizer=self._quantizer)
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


class _OneRow:
    """A model whose parameters have one row, for operations that compare shapes with the model's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, target: str) -> torch.Tensor:
        return self._model.get_parameter(target)[:1]


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
        kept: str,
        rounding: RoundingFormat | None = None,
    ) -> None:
        """Checks counts, dtypes and shapes of all experts from the headers. `kept`: the weight format whose experts are
        not decoded, or "". Raises CheckpointError, or ConfigError where sizes do not fit the format of `rounding`.
        """
        self._site, self._checkpoint, self._conversion = site, checkpoint, conversion
        self._groups: dict[str, Group] = {}
        num_experts = site.geometry.num_experts
        for target in dict.fromkeys(name for expert in range(num_experts) for name in site.expert_weight_names(expert)):
            made_by = (one for one in groups.values() if target in conversion.targets(one))
            group = groups.get(target) or next(made_by, None)
            if group is None:
                reason = conversion.why_missing(checkpoint, target, num_experts)
                raise CheckpointError(f"{checkpoint.folder}: no tensor for {target}: {reason}")
            self._groups[target] = group
        self._format = self._format_of(kept) if kept else None
        self._rounding = rounding
        stored_in = self._format if rounding is None else expert_format(rounding.name)
        try:
            self.geometry = site.geometry if stored_in is None else stored_in.geometry(site.geometry)
        except ConfigError as error:
            if rounding is not None:
                raise ConfigError(f"quantize: {site.name}: {error}") from None
            raise CheckpointError(f"{site.name}: {error}; or name a dtype, which undoes it") from None
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
            yield to_bytes(torch.stack([cast(one[start : start + step], dtype, label) for one in matrices], dim=1))

    def _matrices(self, expert: int) -> Iterator[torch.Tensor]:
        """Gate (if any), up, and down transposed: [I, H] each."""
        site = self._site
        first, second = site.expert_weight_names(expert)
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
        first, second = self._site.expert_weight_names(expert)
        inner = self._parts(form.inner(self.geometry.num_matrices), first, expert)
        if len(inner) == 1:  # of gate and up, or there is no gate
            (fused,) = inner
            rows = self._inner_rows(len(fused[0]), self._site.is_concatenated)
            inner = [tuple(part[some] for part in fused) for some in rows]
        (down,) = self._parts((form.down,), second, expert)
        return form.pack(inner, down)

    def _format_of(self, kept: str) -> ExpertFormat | None:
        """The checkpoint's format, if transformers does nothing with its experts but dequantise them; else None."""
        groups, refs = self._groups, self._checkpoint.tensors
        if not self._checkpoint.gguf:
            names = zip(*map(self._site.expert_weight_names, range(self._site.geometry.num_experts)), strict=True)
            forms = [{self._conversion.form_of(groups[name], self._checkpoint) for name in each} for each in names]
            inner, down = (each.pop() if len(each) == 1 else None for each in forms)
            if inner is None or down is None:
                return None
            form = ExpertFormat(inner, inner, down)
            return form if self._conversion.must_keep or form.fits(self._site.geometry) else None
        dtypes = {name: refs[name].dtype for group in groups.values() for name in group.names}
        for name, dtype in dtypes.items():
            if dtype not in OF_GGUF_TYPE and dtype not in IS_FLOAT:
                accepted = ", ".join((*sorted(IS_FLOAT), *OF_GGUF_TYPE))
                raise CheckpointError(f"{self._checkpoint.folder}: {name}: in {dtype}; accepted: {accepted}")
        if any(dtype in IS_FLOAT for dtype in dtypes.values()):
            return None
        of_inner, of_down = (groups[target] for target in self._site.expert_weight_names(0))
        gate, *_, up = 2 * [OF_GGUF_TYPE[refs[of_inner.sources[one][0]].dtype] for one in of_inner.patterns]
        return ExpertFormat(gate, up, OF_GGUF_TYPE[refs[of_down.names[0]].dtype])

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

    def _parts(self, forms: Sequence[TiledFormat], target: str, expert: int) -> list[tuple[Bytes, ...]]:
        group = self._groups[target]
        tensors = read_group(self._checkpoint, group, expert, as_bytes=True)
        return parts_of(forms, group, tensors, *self._rows_and_columns(target), expert=expert)

    def _rows_and_columns(self, target: str) -> tuple[int, int]:
        rows, columns = self._conversion.shape(target)[-2:]
        return (columns, rows) if self._site.is_transposed else (rows, columns)

    def _weight(self, target: str, expert: int) -> torch.Tensor:
        if not self._site.is_fused:
            return self._convert(target, None)
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
            numbers = group.expert_numbers(pattern) if group.is_per_expert else set()
            absent = sorted({*range(num_experts)} - numbers) if numbers else []
            problem = f": expert {absent[0]} is not in the checkpoint" if absent else ""
            if group.is_per_expert and len(names) != num_experts:
                problem = (
                    f": the checkpoint has {len(names)} experts, but config.json says {num_experts} (tensor "
                    f"{names[0]!r} and its like){problem}"
                )
            if problem:
                raise CheckpointError(f"{folder}: {self._site.name}{problem}")
            self._check_alike(names, group)
        forms: Sequence[TiledFormat] = ()
        if self._format is not None:
            is_down = target == self._site.expert_weight_names(0)[1]
            forms = (self._format.down,) if is_down else self._format.inner(self.geometry.num_matrices)
        elif group.is_dequantized and all(name.endswith(MXFP4.suffixes) for name in group.names):
            forms = (MXFP4,)  # transformers decodes any dtypes, and asserts shapes
        if forms:
            refs = {p: self._checkpoint.tensors[group.sources[p][0]] for p in group.patterns}
            shapes = {p: (ref.dtype, ref.shape if group.is_per_expert else ref.shape[1:]) for p, ref in refs.items()}
            (rows, columns), label = self._rows_and_columns(target), f"{folder}: {target}"
            matrices = forms[0].matrices(shapes, label)
            for form, parts in zip(itertools.cycle(forms), matrices, strict=False):
                form.check_shapes({part: shapes[part] for part in parts}, rows // len(matrices), columns, label)
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
        if self._site.is_fused and not group.is_per_expert and first.shape and first.shape[0] != num_experts:
            expected = f"config.json says {num_experts} experts in {self._site.name}"
            raise CheckpointError(f"{label}: shape {list(shape)} holds {shape[0]} experts, but {expected}")
        if not group.is_dequantized and dtype not in IS_FLOAT and not self._checkpoint.gguf:
            raise CheckpointError(f"{label}: dtype={dtype!r}: of experts {ACCEPTED}")

    def _check_made(self, target: str, group: Group) -> None:
        """Convert tensors without values to check shapes. One expert stands for all, as their tensors are alike."""
        is_part = self._site.is_fused and group.is_rowwise

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
            problem = f"makes {target} of shape {list(made)}, but config.json says {list(expected)}"
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
    if as_bytes:
        return torch.from_numpy(raw)
    import gguf

    blocks, kind = raw.reshape(math.prod(shape[:-1]), -1), gguf.GGMLQuantizationType[ref.dtype]
    try:
        return torch.from_numpy(gguf.quants.dequantize(blocks, kind)).reshape(shape)
    except NotImplementedError:
        raise CheckpointError(f"tensors in {ref.dtype}: the package gguf cannot dequantise them") from None


def read_group(checkpoint: Checkpoint, group: Group, expert: int | None = None, *, as_bytes: bool = False) -> Tensors:
    """All tensors of a group, or those of one expert. `as_bytes`: see `read_tensor`."""
    sources, row = group.sources, expert
    if expert is not None and group.is_per_expert:
        sources, row = {pattern: [names[expert]] for pattern, names in sources.items()}, None
    return {
        pattern: [read_tensor(checkpoint, name, row, as_bytes=as_bytes) for name in names]
        for pattern, names in sources.items()
    }


def parts_of(
    forms: Sequence[TiledFormat], group: Group, tensors: Tensors, rows: int, columns: int, expert: int | None = None
) -> list[tuple[Bytes, ...]]:
    """Of each matrix of a parameter [rows, columns] (of an expert) the parts, from its group's `tensors`; `forms` are
    those of the first matrix, the second, and so on, in turns. Raises CheckpointError.
    """
    matrices = forms[0].matrices(group.patterns, group.target)
    parts = []
    for form, names in zip(itertools.cycle(forms), matrices, strict=False):
        try:
            parts.append(form.parts_of([tensors[name][0] for name in names], rows // len(matrices), columns))
        except CheckpointError as error:
            sources = [one for name in names for one in group.sources[name]]
            if expert is not None and group.is_per_expert:
                sources = sources[expert :: len(sources) // len(names)]
            label = "" if expert is None else f"expert {expert} of "
            raise CheckpointError(f"{label}{', '.join(sources)}: {error}") from None
    return parts


def cast(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """`tensor` in `dtype`. Raises ConfigError where a finite value becomes infinite (float16 ends at 65504)."""
    if tensor.dtype == dtype:
        return tensor
    result, largest = tensor.to(dtype), torch.finfo(dtype).max
    info = torch.finfo if tensor.is_floating_point() else torch.iinfo
    if largest < info(tensor.dtype).max and bool((result.isinf() & ~tensor.isinf()).any()):
        finite = tensor.float().nan_to_num(0.0, 0.0, 0.0)
        raise ConfigError(
            f"dtype={str(dtype).removeprefix('torch.')!r}: {what} holds {finite.abs().max().item():g}, which is beyond "
            f"its {largest:g}; accepted for this model: bfloat16, float32"
        )
    return result


def to_bytes(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat

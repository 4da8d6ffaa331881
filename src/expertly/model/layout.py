"""One expert's weights, from a checkpoint's layout to the store's `[I, M, H]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from expertly.core.errors import CheckpointError
from expertly.model.adapter import ExpertsSite
from expertly.model.conversion import Conversion, Group, Tensors
from expertly.model.tensors import cast, read_tensor, read_tensor_row, to_bytes, torch_dtype
from expertly.store.checkpoint import Bytes, Checkpoint

_CHUNK_NBYTES = 8 << 20
"""An expert is put together in parts of this size: it can be hundreds of MiB itself."""


class ExpertsReader:
    """Reads the experts of one site, one at a time; only where an operation of transformers mixes experts, a whole
    weight of the layer is read at once."""

    def __init__(
        self, site: ExpertsSite, checkpoint: Checkpoint, conversion: Conversion, groups: dict[str, Group]
    ) -> None:
        """Checks counts, dtypes and shapes of all experts from the headers. Raises CheckpointError."""
        self._site = site
        self._checkpoint = checkpoint
        self._conversion = conversion
        self._groups = {
            target: _group_of(site, target, conversion, groups) for target in dict.fromkeys(_all_targets(site))
        }
        self._whole: dict[str, torch.Tensor] = {}
        for target, group in self._groups.items():
            self._check(target, group)

    @property
    def source_names(self) -> set[str]:
        """Checkpoint tensors that are experts, and so not dense."""
        return {name for group in self._groups.values() for name in group.names}

    def experts(self, dtype: torch.dtype, only: Sequence[int] | None = None) -> Iterator[Bytes]:
        """The bytes of all experts, or of those of `only`, in `dtype`, in order, some neurons at a time."""
        geometry = self._site.geometry
        step = max(1, _CHUNK_NBYTES // geometry.neuron_nbytes)
        try:
            for expert in range(geometry.num_experts) if only is None else only:
                first, second = _targets(self._site, expert)
                matrices = list(self._matrices(first, second, expert))
                for start in range(0, geometry.intermediate_size, step):
                    rows = (
                        cast(m[start : start + step], dtype, f"expert {expert} of {self._site.name}") for m in matrices
                    )
                    yield to_bytes(torch.stack(list(rows), dim=1))
                del matrices  # before the next expert's are made
        finally:
            self._whole.clear()

    def _matrices(self, first: str, second: str, expert: int) -> Iterator[torch.Tensor]:
        """Gate (if any), up and transposed down, each [I, H]."""
        site = self._site
        up = self._weight(first, expert)
        up = up.T if site.is_transposed else up
        if not site.has_gate:
            yield up
        elif site.is_concatenated:
            yield from up.chunk(2)
        else:
            yield up[0::2]
            yield up[1::2]
        down = self._weight(second, expert)
        yield down if site.is_transposed else down.T

    def _weight(self, target: str, expert: int) -> torch.Tensor:
        """One expert's matrix, as the module has it."""
        group = self._groups[target]
        if not self._site.is_fused:
            return self._convert(group, target, None, self._conversion.shape(target))
        if group.is_rowwise:
            return self._convert(group, target, expert, (1, *self._conversion.shape(target)[1:]))[0]
        if target not in self._whole:
            self._whole[target] = self._convert(group, target, None, self._conversion.shape(target))
        return self._whole[target][expert]

    def _convert(self, group: Group, target: str, expert: int | None, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._conversion.convert(group, self._read(group, expert), target, expert is not None)
        if tuple(tensor.shape) != shape:
            raise self._mismatch(group, target, tuple(tensor.shape), shape)
        return tensor

    def _read(self, group: Group, expert: int | None) -> Tensors:
        checkpoint = self._checkpoint
        if expert is None:
            return {pattern: [read_tensor(checkpoint, n) for n in names] for pattern, names in group.sources.items()}
        if group.is_per_expert:
            return {pattern: [read_tensor(checkpoint, names[expert])] for pattern, names in group.sources.items()}

        def part(name: str) -> torch.Tensor:
            has_rows = len(checkpoint.tensors[name].shape) > 0
            return read_tensor_row(checkpoint, name, expert) if has_rows else read_tensor(checkpoint, name)

        return {pattern: [part(name) for name in names] for pattern, names in group.sources.items()}

    def _check(self, target: str, group: Group) -> None:
        checkpoint, num_experts = self._checkpoint, self._site.geometry.num_experts
        for pattern, names in group.sources.items():
            if group.is_per_expert and len(names) != num_experts:
                raise CheckpointError(
                    f"{checkpoint.folder}: {self._site.name}: the checkpoint has {len(names)} experts, but "
                    f"config.json says {num_experts} (tensor {names[0]!r} and its like)"
                )
            if group.is_per_expert and (indices := group.expert_indices(pattern)) not in ([], [*range(num_experts)]):
                missing = next(i for i, index in enumerate(indices) if i != index)
                raise CheckpointError(
                    f"{checkpoint.folder}: {self._site.name}: expert {missing} is not in the checkpoint"
                )
            if not group.is_per_expert and len(names) != 1:
                raise CheckpointError(f"{checkpoint.folder}: tensors {', '.join(names[:3])} all claim to be {target}")
            first = checkpoint.tensors[names[0]]
            for name in names:
                ref = checkpoint.tensors[name]
                if (ref.dtype, ref.shape) != (first.dtype, first.shape):
                    raise CheckpointError(
                        f"{ref.path}: tensor {name!r}: {ref.dtype} {list(ref.shape)} is unlike that of other experts, "
                        f"{first.dtype} {list(first.shape)}"
                    )
            if self._site.is_fused and not group.is_per_expert and first.shape and first.shape[0] != num_experts:
                raise CheckpointError(
                    f"{first.path}: tensor {names[0]!r}: shape {list(first.shape)} holds {first.shape[0]} experts, but "
                    f"config.json says {num_experts}"
                )
            if not group.is_dequantized and first.dtype not in ("BF16", "F16", "F32", "F64"):
                raise CheckpointError(
                    f"{first.path}: tensor {names[0]!r}: dtype={first.dtype!r}: experts must be BF16, F16, F32 or F64 "
                    "(or quantised, with a quantization_config in config.json that transformers can undo)"
                )
        if not group.is_dequantized:
            self._check_shape(target, group)

    def _check_shape(self, target: str, group: Group) -> None:
        """Convert without bytes: all tensors of a pattern are alike, so one expert stands for all."""
        refs = self._checkpoint.tensors
        is_part = self._site.is_fused and group.is_rowwise
        tensors = {
            pattern: [
                torch.empty(
                    (1, *refs[n].shape[1:]) if is_part and not group.is_per_expert else refs[n].shape,
                    dtype=torch_dtype(n, refs[n]),
                    device="meta",
                )
                for n in (names[:1] if is_part else names)
            ]
            for pattern, names in group.sources.items()
        }
        shape = self._conversion.shape(target)
        made = tuple(self._conversion.convert(group, tensors, target, is_part).shape)
        if made != ((1, *shape[1:]) if is_part else shape):
            raise self._mismatch(group, target, (shape[0], *made[1:]) if is_part else made, shape)

    def _mismatch(
        self, group: Group, target: str, found: tuple[int, ...], expected: tuple[int, ...]
    ) -> CheckpointError:
        ref = self._checkpoint.tensors[group.names[0]]
        return CheckpointError(
            f"{ref.path}: tensor {group.names[0]!r} ({list(ref.shape)}): makes {target} of shape {list(found)}, but "
            f"config.json says {list(expected)}"
        )


def _targets(site: ExpertsSite, expert: int) -> tuple[str, str]:
    if not site.is_fused:
        return site.expert_weight_names(expert)
    first, second = site.weight_names
    return f"{site.name}.{first}", f"{site.name}.{second}"


def _all_targets(site: ExpertsSite) -> Iterator[str]:
    for expert in range(site.geometry.num_experts):
        yield from _targets(site, expert)


def _group_of(site: ExpertsSite, target: str, conversion: Conversion, groups: dict[str, Group]) -> Group:
    group = groups.get(target) or next((g for g in groups.values() if target in conversion.targets(g)), None)
    if group is None:
        raise CheckpointError(
            f"the checkpoint has no tensor for {target}; config.json says {site.geometry.num_experts} experts in "
            f"{site.name}"
        )
    return group

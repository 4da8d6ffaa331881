"""A GGUF file as a checkpoint, and its tensors as the parameters of a model of transformers."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, core_model_loading

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.gguf import OF_GGUF_TYPE, SCALED_NVFP4, GgufLayout
from expertly.formats.tiles import TiledFormat
from expertly.model.conversion import Conversion, Group, Tensors
from expertly.model.gguf_architectures import (
    FACTORS,
    ROWS,
    STEPS,
    TensorStep,
    architecture_of,
    fields_of,
    known_architectures,
    vector,
)
from expertly.model.gguf_words import check_words, special_tokens, tokenizer_folder
from expertly.model.structure import ExpertsSite, find_experts, of_the_model, quiet
from expertly.store.checkpoint import Checkpoint, TensorRef, check_claims
from expertly.store.gguf import SUFFIX, GgufFiles
from expertly.store.manifest import IS_FLOAT

# -- checkpoints -------------------------------------------------------------------------------------------------------


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint folder, or a GGUF file (any part of one that is split). Raises CheckpointError."""
    return _open_gguf(path) if path.suffix == SUFFIX and not path.is_dir() else Checkpoint.open(path)


def config_of(checkpoint: Checkpoint) -> Path | PreTrainedConfig:
    """The source from which `build_meta_model` builds the model: a folder, or a config."""
    if not checkpoint.gguf:
        return checkpoint.folder
    fields = of_the_model(checkpoint.config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


_BESIDE_MODELS = {
    "mmproj": "an encoder of images or sound for a model, which is not used here",
    "imatrix": "an importance matrix, by which a model was quantised",
    "adapter": "an adapter (LoRA) for a model; merge it into that first (llama-export-lora)",
}
"""Values of general.type, and what such a file is."""


def _open_gguf(path: Path) -> Checkpoint:
    files = GgufFiles.open(path)
    path = files.path
    architecture, kind = (files.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    kind = "mmproj" if architecture == "clip" else kind
    if isinstance(kind, str) and kind in _BESIDE_MODELS:
        raise UnsupportedModelError(f"{path}: general.type={kind!r}: {_BESIDE_MODELS[kind]}; give the model's own file")
    row = architecture_of(architecture)
    if row is None:
        raise UnsupportedModelError(
            f"{path}: general.architecture={architecture!r:.80}: accepted of GGUF files: "
            f"{', '.join(known_architectures())}; others run from a checkpoint folder"
        )
    assert isinstance(architecture, str)
    shapes = {name: ref.shape for name, ref in files.tensors.items()}
    counts = {"num_layers": "block_count", "num_experts": "expert_count"}
    claims = {name: files.metadata.get(f"{architecture}.{key}") for name, key in counts.items()}
    check_claims(path, claims, shapes, CheckpointError)  # before a config makes lists as long
    table = shapes.get("token_embd.weight")
    if table is None or len(table) != 2:
        raise CheckpointError(f"{path}: no tensor token_embd.weight of two dimensions")
    words = check_words(files, table[0], row.pre)
    made = {**fields_of(files, architecture, table[0]), **special_tokens(files, table[0], words)}
    made["tie_word_embeddings"] = "output.weight" not in files.tensors
    try:
        with quiet():
            config = AutoConfig.for_model(**made)
    except Exception as error:  # transformers' and huggingface_hub's checks of fields raise a class for each
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: transformers makes no config of its metadata: {reason:.200}") from error
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    tensors = {name: ref for name, ref in files.tensors.items() if name not in {**row.vectors, **FACTORS}}
    for name, ref in files.tensors.items():
        stem, _, last = name.rpartition(".")
        weight = files.tensors.get(f"{stem}.weight")
        is_scale = weight is not None and weight.dtype == "NVFP4" and last in ("scale", "input_scale")
        if weight is None or not is_scale or _layer(name)[1] in row.parameters.values():
            continue
        del tensors[name]
        if last == "scale":
            factors = vector(files, name, lambda value: 2.0**-100 < value < 2.0**100)
            if len(factors) != (weight.shape[0] if len(weight.shape) > 2 else 1):
                raise CheckpointError(f"{path}: tensor {name!r:.80}: {list(ref.shape)}: must be one for each matrix")
            tensors[f"{stem}.weight"] = replace(weight, dtype=SCALED_NVFP4, factors=tuple(factors))
    if row.joined:
        heads, heads_kv = made["num_attention_heads"], made["num_key_value_heads"]
        for name in [name for name in tensors if ".attn_qkv." in name]:
            names = [name.replace("attn_qkv", f"attn_{each}") for each in "qkv"]
            tensors |= _apart(tensors.pop(name), dict(zip(names, (heads, heads_kv, heads_kv), strict=True)))
    for layer in range(made["num_hidden_layers"], files.metadata[f"{architecture}.block_count"]):
        of_layer = [name for name in tensors if name.startswith(f"blk.{layer}.")]
        if not any(name.startswith(f"blk.{layer}.nextn.") for name in of_layer):
            raise CheckpointError(
                f"{path}: {architecture}.nextn_predict_layers: layer {layer} has no tensor blk.{layer}.nextn.*, so it "
                "predicts no further token"
            )
        for name in of_layer:
            del tensors[name]
    return Checkpoint(path, fields, tensors, files.headers, architecture, json.dumps(made, sort_keys=True))


def _apart(ref: TensorRef, shares: Mapping[str, int]) -> dict[str, TensorRef]:
    """A tensor's rows as several tensors, which have these shares of them, one below another."""
    made, offset = {}, ref.offset
    for name, share in shares.items():
        rows, nbytes = (number * share // sum(shares.values()) for number in (ref.shape[0], ref.nbytes))
        made[name] = replace(ref, shape=(rows, *ref.shape[1:]), offset=offset, nbytes=nbytes)
        offset += nbytes
    return made


def kept_formats(checkpoint: Checkpoint) -> str:
    """The weight formats of a GGUF file's experts, joined by +; "" where they are not quantised."""
    if not checkpoint.gguf:
        return ""
    types = {ref.dtype for name, ref in checkpoint.tensors.items() if _OF_EXPERTS.search(name)} - IS_FLOAT
    return "+".join(sorted({OF_GGUF_TYPE[kind].name if kind in OF_GGUF_TYPE else kind.lower() for kind in types}))


@contextlib.contextmanager
def extras_of(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with the checkpoint's tokenizer and other small files. Raises CheckpointError."""
    if not checkpoint.gguf:
        yield checkpoint.folder
        return
    row = architecture_of(checkpoint.gguf)
    assert row is not None
    with tokenizer_folder(GgufFiles.open(checkpoint.folder), row.tokenizer) as made:
        yield made


# -- tensors -----------------------------------------------------------------------------------------------------------

_EXPERTS = re.compile(r"(.*)\.(gate_up|up|down)_proj(_bias)?$")
"""Parameters of all experts of a layer."""

_OF_EXPERTS = re.compile(r"_exps\.weight$|\.ffn_(gate|up|down)\.\d+\.weight$")

_ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.\d+(\.weight)$")
"""Tensors of a single expert, in files from before llama.cpp put all in one."""

_TAILS = {"e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias", "dt_bias": "ssm_dt.bias"}
"""GGUF's names of a layer's tensors by the last part of a parameter's name, where the package gguf has none."""


@dataclass(frozen=True, slots=True)
class _Undo:
    """In a converter's place in a `Group`, a step."""

    source_patterns: tuple[str, ...]
    step: TensorStep
    target_patterns: tuple[str, ...] = ("",)
    operations: tuple[()] = ()


class GgufConversion(Conversion):
    """From a GGUF file's tensors, dequantised, to a model's parameters."""

    def __init__(self, model: PreTrainedModel, architecture: str) -> None:
        import gguf

        super().__init__(model)
        self._layout = GgufLayout()
        row = architecture_of(architecture)
        assert row is not None
        self._row, named_as = row, row.named_as or architecture
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == named_as)
        self._map = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
        self._names: dict[str, str] = {}
        self._of_pattern: dict[str, Any] = {}
        sites = {site.name: site for site in find_experts(model, 4)}
        for parameter in self.parameters:
            match = _EXPERTS.match(parameter)
            site = sites.get(match[1]) if match else None
            if match and site is not None:
                self._add_experts(parameter, match[2], "bias" if match[3] else "weight", site)
            else:
                self._add(parameter)

    def _add(self, parameter: str) -> None:
        """GGUF's names of a parameter outside of experts."""
        layer, tail = _layer(parameter)
        of_row = next((names for end, names in self._row.parameters.items() if f".{tail}".endswith(f".{end}")), None)
        names = of_row or _TAILS.get(tail.rpartition(".")[2])
        if names is not None:
            self._add_step(parameter, [f"{layer}{name}" for name in names.split()])
        stem, _, kind = parameter.rpartition(".")
        stem = stem if kind in ("weight", "bias") else parameter
        stems = stem, stem.replace("model.", "backbone."), stem.replace(".forget_gate.", ".")
        known = next(filter(None, map(self._map.get_name, stems)), None)
        for end in () if known is None else (f".{kind}",) if kind in ("weight", "bias") else ("", ".weight", ".bias"):
            self._add_step(parameter, [f"{known}{end}"])

    def _add_step(self, parameter: str, names: list[str]) -> None:
        steps = {**STEPS, **self._row.steps}
        step = steps.get(" ".join(_layer(name)[1] for name in names), ROWS if names[1:] else None)
        self._names |= dict.fromkeys(names, parameter)
        if step is not None:
            self._of_pattern |= dict.fromkeys(names, _Undo(tuple(names), step))

    def _add_experts(self, parameter: str, matrix: str, kind: str, experts: ExpertsSite) -> None:
        layer, is_bias = _layer(parameter)[0], kind == "bias"
        joined: list[Any] = [core_model_loading.Concatenate(dim=1)] if matrix == "gate_up" else []
        turned: list[Any] = []
        if joined and not experts.is_concatenated:  # rows of gate and up are interleaved
            joined.append(core_model_loading.Interleave(dim=1, inverse=True))
        if experts.is_transposed and not is_bias:
            turned.append(core_model_loading.Transpose(dim0=1, dim1=2))
        apart = ("gate", "up") if joined else (matrix,)
        stacked = core_model_loading.MergeModulelist(dim=0)
        variants = [
            ([f"{layer}ffn_{each}_exps.{kind}" for each in apart], [*joined, *turned]),
            ([f"{layer}ffn_{each}.*.{kind}" for each in apart], [stacked, *joined, *turned]),
        ]
        if joined and experts.is_concatenated:
            variants.append(([f"{layer}ffn_gate_up_exps.{kind}"], turned))
        for patterns, operations in variants:
            self._names |= dict.fromkeys(patterns, parameter)
            if operations:
                converter = core_model_loading.WeightConverter(patterns, parameter, operations)
                self._of_pattern |= dict.fromkeys(patterns, converter)

    def target(self, name: str) -> tuple[str, str | None]:
        pattern = _ONE_EXPERT.sub(r"\1.*\2", name)
        return self._names.get(pattern, ""), pattern if pattern in self._of_pattern else None

    def groups(self, names: Iterable[str]) -> tuple[dict[str, Group], list[str]]:
        groups, unexpected = super().groups(names)
        for group in groups.values():
            if (group.converter is None and len(group.names) > 1) or len(group.patterns) < len(group.sources):
                raise CheckpointError(f"tensors {', '.join(group.names[:3])}: all claim to be {group.target}")
        return groups, unexpected

    def forms(self, group: Group, checkpoint: Checkpoint) -> list[TiledFormat]:
        factors = {checkpoint.tensors[name].factors for name in group.names}
        is_mixed = len(factors) > 1 and isinstance(group.converter, _Undo)  # rows of one tile have different scales
        return [] if is_mixed else super().forms(group, checkpoint)

    def keeps_rows(self, group: Group) -> bool:
        return not isinstance(group.converter, _Undo) or group.converter.step.is_of_rows

    def row_order(self, group: Group) -> torch.Tensor | None:
        """Which rows of its tensors, one below another, are those of a parameter, where a step changes nothing else."""
        if not isinstance(group.converter, _Undo) or not group.converter.step.is_of_rows:
            return None
        num_rows = self.shape(group.target)[0]
        return self._undone(group, group.converter.step, torch.arange(num_rows)[:, None])[:, 0]

    def _undone(self, group: Group, step: TensorStep, *parts: torch.Tensor) -> torch.Tensor:
        try:
            return step.undo(self._model.config, *parts)
        except RuntimeError as error:  # torch's, of sizes
            shapes = " and ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(
                f"tensors {', '.join(group.names)}: {shapes} cannot be taken apart as the metadata says: {error!s:.200}"
            ) from None

    def convert(
        self, group: Group, tensors: Tensors, target: str | None = None, is_one_row: bool = False
    ) -> torch.Tensor:
        undo = group.converter
        if isinstance(undo, _Undo):
            parts = [tensors[name][0].float() for name in group.patterns]
            made = self._undone(group, undo.step, *([torch.cat(parts)] if undo.step.is_of_rows else parts))
        else:
            made = super().convert(group, tensors, target, is_one_row)
        if (undo is not None and not isinstance(undo, _Undo)) or is_one_row:
            return made
        shape = self.shape(group.target)
        return made.reshape(shape) if made.numel() == math.prod(shape) else made


def _layer(name: str) -> tuple[str, str]:
    """A layer's prefix of GGUF's names, "" of what is in none, and the rest of the name."""
    match = re.match(r"(?:blk|.*\blayers)\.(\d+)\.(.*)", name)
    return (f"blk.{match[1]}.", match[2]) if match else ("", name)

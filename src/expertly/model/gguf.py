"""A GGUF file as a checkpoint: its config, tokenizer and names of parameters as transformers reads them.

The only file that touches transformers' GGUF support and the package gguf.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, core_model_loading

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.gguf import OF_GGUF_TYPE
from expertly.model.conversion import Conversion, Group, Tensors, quiet
from expertly.store.checkpoint import Checkpoint, check_claims
from expertly.store.gguf import SUFFIX, GgufFiles
from expertly.store.manifest import IS_FLOAT

_EXPERTS = "_exps.weight"
"""How the names of tensors end that hold all experts of a layer."""

_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Metadata that transformers leaves at its defaults, and fields of the config that say the same."""

ARCHITECTURES = ("qwen2moe", "qwen3moe")
"""Those that are tested, of what transformers loads with its experts."""


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint folder, or a GGUF file (any part of one that is split). Raises CheckpointError."""
    return _open_gguf(path) if path.suffix == SUFFIX and not path.is_dir() else Checkpoint.open(path)


def config_of(checkpoint: Checkpoint) -> Path | PreTrainedConfig:
    """What a model is built of: a folder, or a config."""
    if not checkpoint.gguf:
        return checkpoint.folder
    fields = dict(checkpoint.config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _open_gguf(path: Path) -> Checkpoint:
    files = GgufFiles.open(path)
    path = files.path
    architecture = files.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: general.architecture={architecture!r:.80}: accepted of GGUF files: {', '.join(ARCHITECTURES)}; "
            "others run from a checkpoint folder"
        )
    shapes = {name: ref.shape for name, ref in files.tensors.items()}
    counts = {"num_layers": "block_count", "num_experts": "expert_count"}
    claims = {field: files.metadata.get(f"{architecture}.{key}") for field, key in counts.items()}
    check_claims(path, claims, shapes, CheckpointError)  # before a config makes lists as long
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # whatever a header makes transformers do
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: transformers makes no config of its metadata: {reason:.200}") from error
    for key, field in _SIZES.items():
        value = files.metadata.get(f"{architecture}.{key}")
        if isinstance(value, int) and hasattr(config, field):
            setattr(config, field, value)
    config.tie_word_embeddings = "output.weight" not in files.tensors
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    check_claims(path, fields, shapes, CheckpointError)
    return Checkpoint(path, fields, files.tensors, files.headers, architecture)


def kept_formats(checkpoint: Checkpoint) -> str:
    """The weight formats of a GGUF file's experts, joined by +; nothing where they are not quantised, or the checkpoint
    is no such file.
    """
    if not checkpoint.gguf:
        return ""
    types = {ref.dtype for name, ref in checkpoint.tensors.items() if name.endswith(_EXPERTS)} - IS_FLOAT
    return "+".join(sorted({OF_GGUF_TYPE[one].name if one in OF_GGUF_TYPE else one.lower() for one in types}))


@contextlib.contextmanager
def extras_of(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with the tokenizer and what else belongs to the checkpoint. Raises CheckpointError."""
    if not checkpoint.gguf:
        yield checkpoint.folder
        return
    path = checkpoint.folder
    with tempfile.TemporaryDirectory(prefix="expertly-") as made:
        if GgufFiles.open(path).metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
            try:
                with quiet():
                    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
                    tokenizer.save_pretrained(made)
            except Exception as error:  # whatever a vocabulary makes it do
                raise CheckpointError(f"{path}: its tokenizer cannot be read: {error!s:.200}") from error
        yield Path(made)


class GgufConversion(Conversion):
    """From a GGUF file's tensors, dequantised, to a model's parameters."""

    def __init__(self, model: PreTrainedModel, architecture: str) -> None:
        from transformers import modeling_gguf_pytorch_utils as upstream

        super().__init__(model)
        with quiet():
            self._processor = upstream.TENSOR_PROCESSORS.get(architecture, upstream.TensorProcessor)(
                config=model.config.to_dict()
            )
            names = upstream.get_gguf_hf_weights_map(model, self._processor)
        self._names = {name + ".weight" if name.endswith("_exps") else name: to for name, to in names.items()}
        fused = core_model_loading.WeightConverter(
            source_patterns=[f".ffn_gate{_EXPERTS}", f".ffn_up{_EXPERTS}"],
            target_patterns=".mlp.experts.gate_up_proj",
            operations=[core_model_loading.Concatenate(dim=1)],
        )
        self._of_pattern = dict.fromkeys(fused.source_patterns, fused)

    def target(self, name: str) -> tuple[str, str | None]:
        return self._names.get(name, ""), next((one for one in self._of_pattern if name.endswith(one)), None)

    def convert(
        self, group: Group, tensors: Tensors, target: str | None = None, is_one_row: bool = False
    ) -> torch.Tensor:
        if group.converter is not None or is_one_row:
            return super().convert(group, tensors, target, is_one_row)
        ((name, (tensor,)),) = tensors.items()
        if name.endswith(_EXPERTS) or tensor.is_meta:
            return tensor
        made = self._processor.process(tensor.float().numpy(), name, tensor_key_mapping={}, parsed_parameters={})
        return torch.from_numpy(np.ascontiguousarray(made.weights))

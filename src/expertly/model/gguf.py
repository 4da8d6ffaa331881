"""A GGUF file as a checkpoint, with the config, tokenizer and parameter names that transformers makes of it.

The only file that uses transformers' GGUF support.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    core_model_loading,
)

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.gguf import OF_GGUF_TYPE
from expertly.model.conversion import Conversion, Group, Tensors
from expertly.model.structure import quiet
from expertly.store.checkpoint import Checkpoint, check_claims
from expertly.store.gguf import SUFFIX, GgufFiles
from expertly.store.manifest import IS_FLOAT

_EXPERTS = "_exps.weight"
"""Ending of the names of tensors with all experts of a layer."""

_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Metadata that transformers ignores, and the config's fields for it."""

GPT_OSS = "gpt-oss"

ARCHITECTURES = ("qwen2moe", "qwen3moe", GPT_OSS, "minimax-m2")
"""The tested architectures; the last needs a newer transformers than the oldest that is supported. 5.23 makes no config
of gpt-oss's metadata, and lacks some of its tensors.
"""

_GPT_OSS_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_GPT_OSS_ROPE = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Metadata and the config's fields. Other fields have the same values in all of gpt-oss, which are the defaults."""

_GPT_OSS_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""For metadata that most files do not have."""

_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}

_GPT_OSS_TENSORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
"""Tensors of a layer that transformers does not know, and their parameters."""


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint folder, or a GGUF file (any part of one that is split). Raises CheckpointError."""
    return _open_gguf(path) if path.suffix == SUFFIX and not path.is_dir() else Checkpoint.open(path)


def config_of(checkpoint: Checkpoint) -> Path | PreTrainedConfig:
    """The source from which `build_meta_model` builds the model: a folder, or a config."""
    if not checkpoint.gguf:
        return checkpoint.folder
    fields = dict(checkpoint.config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _open_gguf(path: Path) -> Checkpoint:
    from transformers import modeling_gguf_pytorch_utils as upstream

    files = GgufFiles.open(path)
    path = files.path
    architecture = files.metadata.get("general.architecture")
    known = [one for one in ARCHITECTURES if one != "minimax-m2" or one in upstream.TENSOR_PROCESSORS]
    if architecture not in known:
        raise UnsupportedModelError(
            f"{path}: general.architecture={architecture!r:.80}: accepted of GGUF files: {', '.join(known)}; "
            "others run from a checkpoint folder"
        )
    shapes = {name: ref.shape for name, ref in files.tensors.items()}
    counts = {"num_layers": "block_count", "num_experts": "expert_count"}
    claims = {field: files.metadata.get(f"{architecture}.{key}") for field, key in counts.items()}
    check_claims(path, claims, shapes, CheckpointError)  # before a config makes lists as long
    make = partial(AutoConfig.from_pretrained, path.parent, gguf_file=path.name, local_files_only=True)
    if architecture == GPT_OSS:
        make = partial(AutoConfig.for_model, "gpt_oss", **_gpt_oss_config(files))
    try:
        with quiet():
            config = make()
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


def _gpt_oss_config(files: GgufFiles) -> dict[str, Any]:
    """The config's fields. Raises CheckpointError naming a value that is missing, or not a number above 0."""

    def read(fields: Mapping[str, str]) -> dict[str, Any]:
        found = {
            field: files.metadata.get(f"{GPT_OSS}.{key}", _GPT_OSS_DEFAULTS.get(field)) for key, field in fields.items()
        }
        for key, field in fields.items():
            value = found[field]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise CheckpointError(f"{files.path}: {GPT_OSS}.{key}={value!r:.80}: must be a number above 0")
        return found

    scaling = files.metadata.get(f"{GPT_OSS}.rope.scaling.type")
    if scaling != "yarn":
        raise CheckpointError(f"{files.path}: {GPT_OSS}.rope.scaling.type={scaling!r:.80}: must be 'yarn'")
    table = files.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{files.path}: no tensor token_embd.weight of two dimensions")
    return {
        **read(_GPT_OSS_FIELDS),
        "rope_parameters": {"rope_type": "yarn", "truncate": False, **read(_GPT_OSS_ROPE)},
        "vocab_size": table.shape[0],
        **{f"{one}_token_id": files.metadata.get(f"tokenizer.ggml.{key}_token_id") for one, key in _IDS.items()},
    }


def kept_formats(checkpoint: Checkpoint) -> str:
    """The weight formats of a GGUF file's experts, joined by +; "" where they are not quantised, or
    it is no GGUF file.
    """
    if not checkpoint.gguf:
        return ""
    types = {ref.dtype for name, ref in checkpoint.tensors.items() if name.endswith(_EXPERTS)} - IS_FLOAT
    return "+".join(sorted({OF_GGUF_TYPE[one].name if one in OF_GGUF_TYPE else one.lower() for one in types}))


@contextlib.contextmanager
def extras_of(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with the checkpoint's tokenizer and other small files. Raises CheckpointError."""
    if not checkpoint.gguf:
        yield checkpoint.folder
        return
    path = checkpoint.folder
    reader = PreTrainedTokenizerFast if checkpoint.gguf == GPT_OSS else AutoTokenizer  # which wants a config of its own
    with tempfile.TemporaryDirectory(prefix="expertly-") as made:
        if GgufFiles.open(path).metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
            try:
                with quiet():
                    tokenizer = reader.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
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
        both: list[core_model_loading.ConversionOps] = [core_model_loading.Concatenate(dim=1)]
        made = [("gate_up_proj", "weight", ["gate", "up"], both)]
        if architecture == GPT_OSS:  # rows of gate and up are interleaved, and matrices are [inputs, outputs]
            for layer in range(model.config.num_hidden_layers):
                self._names |= {
                    f"blk.{layer}.{name}": f"model.layers.{layer}.{to}" for name, to in _GPT_OSS_TENSORS.items()
                }
            both = [*both, core_model_loading.Interleave(dim=1, inverse=True)]
            turned = core_model_loading.Transpose(dim0=1, dim1=2)
            made = [
                ("gate_up_proj", "weight", ["gate", "up"], [*both, turned]),
                ("gate_up_proj_bias", "bias", ["gate", "up"], both),
                ("down_proj", "weight", ["down"], [turned]),
            ]
        self._of_pattern = {}
        for parameter, kind, matrices, operations in made:
            converter = core_model_loading.WeightConverter(
                source_patterns=[f".ffn_{one}_exps.{kind}" for one in matrices],
                target_patterns=f".mlp.experts.{parameter}",
                operations=operations,
            )
            self._of_pattern |= dict.fromkeys(converter.source_patterns, converter)

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

"""A GGUF file as a checkpoint, with the config and parameter names that transformers has for it.

This file and gguf_words.py are the only ones that use transformers' GGUF support.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, core_model_loading

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats.gguf import OF_GGUF_TYPE
from expertly.model.conversion import Conversion, Group, Tensors
from expertly.model.gguf_words import check_words, special_tokens, tokenizer_folder
from expertly.model.structure import quiet
from expertly.store.checkpoint import Checkpoint, check_claims
from expertly.store.gguf import SUFFIX, GgufFiles, GgufList
from expertly.store.manifest import IS_FLOAT

_EXPERTS = "_exps.weight"
"""Ending of the names of tensors with all experts of a layer."""

# -- what metadata means -----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What the value of a key may be."""

    accepted: str
    is_right: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_SIZE = _Kind("a whole number from 1 to 2147483647", lambda value: type(value) is int and 0 < value < 1 << 31)
_COUNT = _Kind("a whole number from 0 to 2147483647", lambda value: type(value) is int and 0 <= value < 1 << 31)
_NUMBER = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_SHARE = _Kind("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_BASE = _Kind("a number above 1", lambda value: _is_number(value) and value > 1)
_FLAG = _Kind("true or false", lambda value: type(value) is bool)


def _one_of(*values: Any) -> _Kind:
    return _Kind(" or ".join(map(repr, values)), lambda value: isinstance(value, int | float | str) and value in values)


_ZEROS = _Kind(
    "zeros",
    lambda value: value == 0 or (isinstance(value, GgufList) and not value.is_text and not value.numbers().any()),
)

_FIELDS: dict[str, tuple[str, _Kind]] = {
    "context_length": ("max_position_embeddings", _SIZE),
    "block_count": ("num_hidden_layers", _SIZE),
    "embedding_length": ("hidden_size", _SIZE),
    "feed_forward_length": ("intermediate_size", _SIZE),
    "expert_feed_forward_length": ("moe_intermediate_size", _SIZE),
    "attention.head_count": ("num_attention_heads", _SIZE),
    "attention.head_count_kv": ("num_key_value_heads", _SIZE),
    "attention.key_length": ("head_dim", _SIZE),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", _SHARE),
    "expert_count": ("num_experts", _SIZE),
    "expert_used_count": ("num_experts_per_tok", _SIZE),
}
"""Keys that every architecture here has, the config's field for each, and what it may be."""

_ZERO = """
attention.clamp_kqv attention.max_alibi_bias attention.sliding_window attention.temperature_length
attention.temperature_scale attn_logit_softcapping final_logit_softcapping router_logit_softcapping
expert_shared_count expert_shared_feed_forward_length leading_dense_block_count n_deepstack_layers
pooling_type rope.scaling.yarn_log_multiplier
"""
_ZERO_OR_ONE = """
attention.output_scale embedding_scale logit_scale residual_scale rope.scaling.alpha expert_gating_func
expert_group_count expert_group_used_count expert_weights_scale interleave_moe_layer_step moe_every_n_layers
"""
_NEUTRAL: dict[str, _Kind] = {
    "attention.causal": _one_of(True),
    "rope.scaling.finetuned": _FLAG,  # says how the model was made
    "rope.scaling.yarn_attn_factor": _one_of(1),  # llama.cpp computes another
    "tensor_data_layout": _one_of(""),
    **dict.fromkeys(("swin_norm", "use_parallel_residual"), _one_of(False)),
    **dict.fromkeys(_ZERO.split(), _one_of(0)),
    **dict.fromkeys(_ZERO_OR_ONE.split(), _one_of(0, 1)),
}
"""Keys of any architecture that change nothing with these values; 0 mostly means that there is no such thing. A key
that is neither here nor in the architecture's row is refused, as it may change the arithmetic.
"""

# -- the architectures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How the metadata and tensors of one architecture become a model of transformers."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)  # of the config's fields, by key, unlike _FIELDS or further
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that llama.cpp has in its code
    kinds: Mapping[str, _Kind] = field(default_factory=dict)  # of its further keys, or unlike _NEUTRAL
    rope: Mapping[str, Any] = field(default_factory=dict)  # of the config's rope_parameters, where they are scaled
    scalings: tuple[str, ...] = ("none", "linear", "yarn")  # rope.scaling.type; where it is one, it must be there
    has_partial_rope: bool = False
    pre: tuple[str, ...] = ("qwen2",)  # how its text is split into words, the usual one first
    tokenizer: str = "Qwen2Tokenizer"  # transformers' class


GPT_OSS = "gpt-oss"

_ARCHITECTURES: dict[str, _Architecture] = {
    "qwen2moe": _Architecture(
        "qwen2_moe",
        names={
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
        },
        kinds={
            "expert_shared_feed_forward_length": _SIZE,
            "expert_weights_norm": _FLAG,
            "expert_shared_count": _one_of(0, 1),
        },
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        names={"expert_weights_norm": "norm_topk_prob"},
        kinds={"expert_weights_norm": _FLAG},
        fixed={"norm_topk_prob": True},
    ),
    GPT_OSS: _Architecture(
        "gpt_oss",
        names={
            "expert_feed_forward_length": "intermediate_size",
            "expert_count": "num_local_experts",
            "attention.sliding_window": "sliding_window",
        },
        kinds={
            "attention.sliding_window": _SIZE,
            "attention.sliding_window_pattern": _one_of(2),
            "expert_gating_func": _one_of(0, 3),  # softmax of the chosen ones
        },
        rope={"truncate": False},
        scalings=("yarn",),
        pre=("gpt-4o",),
        tokenizer="PreTrainedTokenizerFast",
    ),
    "minimax-m2": _Architecture(
        "minimax_m2",
        names={"expert_feed_forward_length": "intermediate_size", "expert_count": "num_local_experts"},
        kinds={"expert_gating_func": _one_of(0, 2), "expert_weights_norm": _one_of(True)},  # sigmoid
        has_partial_rope=True,
        pre=("minimax-m2",),
        tokenizer="PreTrainedTokenizerFast",
    ),
}
"""By GGUF's name; the last needs a newer transformers than the oldest that is supported. 5.23 makes no config of
gpt-oss's metadata, and lacks some of its tensors.
"""


class _Metadata:
    """The values of an architecture's keys; each is taken once, and none may be left."""

    def __init__(self, files: GgufFiles, architecture: str) -> None:
        self._path, self._prefix = files.path, f"{architecture}."
        start = len(self._prefix)
        self._left = {key[start:]: value for key, value in files.metadata.items() if key.startswith(self._prefix)}

    def take(self, key: str, kind: _Kind, default: Any = None) -> Any:
        """The value, or the default where there is none. Raises CheckpointError where neither is right."""
        value = self._left.pop(key, default)
        if not kind.is_right(value):
            raise self.refusal(key, value, kind.accepted)
        return value

    def refusal(self, key: str, value: Any, accepted: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {self._prefix}{key}={value!r:.80}: must be {accepted}")

    def check_left(self, neutral: Mapping[str, _Kind]) -> None:
        """Raises UnsupportedModelError for a key that is not neutral, as its value may change what is computed."""
        for key, value in self._left.items():
            problem = "a key that is not supported, which may change what the model computes"
            if key in neutral:
                problem = f"not supported; accepted: {neutral[key].accepted}"
            if key not in neutral or not neutral[key].is_right(value):
                raise UnsupportedModelError(f"{self._path}: {self._prefix}{key:.80}={value!r:.80}: {problem}")


def _config_of(files: GgufFiles, name: str, num_rows: int) -> dict[str, Any]:
    """The config's fields, with llama.cpp's defaults; `num_rows`: of the embeddings. Raises CheckpointError."""
    row, said = _ARCHITECTURES[name], _Metadata(files, name)
    kinds = {**{key: kind for key, (_, kind) in _FIELDS.items()}, **row.kinds}
    values: dict[str, Any] = {}

    def take(key: str, default: Any = None) -> Any:
        values[key] = said.take(key, kinds[key], default)
        return values[key]

    context, layers, hidden = (take(key) for key in ("context_length", "block_count", "embedding_length"))
    heads = take("attention.head_count")
    if heads % take("attention.head_count_kv", heads):
        raise said.refusal("attention.head_count_kv", values["attention.head_count_kv"], f"a divisor of {heads} heads")
    head_dim = take("attention.key_length", None if hidden % heads else hidden // heads)
    take("attention.layer_norm_rms_epsilon")
    if take("expert_used_count") > take("expert_count"):
        raise said.refusal("expert_used_count", values["expert_used_count"], f"at most {values['expert_count']}")
    wide = take("feed_forward_length", hidden)  # of layers that have no experts
    is_as_wide = "expert_feed_forward_length" in row.names  # an expert, where metadata says no width of it
    take("expert_feed_forward_length", wide if is_as_wide else max(1, wide // values["expert_used_count"]))
    for key in row.names:
        if key not in values:
            take(key, wide if kinds[key] is _SIZE else row.fixed.get(row.names[key]))
    further = said.take("nextn_predict_layers", _COUNT, 0)  # the last layers predict further tokens
    if further >= layers:
        raise said.refusal("nextn_predict_layers", further, f"less than block_count={layers}")
    fields = {**row.fixed, **{row.names.get(key) or _FIELDS[key][0]: value for key, value in values.items()}}
    fields["num_hidden_layers"] = layers - further
    fields["rms_norm_eps"] = float(fields["rms_norm_eps"])
    fields["vocab_size"] = said.take("vocab_size", _one_of(num_rows), num_rows)
    fields["rope_parameters"] = _rope_of(said, row, head_dim, context)
    scale = said.take("attention.scale", _Kind("a number", _is_number), 0.0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise said.refusal("attention.scale", scale, f"{head_dim**-0.5:g}")
    same = {"attention.value_length": _one_of(head_dim), "embedding_length_out": _one_of(hidden)}
    said.check_left({**_NEUTRAL, **same, **row.kinds})
    return fields


def _rope_of(said: _Metadata, row: _Architecture, head_dim: int, context: int) -> dict[str, Any]:
    """The config's rope_parameters: llama.cpp's rules, in transformers' words."""
    base = said.take("rope.freq_base", _BASE, 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(base)}
    num_dims = said.take("rope.dimension_count", _SIZE, head_dim)
    if num_dims % 2 or num_dims > head_dim or (num_dims < head_dim and not row.has_partial_rope):
        part = ", or below it" if row.has_partial_rope else ""
        raise said.refusal("rope.dimension_count", num_dims, f"even, and {head_dim}, the width of a head{part}")
    if num_dims < head_dim:
        rope["partial_rotary_factor"] = num_dims / head_dim
        if int(head_dim * rope["partial_rotary_factor"]) != num_dims:  # so transformers computes it
            raise said.refusal("rope.dimension_count", num_dims, "a number that transformers makes of its share")
    said.take("rope.freq_base_swa", _one_of(base), base)
    said.take("rope.dimension_count_swa", _one_of(num_dims), num_dims)
    said.take("rope.dimension_sections", _ZEROS, 0)
    is_unsaid = len(row.scalings) > 1
    scaling = said.take("rope.scaling.type", _one_of(*row.scalings), "linear" if is_unsaid else None)
    old = said.take("rope.scale_linear", _Kind("a number", _is_number), 1.0)
    factor = said.take("rope.scaling.factor", _NUMBER, (old or 1.0) if is_unsaid else None)
    attention = said.take("rope.scaling.attn_factor", _NUMBER, 1.0)
    original = said.take("rope.scaling.original_context_length", _SIZE, context)
    beta_fast = said.take("rope.scaling.yarn_beta_fast", _NUMBER, 32.0)
    beta_slow = said.take("rope.scaling.yarn_beta_slow", _NUMBER, 1.0)
    mixing = said.take("rope.scaling.yarn_ext_factor", _Kind("a number", _is_number), -1.0)
    if mixing >= 0 and mixing != (scaling == "yarn"):
        raise said.refusal("rope.scaling.yarn_ext_factor", mixing, f"{float(scaling == 'yarn')} with {scaling!r}")
    if scaling != "yarn" and attention != 1:
        raise said.refusal("rope.scaling.attn_factor", attention, f"1.0 with {scaling!r}")
    if scaling == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": float(factor), **row.rope}
    elif scaling == "yarn":
        turn, octaves = original / (2 * math.pi), 2 * math.log(base)
        first = math.floor(num_dims * math.log(turn / beta_fast) / octaves)
        last = math.ceil(num_dims * math.log(turn / beta_slow) / octaves)
        if not max(0, first) < min(num_dims - 1, last):  # llama.cpp and transformers go apart
            accepted = "longer than a turn of some dimensions"
            raise said.refusal("rope.scaling.original_context_length", original, accepted)
        scale = {"attention_factor": attention * (1 + 0.1 * math.log(max(1.0, factor)))} if attention != 1 else {}
        rope |= {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": original,
            "beta_fast": float(beta_fast),
            "beta_slow": float(beta_slow),
            **scale,
            **row.rope,
        }
    return rope


# -- checkpoints -------------------------------------------------------------------------------------------------------


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
    known = [name for name in _ARCHITECTURES if name != "minimax-m2" or name in upstream.TENSOR_PROCESSORS]
    if not isinstance(architecture, str) or architecture not in known:
        raise UnsupportedModelError(
            f"{path}: general.architecture={architecture!r:.80}: accepted of GGUF files: {', '.join(known)}; "
            "others run from a checkpoint folder"
        )
    shapes = {name: ref.shape for name, ref in files.tensors.items()}
    counts = {"num_layers": "block_count", "num_experts": "expert_count"}
    claims = {name: files.metadata.get(f"{architecture}.{key}") for name, key in counts.items()}
    check_claims(path, claims, shapes, CheckpointError)  # before a config makes lists as long
    table = shapes.get("token_embd.weight")
    if table is None or len(table) != 2:
        raise CheckpointError(f"{path}: no tensor token_embd.weight of two dimensions")
    row = _ARCHITECTURES[architecture]
    words = check_words(files, table[0], row.pre)
    made = {**_config_of(files, architecture, table[0]), **special_tokens(files, table[0], words)}
    made["tie_word_embeddings"] = "output.weight" not in files.tensors
    try:
        with quiet():
            config = AutoConfig.for_model(row.model_type, **made)
    except Exception as error:  # transformers' and huggingface_hub's checks of fields raise a class for each
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: transformers makes no config of its metadata: {reason:.200}") from error
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    tensors = dict(files.tensors)
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


def kept_formats(checkpoint: Checkpoint) -> str:
    """The weight formats of a GGUF file's experts, joined by +; "" where they are not quantised."""
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
    with tokenizer_folder(GgufFiles.open(checkpoint.folder), _ARCHITECTURES[checkpoint.gguf].tokenizer) as made:
        yield made


# -- tensors -----------------------------------------------------------------------------------------------------------

_GPT_OSS_TENSORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
"""Tensors of a layer that transformers does not know, and their parameters."""


class GgufConversion(Conversion):
    """From a GGUF file's tensors, dequantised, to a model's parameters."""

    def __init__(self, model: PreTrainedModel, architecture: str) -> None:
        from transformers import modeling_gguf_pytorch_utils as upstream

        super().__init__(model)
        with quiet():
            processor = upstream.TENSOR_PROCESSORS.get(architecture, upstream.TensorProcessor)
            self._processor = processor(config=model.config.to_dict())
            names = upstream.get_gguf_hf_weights_map(model, self._processor)
        self._names = {name + ".weight" if name.endswith("_exps") else name: to for name, to in names.items()}
        both: list[core_model_loading.ConversionOps] = [core_model_loading.Concatenate(dim=1)]
        made = [("gate_up_proj", "weight", ["gate", "up"], both)]
        if architecture == GPT_OSS:  # rows of gate and up are interleaved, and matrices are [inputs, outputs]
            for layer in range(model.config.num_hidden_layers):
                of_layer = f"model.layers.{layer}"
                self._names |= {f"blk.{layer}.{name}": f"{of_layer}.{to}" for name, to in _GPT_OSS_TENSORS.items()}
            both = [*both, core_model_loading.Interleave(dim=1, inverse=True)]
            turned = core_model_loading.Transpose(dim0=1, dim1=2)
            made = [
                ("gate_up_proj", "weight", ["gate", "up"], [*both, turned]),
                ("gate_up_proj_bias", "bias", ["gate", "up"], both),
                ("down_proj", "weight", ["down"], [turned]),
            ]
        self._of_pattern = {}
        for parameter, kind, matrices, operations in made:
            sources = [f".ffn_{matrix}_exps.{kind}" for matrix in matrices]
            converter = core_model_loading.WeightConverter(sources, f".mlp.experts.{parameter}", operations)
            self._of_pattern |= dict.fromkeys(sources, converter)

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

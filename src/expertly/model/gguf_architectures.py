"""The architectures of GGUF files that run, a row each, and the config of transformers that a file's metadata makes.

A row says what is not usual: `_KEYS` has the keys that most architectures share, and a parameter's name is what the
package gguf calls it. What metadata or a tensor means is what llama.cpp computes; what its converter changed in a
tensor, a step undoes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import CONFIG_MAPPING

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.core.untrusted import reading
from expertly.model.structure import quiet
from expertly.store.gguf import GgufFiles, GgufList

Values = dict[str, Any]
"""Of metadata, by key without the architecture's name."""

# -- what metadata may be ----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What the value of a key may be."""

    accepted: str
    is_right: Callable[[Any], bool]
    is_by_layer: bool = False  # one value for each layer, or one for all


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_SIZE = _Kind("a whole number from 1 to 2147483647", lambda value: type(value) is int and 0 < value < 1 << 31)
_COUNT = _Kind("a whole number from 0 to 2147483647", lambda value: type(value) is int and 0 <= value < 1 << 31)
_ANY = _Kind("a number", _is_number)
_NUMBER = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_NOT_BELOW_0 = _Kind("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
_SHARE = _Kind("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
_BASE = _Kind("a number above 1", lambda value: _is_number(value) and value > 1)
_FLAG = _Kind("true or false", lambda value: type(value) is bool)
_COUNTS = _Kind(f"{_COUNT.accepted}, for each layer", _COUNT.is_right, is_by_layer=True)
_FLAGS = _Kind(f"{_FLAG.accepted}, for each layer", _FLAG.is_right, is_by_layer=True)


def _one_of(*values: Any) -> _Kind:
    return _Kind(" or ".join(map(repr, values)), lambda value: isinstance(value, int | float | str) and value in values)


_ZEROS = _Kind(
    "zeros",
    lambda value: value == 0 or (isinstance(value, GgufList) and not value.is_text and not value.numbers().any()),
)
_SECTIONS = _Kind("numbers", lambda value: isinstance(value, GgufList) and not value.is_text)
"""Of a text, whose positions are the same in all sections, a rope in sections is one that is not."""


class _Key(NamedTuple):
    fields: str  # of configs: the first that a class has is this key's
    kind: _Kind
    default: Any = None  # llama.cpp's, or a function of the values before it; None: the key must be there


_KEYS: dict[str, _Key] = {
    "context_length": _Key("max_position_embeddings model_max_length", _SIZE),
    "block_count": _Key("num_hidden_layers", _SIZE),
    "embedding_length": _Key("hidden_size", _SIZE),
    "attention.head_count": _Key("num_attention_heads", _SIZE),
    "attention.head_count_kv": _Key("num_key_value_heads", _SIZE, lambda said: said["attention.head_count"]),
    "attention.key_length": _Key("head_dim", _SIZE, lambda said: _head_dim(said)),
    "attention.layer_norm_rms_epsilon": _Key("rms_norm_eps norm_eps", _SHARE),
    "expert_count": _Key("num_experts num_local_experts n_routed_experts moe_num_experts", _SIZE),
    "expert_used_count": _Key("num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts", _SIZE),
    "feed_forward_length": _Key(
        "intermediate_size_mlp intermediate_size", _SIZE, lambda said: said["embedding_length"]
    ),
    "expert_feed_forward_length": _Key(
        "moe_intermediate_size intermediate_size", _SIZE, lambda said: _expert_width(said)
    ),
    "expert_shared_feed_forward_length": _Key(
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
        _COUNT,
        0,
    ),
    "expert_shared_count": _Key("n_shared_experts num_shared_experts moe_num_shared_experts", _COUNT, 0),
    "leading_dense_block_count": _Key("first_k_dense_replace num_dense_layers moe_layer_start_index", _COUNT, 0),
    "expert_weights_scale": _Key("routed_scaling_factor route_scale", _NOT_BELOW_0, 1.0),
    "expert_weights_norm": _Key("norm_topk_prob moe_renormalize", _FLAG, False),
    "expert_group_count": _Key("n_group num_expert_group", _COUNT, 1),
    "expert_group_used_count": _Key("topk_group", _COUNT, 1),
}
"""Keys of any architecture, in the order in which defaults need each other. One with a default that is a number, and
whose fields the config's class lacks, is accepted where it is `_NEUTRAL`.
"""


def _head_dim(said: Values) -> int | None:
    hidden, heads = said["embedding_length"], said["attention.head_count"]
    return None if hidden % heads else hidden // heads


def _expert_width(said: Values) -> int:
    """Where a file says no width of its experts."""
    return max(1, said["feed_forward_length"] // said["expert_used_count"])


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

# -- what a converter did to tensors, undone ---------------------------------------------------------------------------


class TensorStep(NamedTuple):
    """Makes a parameter of its tensors, or, where `is_of_rows`, of one of all their rows, which it moves."""

    undo: Callable[..., torch.Tensor]  # of the config and the tensors
    is_of_rows: bool = False


def _heads(num_heads: str) -> TensorStep:
    """The rows of each head are pairs in `llama`, which rotates neighbours, and halves in transformers."""

    def undo(config: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (getattr(config, num_heads), -1, 2)).transpose(1, 2).flatten(0, 2)

    return TensorStep(undo, is_of_rows=True)


def _latent(config: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`kv_b_proj` of [heads, rank, nope] and [heads, v, rank]."""
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


_PAIRED = {"attn_q.weight": _heads("num_attention_heads"), "attn_k.weight": _heads("num_key_value_heads")}
_PAIRED |= {name.replace("weight", "bias"): step for name, step in _PAIRED.items()}
_LESS_ONE = dict.fromkeys(
    [f"{name}.weight" for name in ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")],
    TensorStep(lambda config, tensor: tensor - 1),
)
_STATE_SPACE = {
    "ssm_a": TensorStep(lambda config, tensor: tensor.neg().log()),
    "ssm_norm.weight": TensorStep(lambda config, tensor: tensor.flatten()),  # of groups
}
_LOG = {"ssm_a": _STATE_SPACE["ssm_a"]}


def _by_key_head(config: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of queries, keys, values and gates, together for each key head."""
    keys, widths = config.linear_num_key_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
    values = config.linear_num_value_heads // keys
    parts = tensor.split([keys * widths[0]] * 2 + [keys * values * widths[1]] * 2)
    return torch.cat([part.unflatten(0, (keys, -1)) for part in parts], dim=1).flatten(0, 1)


def _value_heads(width: str = "", dim: int = 0, is_after_keys: bool = False, is_log: bool = False) -> TensorStep:
    """Value heads stand in turns, one of each key head; in transformers those of a key head stand together.

    `width`: the config's field with the numbers of a head, else 1.
    """

    def undo(config: Any, tensor: torch.Tensor) -> torch.Tensor:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        size = values * (getattr(config, width) if width else 1)
        before, moved = tensor.split((tensor.shape[dim] - size, size), dim)
        moved = moved.unflatten(dim, (values // keys, keys, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        made = torch.cat((before, moved), dim) if is_after_keys else moved
        return made.neg().log() if is_log else made

    return TensorStep(undo, is_of_rows=dim == 0 and not is_log)


_VALUE_WIDTH = "linear_value_head_dim"
_VALUE_HEADS = {
    "attn_qkv.weight": _value_heads(_VALUE_WIDTH, is_after_keys=True),
    "ssm_conv1d.weight": _value_heads(_VALUE_WIDTH, is_after_keys=True),
    "attn_gate.weight": _value_heads(_VALUE_WIDTH),
    "ssm_out.weight": _value_heads(_VALUE_WIDTH, dim=1),
    "ssm_a": _value_heads(is_log=True),
    **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"), _value_heads()),
}
ROWS = TensorStep(lambda config, tensor: tensor, is_of_rows=True)

# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the metadata and tensors of one architecture become a model of transformers."""

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)  # of the config, by key, unlike _KEYS; "": see `more`
    kinds: Mapping[str, Any] = field(default_factory=dict)  # of keys, unlike _KEYS and _NEUTRAL; or made of the values
    vectors: Mapping[str, Callable[[float], bool]] = field(default_factory=dict)  # tensors that `more` needs
    defaults: Values = field(default_factory=dict)  # llama.cpp's for keys that are missing, unlike _KEYS
    fixed: Values = field(default_factory=dict)  # fields that llama.cpp has in its code
    has: Mapping[str, str] = field(default_factory=dict)  # fields that say whether layers have a tensor of this name
    more: Callable[[Values], Values] = lambda said: {}  # further fields
    parameters: Mapping[str, str] = field(default_factory=dict)  # tensors by a parameter's name, beside the package's
    steps: Mapping[str, TensorStep] = field(default_factory=dict)  # by tensors of a layer, in the step's order
    rope: Values = field(default_factory=dict)  # of the config's rope_parameters, where they are scaled
    scalings: tuple[str, ...] = ("none", "linear", "yarn")  # rope.scaling.type; where it is one, it must be there
    has_partial_rope: bool = False
    by_sigmoid: Architecture | None = None  # instead, where experts are chosen by sigmoid
    pre: tuple[str, ...] = ()  # how its text is split into words, where transformers knows it by its class
    tokenizer: str = "PreTrainedTokenizerFast"  # transformers' class


GPT_OSS = "gpt-oss"

_SOFTMAX, _SIGMOID = {"expert_gating_func": _one_of(0, 1)}, {"expert_gating_func": _one_of(0, 2)}
_ALWAYS_NORMED = {"expert_weights_norm": _one_of(True)}
_SHARED_WIDTHS = dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), _COUNT)
"""Where the tensors' shapes say it."""

_LATENT_ATTENTION: dict[str, Any] = {
    "fields": {
        "attention.head_count_kv": "",
        "attention.key_length": "",
        "attention.value_length": "",
        "attention.q_lora_rank": "",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length_mla": "",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "rope.scaling.yarn_log_multiplier": "",
    },
    "defaults": {
        "attention.value_length": lambda said: said["attention.key_length"],
        "attention.q_lora_rank": 0,
        "attention.key_length_mla": lambda said: said["attention.key_length"],
        "attention.value_length_mla": lambda said: said["attention.value_length"],
        "rope.scaling.yarn_log_multiplier": 0.0,
    },
    "parameters": {"kv_b_proj.weight": "attn_k_b.weight attn_v_b.weight"},
    "steps": {"attn_k_b.weight attn_v_b.weight": TensorStep(_latent)},
}
"""Of a file with `attn_k_b`, whose lengths without `_mla` are those of one head that all share. Older ones have
`attn_kv_b`, and a head's own lengths.
"""
_LATENT_KINDS = dict.fromkeys(_LATENT_ATTENTION["fields"], _SIZE) | {
    "attention.q_lora_rank": _COUNT,
    "rope.scaling.yarn_log_multiplier": _NOT_BELOW_0,
}


def _latent_fields(said: Values) -> Values:
    groups = said["expert_group_count"]
    return {
        "num_key_value_heads": said["attention.head_count"],
        "q_lora_rank": said["attention.q_lora_rank"] or None,
        "qk_nope_head_dim": said["attention.key_length_mla"] - said["rope.dimension_count"],
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


_LINEAR_ATTENTION: dict[str, Any] = {
    "fields": {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": "",
        "full_attention_interval": "",
        "attention.recurrent_layers": "",
    },
    "defaults": {
        "expert_weights_norm": True,
        "full_attention_interval": 4,
        "attention.recurrent_layers": lambda said: [
            bool((layer + 1) % said["full_attention_interval"]) for layer in range(said["block_count"])
        ],
    },
    "more": lambda said: {
        "linear_value_head_dim": said["ssm.inner_size"] // said["ssm.time_step_rank"],
        "layer_types": _types(said["attention.recurrent_layers"], "linear_attention", said),
    },
    "has_partial_rope": True,
}
_SSM = dict.fromkeys(
    ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"), _SIZE
)
_LINEAR_KINDS = _SSM | {"full_attention_interval": _SIZE, "attention.recurrent_layers": _FLAGS}


def _types(is_other: list[Any], other: str, said: Values) -> list[str]:
    """The config's layer_types."""
    return [other if each else "full_attention" for each in is_other[: said["block_count"]]]


_WINDOW: dict[str, Any] = {
    "fields": {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": ""},
    "defaults": {
        "attention.sliding_window_pattern": lambda said: [bool((i + 1) % 4) for i in range(said["block_count"])]
    },
}
_WINDOW_KINDS = {"attention.sliding_window": _SIZE, "attention.sliding_window_pattern": _FLAGS}
_GRANITE: dict[str, Any] = {
    "fields": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "defaults": {
        "attention.scale": lambda said: said["attention.key_length"] ** -0.5,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
    },
    "parameters": {
        "router.weight": "ffn_gate_inp.weight",
        "shared_mlp.input_linear.weight": "ffn_gate_shexp.weight ffn_up_shexp.weight",
    },
}
_GRANITE_KINDS = {**dict.fromkeys(_GRANITE["fields"], _NOT_BELOW_0), "logit_scale": _NUMBER}


def _hybrid_granite(said: Values) -> Values:
    heads = said["attention.head_count_kv"]
    return {
        "num_key_value_heads": max(heads),
        "layer_types": _types([not each for each in heads], "linear_attention", said),
        "mamba_d_head": said["ssm.inner_size"] // said["ssm.time_step_rank"],
        "mamba_expand": said["ssm.inner_size"] // said["embedding_length"],
        "position_embedding_type": "rope" if said["rope.scaling.finetuned"] else None,
    }


def _jamba(said: Values) -> Values:
    attention = [layer for layer, heads in enumerate(said["attention.head_count_kv"]) if heads]
    of_experts, layers = said["layers"].get("ffn_gate_inp.weight", []), said["block_count"]

    def every(some: list[int], name: str) -> Values:
        return {f"{name}_layer_offset": some[0], f"{name}_layer_period": some[1] - some[0] if some[1:] else layers}

    return {
        "num_key_value_heads": max(said["attention.head_count_kv"]),
        "mamba_expand": said["ssm.inner_size"] // said["embedding_length"],
        **every(attention or [layers], "attn"),
        **every(of_experts or [layers], "expert"),
    }


def _nemotron(said: Values) -> Values:
    kinds = ["moe" if width else "linear_attention" for width in said["feed_forward_length"]]
    for layer, heads in enumerate(said["attention.head_count_kv"]):
        kinds[layer] = "full_attention" if heads else kinds[layer]
    return {
        "layers_block_type": kinds[: said["block_count"]],
        "num_key_value_heads": max(said["attention.head_count_kv"]),
        "mamba_head_dim": said["ssm.inner_size"] // said["ssm.time_step_rank"],
    }


_NEVER_TURNED = 1e29
"""Of gemma4, what the wave lengths of dimensions that are not rotated are multiplied with."""


def _gemma4(said: Values) -> Values:
    slides, heads = said["attention.sliding_window_pattern"], said["attention.head_count_kv"]
    full = {heads[layer] for layer, is_slid in enumerate(slides) if not is_slid}
    slid = {heads[layer] for layer, is_slid in enumerate(slides) if is_slid}
    turned = [each < _NEVER_TURNED for each in said["rope_freqs.weight"]] or [True]
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "global_head_dim": said["attention.key_length"],
        "head_dim": said["attention.key_length_swa"],
        "num_key_value_heads": min(slid, default=0),
        "num_global_key_value_heads": min(full, default=0),
        "attention_k_eq_v": len(said["layers"].get("attn_v.weight", ())) < said["block_count"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": said["rope.freq_base_swa"]},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": said["rope.freq_base"],
                "partial_rotary_factor": sum(turned) / len(turned),
            },
        },
    }


_KIMI = {"attention.head_count_kv": _COUNTS, **_ALWAYS_NORMED}
ARCHITECTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        kinds={"expert_shared_count": _one_of(0, 1)},
        defaults={"expert_shared_feed_forward_length": lambda said: said["feed_forward_length"]},
        pre=("qwen2",),
        tokenizer="Qwen2Tokenizer",
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", defaults={"expert_weights_norm": True}, pre=("qwen2",), tokenizer="Qwen2Tokenizer"
    ),
    GPT_OSS: Architecture(
        "gpt_oss",
        fields={"attention.sliding_window": "sliding_window"},
        kinds={
            "attention.sliding_window": _SIZE,
            "attention.sliding_window_pattern": _one_of(2),
            "expert_gating_func": _one_of(0, 3),  # softmax of the chosen ones
        },
        rope={"truncate": False},
        scalings=("yarn",),
        pre=("gpt-4o",),
    ),
    "minimax-m2": Architecture(
        "minimax_m2", kinds=_SIGMOID | _ALWAYS_NORMED, has_partial_rope=True, pre=("minimax-m2",)
    ),
    "llama": Architecture("mixtral", kinds=_ALWAYS_NORMED, steps=_PAIRED),
    "olmoe": Architecture("olmoe"),
    "deepseek2": Architecture(
        "deepseek_v2",
        kinds=_LATENT_KINDS | _SOFTMAX | {"expert_weights_norm": _one_of(False)},
        more=_latent_fields,
        **_LATENT_ATTENTION,
        by_sigmoid=Architecture(
            "deepseek_v3", kinds=_LATENT_KINDS | _SIGMOID, more=_latent_fields, **_LATENT_ATTENTION
        ),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        kinds=_SIGMOID,
        has={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        has_partial_rope=True,
    ),
    "phimoe": Architecture("phimoe", has={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"}),
    "granitemoe": Architecture(
        "granitemoeshared", kinds=_GRANITE_KINDS, has={"attention_bias": "attn_q.bias"}, steps=_PAIRED, **_GRANITE
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        **_GRANITE
        | {
            "fields": {
                **_GRANITE["fields"],
                "attention.head_count_kv": "",
                "ssm.conv_kernel": "mamba_d_conv",
                "ssm.state_size": "mamba_d_state",
                "ssm.group_count": "mamba_n_groups",
                "ssm.time_step_rank": "mamba_n_heads",
                "ssm.inner_size": "",
                "rope.scaling.finetuned": "",
            },
            "defaults": {**_GRANITE["defaults"], "rope.scaling.finetuned": True},
        },
        kinds=_GRANITE_KINDS | _SSM | {"attention.head_count_kv": _COUNTS, "rope.scaling.finetuned": _FLAG},
        has={
            "attention_bias": "attn_q.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_proj_bias": "ssm_in.bias",
        },
        more=_hybrid_granite,
        steps=_PAIRED | _STATE_SPACE,
    ),
    "jamba": Architecture(
        "jamba",
        fields={
            "attention.head_count_kv": "",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "ssm.inner_size": "",
        },
        kinds=_SSM | {"attention.head_count_kv": _COUNTS},
        has={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        more=_jamba,
        steps=_LOG,
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        fields={
            "attention.head_count_kv": "",
            "feed_forward_length": "",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.layer_norm_rms_epsilon": "",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "ssm.time_step_rank": "mamba_num_heads",
            "ssm.inner_size": "",
        },
        kinds=_SSM
        | _SIGMOID
        | {
            "attention.head_count_kv": _COUNTS,
            "feed_forward_length": _COUNTS,
            "attention.layer_norm_epsilon": _SHARE,
            "attention.layer_norm_rms_epsilon": _Kind("missing", lambda value: value is None),
        },
        defaults={"attention.layer_norm_rms_epsilon": lambda said: None},
        has={"use_conv_bias": "ssm_conv1d.bias", "attention_bias": "attn_q.bias", "use_bias": "ssm_in.bias"},
        more=_nemotron,
        steps=_PAIRED | _STATE_SPACE,  # the converter knows no attention without a rope
        has_partial_rope=True,
    ),
    "dots1": Architecture("dots1", kinds=_SIGMOID, fixed={"sliding_window": None}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        fields={"interleave_moe_layer_step": "moe_layer_interval"},
        kinds={"interleave_moe_layer_step": _SIZE, **_SHARED_WIDTHS},
        defaults={"interleave_moe_layer_step": 1},
        has={"use_bias": "attn_q.bias"},
        more=lambda said: {"moe_layer_end_index": said["block_count"] - 1},
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", kinds=_SHARED_WIDTHS, has={"attention_bias": "attn_q.bias"}),
    "lfm2moe": Architecture(
        "lfm2_moe",
        fields={"attention.head_count_kv": "", "shortconv.l_cache": "conv_L_cache"},
        kinds={
            "expert_gating_func": _one_of(2),
            "attention.head_count_kv": _COUNTS,
            "shortconv.l_cache": _SIZE,
            **_ALWAYS_NORMED,
        },
        defaults={"expert_weights_norm": True},
        has={"conv_bias": "shortconv.conv.bias", "use_expert_bias": "exp_probs_b.bias"},
        more=lambda said: {
            "num_key_value_heads": max(said["attention.head_count_kv"]),
            "layer_types": _types([not heads for heads in said["attention.head_count_kv"]], "conv", said),
        },
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        kinds=_LINEAR_KINDS,
        parameters={"in_proj_qkvz.weight": "attn_qkv.weight attn_gate.weight"},
        steps={
            **_LESS_ONE,
            **_LOG,
            "attn_qkv.weight attn_gate.weight": TensorStep(_by_key_head, is_of_rows=True),
        },
        **_LINEAR_ATTENTION,
        tokenizer="Qwen2Tokenizer",
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        kinds=_LINEAR_KINDS | {"rope.dimension_sections": _SECTIONS, "feed_forward_length": _COUNT},
        steps=_LESS_ONE | _VALUE_HEADS,
        **_LINEAR_ATTENTION | {"fields": {**_LINEAR_ATTENTION["fields"], "feed_forward_length": ""}},
        tokenizer="Qwen2Tokenizer",
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        kinds=_WINDOW_KINDS | _SHARED_WIDTHS | {"expert_gating_func": _one_of(2)},
        more=lambda said: {
            "layer_types": _types(said["attention.sliding_window_pattern"], "sliding_attention", said),
            "mlp_layer_types": [
                "dense" if layer < said["leading_dense_block_count"] else "sparse"
                for layer in range(said["block_count"])
            ],
        },
        **_WINDOW,
    ),
    "afmoe": Architecture(
        "afmoe",
        fields={**_WINDOW["fields"], "expert_weights_norm": ""},
        kinds=_WINDOW_KINDS | _SIGMOID | _ALWAYS_NORMED,
        defaults={**_WINDOW["defaults"], "expert_weights_norm": None},
        fixed={"mup_enabled": True},
        more=lambda said: {"layer_types": _types(said["attention.sliding_window_pattern"], "sliding_attention", said)},
    ),
    "gemma4": Architecture(
        "gemma4_text",
        fields={
            "attention.head_count_kv": "",
            "attention.key_length": "",
            "attention.key_length_swa": "",
            "attention.value_length_swa": "",
            "rope.dimension_count_swa": "",
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base": "",
            "rope.freq_base_swa": "",
        },
        kinds=_WINDOW_KINDS
        | {
            "attention.head_count_kv": _COUNTS,
            "attention.key_length_swa": _SIZE,
            "attention.shared_kv_layers": _COUNT,
            "embedding_length_per_layer_input": _COUNT,
            "final_logit_softcapping": _NOT_BELOW_0,
            "attention.value_length_swa": lambda said: _one_of(said["attention.key_length_swa"]),
            "rope.dimension_count_swa": lambda said: _one_of(said["attention.key_length_swa"]),
            "rope.freq_base": _BASE,
            "rope.freq_base_swa": _BASE,
        },
        defaults={
            "attention.value_length_swa": lambda said: said["attention.key_length_swa"],
            "rope.dimension_count_swa": lambda said: said["attention.key_length_swa"],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 0.0,
            "rope.freq_base": 10000.0,
            "rope.freq_base_swa": 10000.0,
        },
        fixed={"enable_moe_block": True},
        vectors={"rope_freqs.weight": lambda value: value == 1 or value > _NEVER_TURNED},
        more=_gemma4,
        parameters={
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight",
        },
        tokenizer="GemmaTokenizer",
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        **_LATENT_ATTENTION
        | {
            "fields": {
                **_LATENT_ATTENTION["fields"],
                "ssm.conv_kernel": "linear_conv_kernel_dim",
                "kda.head_dim": "linear_head_dim",
                "leading_dense_block_count": "",
            },
            "defaults": {**_LATENT_ATTENTION["defaults"], "expert_weights_norm": True},
            "parameters": {
                **_LATENT_ATTENTION["parameters"],
                "self_attn.conv1d.weight": "ssm_conv1d_q.weight ssm_conv1d_k.weight ssm_conv1d_v.weight",
                "forget_gate.A_log": "ssm_a",
                "forget_gate.f_a_proj.weight": "ssm_f_a.weight",
                "forget_gate.f_b_proj.weight": "ssm_f_b.weight",
            },
            "steps": {
                **_LATENT_ATTENTION["steps"],
                **_LOG,
                "ssm_conv1d_q.weight ssm_conv1d_k.weight ssm_conv1d_v.weight": TensorStep(
                    lambda config, *tensors: torch.cat([one.flatten(0, -2) for one in tensors])
                ),
            },
        },
        kinds=_LATENT_KINDS | _SSM | {"kda.head_dim": _SIZE, "expert_gating_func": _one_of(2)} | _KIMI,
        more=lambda said: {
            **_latent_fields(said),
            "linear_num_heads": said["attention.head_count"],
            "layer_types": _types([not each for each in said["attention.head_count_kv"]], "linear_attention", said),
            "mlp_layer_types": [
                "dense" if layer < said["leading_dense_block_count"] else "sparse"
                for layer in range(said["block_count"])
            ],
        },
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe",  # as it is where there is only text
        kinds={"rope.dimension_sections": _SECTIONS, "n_deepstack_layers": _COUNT},
        defaults={"expert_weights_norm": True},
        tokenizer="Qwen2Tokenizer",
    ),
}
"""By GGUF's name of an architecture."""


def known_architectures() -> list[str]:
    """Those that this transformers has a model of, and the package gguf names of tensors."""
    import gguf

    named = set(gguf.MODEL_ARCH_NAMES.values())
    return [name for name, row in ARCHITECTURES.items() if row.model_type in CONFIG_MAPPING and name in named]


# -- a config of metadata ----------------------------------------------------------------------------------------------


_VECTOR_NBYTES = 1 << 16


class _Metadata:
    """The values of an architecture's keys; each is taken once, and none may be left."""

    def __init__(self, files: GgufFiles, architecture: str) -> None:
        self._path, self._prefix = files.path, f"{architecture}."
        start = len(self._prefix)
        self._left = {key[start:]: value for key, value in files.metadata.items() if key.startswith(self._prefix)}

    def says(self, key: str) -> bool:
        return bool(self._left.get(key))

    def take(self, key: str, kind: _Kind, default: Any = None, num_layers: int = 0, further: int = 0) -> Any:
        """The value, or the default where there is none. Raises CheckpointError where neither is right."""
        value = self._left.pop(key, default)
        if kind.is_by_layer:
            numbers = value.numbers().tolist() if isinstance(value, GgufList) and not value.is_text else value
            values = numbers if isinstance(numbers, list) else [numbers] * num_layers
            if len(values) not in (num_layers, num_layers - further) or not all(map(kind.is_right, values)):
                raise self.refusal(key, value, f"{kind.accepted} of {num_layers}")
            return values
        if not kind.is_right(value):
            raise self.refusal(key, value, kind.accepted)
        return float(value) if kind in (_SHARE, _NUMBER, _NOT_BELOW_0, _BASE) else value

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


def fields_of(files: GgufFiles, name: str, num_rows: int) -> Values:
    """The config's fields, with llama.cpp's defaults; `num_rows`: of the embeddings. Raises CheckpointError."""
    row, said = ARCHITECTURES[name], _Metadata(files, name)
    if row.by_sigmoid is not None and _is_by_sigmoid(files, name):
        row = row.by_sigmoid
    with quiet():
        usual = CONFIG_MAPPING[row.model_type]()
        known = {*usual.to_dict(), *usual.attribute_map}
    tails: dict[str, list[int]] = {}
    for tensor in files.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor)
        tails.setdefault(tensor[layer.end() :] if layer else tensor, []).append(int(layer[1]) if layer else 0)
    values: Values = {"layers": {tail: sorted(layers) for tail, layers in tails.items()}}
    fields = {"model_type": row.model_type, **row.fixed, **{to: tail in tails for to, tail in row.has.items()}}
    further = said.take("nextn_predict_layers", _COUNT, 0)  # the last layers predict further tokens
    keys = _KEYS | {key: _Key("", _ANY) for key in row.fields if key not in _KEYS}
    for key, (names, kind, default) in keys.items():
        to = row.fields.get(key, next((one for one in names.split() if one in known), None))
        if to is None and isinstance(default, int | float):
            continue
        default = row.defaults.get(key, default)
        if key == "expert_feed_forward_length" and to == "intermediate_size":
            default = values["feed_forward_length"]  # which is that of experts
        if callable(default):
            default = None if said.says(key) else default(values)
        kind = row.kinds.get(key, kind)
        kind = kind if isinstance(kind, _Kind) else kind(values)
        value = said.take(key, kind, default, values.get("block_count", 0), further)
        values[key] = value if value or value is False else default  # 0 says nothing
        if to != "":
            to = to or names.split()[0]
            fields[usual.attribute_map.get(to, to)] = values[key]
    layers, heads, hidden = (values[key] for key in ("block_count", "attention.head_count", "embedding_length"))
    heads_kv = values["attention.head_count_kv"]
    if any(one and heads % one for one in (heads_kv if isinstance(heads_kv, list) else [heads_kv])):
        raise said.refusal("attention.head_count_kv", heads_kv, f"a divisor of {heads} heads")
    if values["expert_used_count"] > values["expert_count"]:
        raise said.refusal("expert_used_count", values["expert_used_count"], f"at most {values['expert_count']}")
    if further >= layers:
        raise said.refusal("nextn_predict_layers", further, f"less than block_count={layers}")
    values["block_count"] = fields["num_hidden_layers"] = layers - further
    fields["vocab_size"] = said.take("vocab_size", _one_of(num_rows), num_rows)
    head_dim = values["attention.key_length"]
    fields["rope_parameters"] = _rope_of(said, row, values)
    if "attention.scale" not in values:
        scale = said.take("attention.scale", _ANY, 0.0)
        if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
            raise said.refusal("attention.scale", scale, f"{head_dim**-0.5:g}")
    same = {"attention.value_length": _one_of(head_dim), "embedding_length_out": _one_of(hidden)}
    said.check_left({**_NEUTRAL, **same, **row.kinds})
    values |= {tensor: _vector(files, tensor, is_right) for tensor, is_right in row.vectors.items()}
    return fields | row.more(values)


def _vector(files: GgufFiles, name: str, is_right: Callable[[float], bool]) -> list[float]:
    """The numbers of a small tensor; none where there is no such tensor."""
    ref = files.tensors.get(name)
    if ref is None:
        return []
    with reading(ref.path, CheckpointError) as file:
        raw = os.pread(file.fileno(), min(ref.nbytes, _VECTOR_NBYTES), ref.offset)
    numbers: list[float] = np.frombuffer(raw, "<f4").tolist() if ref.dtype == "F32" and len(raw) == ref.nbytes else []
    if len(ref.shape) != 1 or not numbers or not all(map(is_right, numbers)):
        raise CheckpointError(f"{files.path}: tensor {name}: {ref.dtype} {list(ref.shape)}: not what such a model has")
    return numbers


def _is_by_sigmoid(files: GgufFiles, name: str) -> bool:
    """Files that do not say it have a bias of each expert where they are."""
    gating = files.metadata.get(f"{name}.expert_gating_func", 0)
    return gating == 2 or (gating == 0 and any(one.endswith(".exp_probs_b.bias") for one in files.tensors))


def _rope_of(said: _Metadata, row: Architecture, values: Values) -> Values:
    """The config's rope_parameters: llama.cpp's rules, in transformers' words."""
    head_dim: Any = values.get("rope.dimension_count", values["attention.key_length"])
    base = said.take("rope.freq_base", _BASE, 10000.0)
    rope: Values = {"rope_type": "default", "rope_theta": base}
    num_dims = said.take("rope.dimension_count", _SIZE, head_dim)
    if num_dims % 2 or num_dims > head_dim or (num_dims < head_dim and not row.has_partial_rope):
        part = ", or below it" if row.has_partial_rope else ""
        raise said.refusal("rope.dimension_count", num_dims, f"even, and {head_dim}, the width of a head{part}")
    if num_dims < head_dim or row.has_partial_rope:
        rope["partial_rotary_factor"] = num_dims / head_dim
        if int(head_dim * rope["partial_rotary_factor"]) != num_dims:  # so transformers computes it
            raise said.refusal("rope.dimension_count", num_dims, "a number that transformers makes of its share")
    said.take("rope.freq_base_swa", _one_of(base), base)
    said.take("rope.dimension_count_swa", _one_of(num_dims), num_dims)
    said.take("rope.dimension_sections", row.kinds.get("rope.dimension_sections", _ZEROS), 0)
    is_unsaid = len(row.scalings) > 1
    scaling = said.take("rope.scaling.type", _one_of(*row.scalings), "linear" if is_unsaid else None)
    old = said.take("rope.scale_linear", _ANY, 1.0)
    factor = said.take("rope.scaling.factor", _NUMBER, (old or 1.0) if is_unsaid else None)
    attention = said.take("rope.scaling.attn_factor", _NUMBER, 1.0)
    original = said.take("rope.scaling.original_context_length", _SIZE, values["context_length"])
    beta_fast = said.take("rope.scaling.yarn_beta_fast", _NUMBER, 32.0)
    beta_slow = said.take("rope.scaling.yarn_beta_slow", _NUMBER, 1.0)
    mixing = said.take("rope.scaling.yarn_ext_factor", _ANY, -1.0)
    if mixing >= 0 and mixing != (scaling == "yarn"):
        raise said.refusal("rope.scaling.yarn_ext_factor", mixing, f"{float(scaling == 'yarn')} with {scaling!r}")
    if scaling != "yarn" and attention != 1:
        raise said.refusal("rope.scaling.attn_factor", attention, f"1.0 with {scaling!r}")
    if scaling == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor, **row.rope}
    elif scaling == "yarn":
        turn, octaves = original / (2 * math.pi), 2 * math.log(base)
        first = math.floor(num_dims * math.log(turn / beta_fast) / octaves)
        last = math.ceil(num_dims * math.log(turn / beta_slow) / octaves)
        if not max(0, first) < min(num_dims - 1, last):  # llama.cpp and transformers go apart
            accepted = "longer than a turn of some dimensions"
            raise said.refusal("rope.scaling.original_context_length", original, accepted)
        scale: Values = {}
        if "rope.scaling.yarn_log_multiplier" in values:
            multiplier = values["rope.scaling.yarn_log_multiplier"]
            if not multiplier:
                raise said.refusal("rope.scaling.yarn_log_multiplier", multiplier, f"above 0 with {scaling!r}")
            if attention != 1:
                raise said.refusal("rope.scaling.attn_factor", attention, "1.0")
            scale = dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier)  # the converter writes a tenth
        elif attention != 1:
            scale = {"attention_factor": attention * (1 + 0.1 * math.log(max(1.0, factor)))}
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            **scale,
            **row.rope,
        }
    return rope

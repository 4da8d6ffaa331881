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
from expertly.formats import extension
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
_FLAGS = _Kind(f"{_FLAG.accepted}, for each layer", lambda value: value in (0, 1), is_by_layer=True)


def _one_of(*values: Any) -> _Kind:
    return _Kind(" or ".join(map(repr, values)), lambda value: isinstance(value, int | float | str) and value in values)


_ZEROS = _Kind(
    "zeros",
    lambda value: value == 0 or (isinstance(value, GgufList) and not value.is_text and not value.numbers().any()),
)
_SECTIONS = _Kind(
    "numbers, the fourth 0",
    lambda value: isinstance(value, GgufList) and not value.is_text and not value.numbers()[3:].any(),
)
"""Of a text, whose positions are the same in all sections but the fourth, a rope in sections is one that is not."""


class _Key(NamedTuple):
    """In a row what differs from _KEYS; a key that is not there must be there, and is no field by itself."""

    fields: str | None = None  # of configs: the first that a class has is this key's; "": see `more`
    kind: _Kind | Callable[[Values], _Kind] | None = None
    default: Any = ...  # llama.cpp's, or a function of the values before it; None: the key must be there


_KEYS: dict[str, _Key] = {
    "context_length": _Key("max_position_embeddings model_max_length", _SIZE, None),
    "block_count": _Key("num_hidden_layers", _SIZE, None),
    "embedding_length": _Key("hidden_size", _SIZE, None),
    "attention.head_count": _Key("num_attention_heads", _SIZE, None),
    "attention.head_count_kv": _Key("num_key_value_heads", _SIZE, lambda said: said["attention.head_count"]),
    "attention.key_length": _Key("head_dim", _SIZE, lambda said: _head_dim(said)),
    "attention.layer_norm_rms_epsilon": _Key("rms_norm_eps norm_eps", _SHARE, None),
    "expert_count": _Key("num_experts num_local_experts n_routed_experts moe_num_experts", _SIZE, None),
    "expert_used_count": _Key("num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts", _SIZE, None),
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


def _expert_width(said: Values) -> int | None:
    """Where a file says no width of its experts."""
    width = said["feed_forward_length"]
    return None if isinstance(width, list) else max(1, width // said["expert_used_count"])


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
STEPS = {
    "ssm_a": TensorStep(lambda config, tensor: tensor.neg().log()),
    "ssm_norm.weight": TensorStep(lambda config, tensor: tensor.flatten()),  # of groups
}
"""Of all architectures that have such tensors, but for those in their rows."""
_CONVOLUTIONS = "ssm_conv1d_q.weight ssm_conv1d_k.weight ssm_conv1d_v.weight"


def _by_key_head(config: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of queries, keys, values and gates, together for each key head."""
    keys, widths = config.linear_num_key_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
    values = config.linear_num_value_heads // keys
    parts = tensor.split([keys * widths[0]] * 2 + [keys * values * widths[1]] * 2)
    return torch.cat([part.unflatten(0, (keys, -1)) for part in parts], dim=1).flatten(0, 1)


def _value_heads(width: str = "", dim: int = 0, is_log: bool = False) -> TensorStep:
    """Value heads, which may stand behind queries and keys, come in turns, one of each key head; in transformers those
    of a key head stand together. `width`: the config's field with the numbers of a head, else 1.
    """

    def undo(config: Any, tensor: torch.Tensor) -> torch.Tensor:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        size = values * (getattr(config, width) if width else 1)
        before, moved = tensor.split((tensor.shape[dim] - size, size), dim)
        moved = moved.unflatten(dim, (values // keys, keys, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        made = torch.cat((before, moved), dim)
        return made.neg().log() if is_log else made

    return TensorStep(undo, is_of_rows=dim == 0 and not is_log)


_VALUE_WIDTH = "linear_value_head_dim"
_VALUE_HEADS = {
    **dict.fromkeys(("attn_qkv.weight", "ssm_conv1d.weight", "attn_gate.weight"), _value_heads(_VALUE_WIDTH)),
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
    keys: Mapping[str, _Key | _Kind] = field(default_factory=dict)  # unlike _KEYS and _NEUTRAL
    vectors: Mapping[str, Callable[[float], bool]] = field(default_factory=dict)  # tensors that `more` needs
    fixed: Values = field(default_factory=dict)  # fields that llama.cpp has in its code
    has: Mapping[str, str] = field(default_factory=dict)  # beside _HAS
    more: Callable[[Values], Values] = lambda said: {}  # further fields
    parameters: Mapping[str, str] = field(default_factory=dict)  # tensors by a parameter's name, beside the package's
    steps: Mapping[str, TensorStep] = field(default_factory=dict)  # by tensors of a layer, in the step's order
    rope: Values = field(default_factory=dict)  # of the config's rope_parameters, where they are scaled
    scalings: tuple[str, ...] = ("none", "linear", "yarn")  # rope.scaling.type; where it is one, it must be there
    has_partial_rope: bool = False
    by_sigmoid: Architecture | None = None  # instead, where experts are chosen by sigmoid
    pre: tuple[str, ...] = ()  # how its text is split into words, where transformers knows it by its class
    tokenizer: str = "PreTrainedTokenizerFast"  # transformers' class
    joined: bool = False  # whether queries, keys and values are one tensor
    named_as: str = ""  # the architecture whose tensors' names it has, where the package gguf does not know it

    def kind(self, key: str, usual: _Kind) -> _Kind:
        changed = self.keys.get(key, usual)
        return changed if isinstance(changed, _Kind) else usual


_BIAS = {"attention_bias": "attn_q.bias"}
_HAS = {
    "conv_bias": "shortconv.conv.bias",
    "lm_head_bias": "output.bias",
    "mamba_conv_bias": "ssm_conv1d.bias",
    "mamba_proj_bias": "ssm_in.bias",
    "use_conv_bias": "ssm_conv1d.bias",
    "use_expert_bias": "exp_probs_b.bias",
    "use_qk_norm": "attn_q_norm.weight",
}
"""Fields that say whether layers have a tensor of this name."""


def _as(key: str) -> Callable[[Values], Any]:
    """The default that is another key's value."""
    return lambda said: said[key]


_SOFTMAX, _SIGMOID, _BY_SIGMOID = ({"expert_gating_func": _one_of(*values)} for values in ((0, 1), (0, 2), (2,)))
_ALWAYS_NORMED = {"expert_weights_norm": _one_of(True)}
_NORMED_UNSAID = {"expert_weights_norm": _Key(default=True)}
_SHARED_WIDTHS = dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), _COUNT)
"""Where the tensors' shapes say it."""
_HEADS_BY_LAYER = {"attention.head_count_kv": _Key("", _COUNTS)}


def _types(is_other: list[Any], other: str, said: Values) -> list[str]:
    """The config's layer_types."""
    return [other if each else "full_attention" for each in is_other[: said["block_count"]]]


def _types_without_heads(said: Values, other: str) -> Values:
    """Of layers without heads, which are another kind."""
    heads = said["attention.head_count_kv"]
    return {"num_key_value_heads": max(heads), "layer_types": _types([not each for each in heads], other, said)}


def _mlp_types(said: Values) -> Values:
    dense, layers = said["leading_dense_block_count"], said["block_count"]
    return {"mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)]}


_LATENT: dict[str, _Key | _Kind] = {
    "attention.head_count_kv": _Key("", _SIZE),
    "attention.key_length": _Key("", _SIZE),
    "attention.value_length": _Key("", _SIZE, _as("attention.key_length")),
    "attention.q_lora_rank": _Key("", _COUNT, 0),
    "attention.kv_lora_rank": _Key("kv_lora_rank", _SIZE),
    "attention.key_length_mla": _Key("", _SIZE, _as("attention.key_length")),
    "attention.value_length_mla": _Key("v_head_dim", _SIZE, _as("attention.value_length")),
    "rope.dimension_count": _Key("qk_rope_head_dim", _SIZE),
    "rope.scaling.yarn_log_multiplier": _Key("", _NOT_BELOW_0, 0.0),
}
"""Of a file with `attn_k_b`, whose lengths without `_mla` are those of one head that all share. Older ones have
`attn_kv_b`, and a head's own lengths.
"""
_LATENT_TENSORS: dict[str, Any] = {
    "parameters": {"kv_b_proj.weight": "attn_k_b.weight attn_v_b.weight"},
    "steps": {"attn_k_b.weight attn_v_b.weight": TensorStep(_latent)},
}


def _latent_fields(said: Values) -> Values:
    groups = said["expert_group_count"]
    return {
        "num_key_value_heads": said["attention.head_count"],
        "q_lora_rank": said["attention.q_lora_rank"] or None,
        "qk_nope_head_dim": said["attention.key_length_mla"] - said["rope.dimension_count"],
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }


_TENTH = _Kind("0.1", lambda value: _is_number(value) and math.isclose(value, 0.1, rel_tol=1e-6))


def _mistral4(said: Values) -> Values:
    scale = {"llama_4_scaling_beta": said["attention.temperature_scale"]}
    return _latent_fields(said) | {"rope_parameters": said["rope_parameters"] | scale}


def _ssm(kernel: str, state: str, groups: str, heads: str) -> dict[str, _Key | _Kind]:
    """Fields of state spaces; "": there is none, or `more` makes it."""
    named = {"conv_kernel": kernel, "state_size": state, "group_count": groups, "time_step_rank": heads}
    keys: dict[str, _Key | _Kind] = {f"ssm.{key}": _Key(to, _SIZE) for key, to in named.items() if to}
    return keys | {"ssm.inner_size": _Key("", _SIZE)}


_LINEAR_ATTENTION: dict[str, Any] = {
    "keys": {
        **_ssm("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        **_NORMED_UNSAID,
        "full_attention_interval": _Key("", _SIZE, 4),
        "attention.recurrent_layers": _Key(
            "",
            _FLAGS,
            lambda said: [bool((i + 1) % said["full_attention_interval"]) for i in range(said["block_count"])],
        ),
    },
    "more": lambda said: {
        "linear_value_head_dim": said["ssm.inner_size"] // said["ssm.time_step_rank"],
        "layer_types": _types(said["attention.recurrent_layers"], "linear_attention", said),
    },
    "has_partial_rope": True,
    "tokenizer": "Qwen2Tokenizer",
}
_WINDOW: dict[str, _Key | _Kind] = {
    "attention.sliding_window": _Key("sliding_window", _SIZE),
    "attention.sliding_window_pattern": _Key(
        "", _FLAGS, lambda said: [bool((layer + 1) % 4) for layer in range(said["block_count"])]
    ),
}


def _window_types(said: Values) -> Values:
    return {"layer_types": _types(said["attention.sliding_window_pattern"], "sliding_attention", said)}


_GRANITE: dict[str, _Key | _Kind] = {
    "attention.scale": _Key("attention_multiplier", _NOT_BELOW_0, lambda said: said["attention.key_length"] ** -0.5),
    "embedding_scale": _Key("embedding_multiplier", _NOT_BELOW_0, 1.0),
    "residual_scale": _Key("residual_multiplier", _NOT_BELOW_0, 1.0),
    "logit_scale": _Key("logits_scaling", _NUMBER),
}
_GRANITE_TENSORS: dict[str, Any] = {
    "parameters": {
        "router.weight": "ffn_gate_inp.weight",
        "shared_mlp.input_linear.weight": "ffn_gate_shexp.weight ffn_up_shexp.weight",
    },
    "steps": _PAIRED,
}


def _hybrid_granite(said: Values) -> Values:
    return {
        **_types_without_heads(said, "linear_attention"),
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
        **_window_types(said),
        "global_head_dim": said["attention.key_length"],
        "head_dim": said["attention.key_length_swa"],
        "num_key_value_heads": min(slid or full),
        "num_global_key_value_heads": min(full or slid),
        "final_logit_softcapping": said["final_logit_softcapping"] or None,
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


def _mimo2(said: Values) -> Values:
    slides, heads = said["attention.sliding_window_pattern"], said["attention.head_count_kv"]
    share = (said["rope.dimension_count"] + 0.5) / said["attention.key_length"]  # of which transformers cuts the rest
    ropes = {"full_attention": said["rope.freq_base"], "sliding_attention": said["rope.freq_base_swa"]}
    sparse = {*said["layers"].get("ffn_gate_inp.weight", ())}
    return {
        **_window_types(said),
        "num_key_value_heads": min(each // 2 if slid else each for each, slid in zip(heads, slides, strict=True)),
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(said["block_count"])],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
            for kind, base in ropes.items()
        },
    }


ARCHITECTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        keys={
            "expert_shared_count": _one_of(0, 1),
            "expert_shared_feed_forward_length": _Key(default=_as("feed_forward_length")),
        },
        pre=("qwen2",),
        tokenizer="Qwen2Tokenizer",
    ),
    "qwen3moe": Architecture("qwen3_moe", keys=_NORMED_UNSAID, pre=("qwen2",), tokenizer="Qwen2Tokenizer"),
    "gpt-oss": Architecture(
        "gpt_oss",
        keys={
            "attention.sliding_window": _Key("sliding_window", _SIZE),
            "attention.sliding_window_pattern": _one_of(2),
            "expert_gating_func": _one_of(0, 3),  # softmax of the chosen ones
        },
        rope={"truncate": False},
        scalings=("yarn",),
        pre=("gpt-4o",),
    ),
    "minimax-m2": Architecture(
        "minimax_m2", keys=_SIGMOID | _ALWAYS_NORMED, has_partial_rope=True, pre=("minimax-m2",)
    ),
    "llama": Architecture("mixtral", keys=_ALWAYS_NORMED, steps=_PAIRED),
    "olmoe": Architecture("olmoe"),
    "deepseek2": Architecture(
        "deepseek_v2",
        keys=_LATENT | _SOFTMAX | {"expert_weights_norm": _one_of(False)},
        more=_latent_fields,
        **_LATENT_TENSORS,
        by_sigmoid=Architecture("deepseek_v3", keys=_LATENT | _SIGMOID, more=_latent_fields, **_LATENT_TENSORS),
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        keys=_LATENT
        | _SIGMOID
        | {
            "attention.indexer.head_count": _Key("index_n_heads", _SIZE),
            "attention.indexer.key_length": _Key("index_head_dim", _SIZE),
            "attention.indexer.top_k": _Key("index_topk", _SIZE),
        },
        more=lambda source: _latent_fields(source) | _mlp_types(source),
        **_LATENT_TENSORS,
    ),
    "mistral4": Architecture(
        "mistral4",
        keys=_LATENT
        | _SOFTMAX
        | {
            "rope.scaling.original_context_length": _Key("", _SIZE),
            "rope.scaling.yarn_log_multiplier": _Key("", _TENTH),
            "attention.temperature_scale": _Key("", _NOT_BELOW_0, 0.0),
            "attention.temperature_length": _Key(
                "",
                lambda said: _one_of(said["rope.scaling.original_context_length"]),
                _as("rope.scaling.original_context_length"),
            ),
        },
        fixed={"architectures": ["Mistral4ForCausalLM"]},  # not in the map of language models
        more=_mistral4,
        scalings=("yarn",),
        **_LATENT_TENSORS,
    ),
    "glm4moe": Architecture("glm4_moe", keys=_SIGMOID, has=_BIAS, has_partial_rope=True),
    "phimoe": Architecture("phimoe", has=_BIAS),
    "granitemoe": Architecture("granitemoeshared", keys=_GRANITE, has=_BIAS, **_GRANITE_TENSORS),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        keys=_GRANITE
        | _HEADS_BY_LAYER
        | _ssm("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")
        | {"rope.scaling.finetuned": _Key("", _FLAG, True)},
        has=_BIAS,
        more=_hybrid_granite,
        **_GRANITE_TENSORS,
    ),
    "jamba": Architecture(
        "jamba",
        keys=_HEADS_BY_LAYER | _ssm("mamba_d_conv", "mamba_d_state", "", "mamba_dt_rank"),
        more=_jamba,
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        keys=_SIGMOID
        | _HEADS_BY_LAYER
        | {
            "feed_forward_length": _Key("", _COUNTS),
            "attention.layer_norm_epsilon": _Key("layer_norm_epsilon", _SHARE),
            "attention.layer_norm_rms_epsilon": _Key("", _Kind("missing", lambda value: value is None)),
        }
        | _ssm("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads"),
        has=_BIAS | {"use_bias": "ssm_in.bias"},
        more=_nemotron,
        steps=_PAIRED,  # the converter knows no attention without a rope
        has_partial_rope=True,
    ),
    "dots1": Architecture("dots1", keys=_SIGMOID, fixed={"sliding_window": None}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        keys={"interleave_moe_layer_step": _Key("moe_layer_interval", _SIZE, 1), **_SHARED_WIDTHS},
        has={"use_bias": "attn_q.bias"},
        more=lambda said: {"moe_layer_end_index": said["block_count"] - 1},
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", keys=_SHARED_WIDTHS, has=_BIAS),
    "lfm2moe": Architecture(
        "lfm2_moe",
        keys=_BY_SIGMOID
        | _HEADS_BY_LAYER
        | {
            "shortconv.l_cache": _Key("conv_L_cache", _SIZE),
            "expert_weights_norm": _Key(kind=_one_of(True), default=True),
        },
        more=lambda said: _types_without_heads(said, "conv"),
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        parameters={"in_proj_qkvz.weight": "attn_qkv.weight attn_gate.weight"},
        steps={**_LESS_ONE, "attn_qkv.weight attn_gate.weight": TensorStep(_by_key_head, is_of_rows=True)},
        **_LINEAR_ATTENTION,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        steps=_LESS_ONE | _VALUE_HEADS,
        **_LINEAR_ATTENTION
        | {
            "keys": _LINEAR_ATTENTION["keys"]
            | {"feed_forward_length": _Key("", _COUNT), "rope.dimension_sections": _SECTIONS}
        },
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        keys=_WINDOW | _SHARED_WIDTHS | _BY_SIGMOID,
        more=lambda said: _window_types(said) | _mlp_types(said),
    ),
    "afmoe": Architecture(
        "afmoe",
        keys=_WINDOW | _SIGMOID | {"expert_weights_norm": _Key("", _one_of(True), None)},
        fixed={"mup_enabled": True},
        more=_window_types,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        keys=_HEADS_BY_LAYER
        | {"attention.key_length": _Key(""), "attention.key_length_swa": _Key("", _SIZE)}
        | {
            key: _Key("", lambda said: _one_of(said["attention.key_length_swa"]), _as("attention.key_length_swa"))
            for key in ("attention.value_length_swa", "rope.dimension_count_swa")
        }
        | {
            "attention.sliding_window": _Key("sliding_window", _SIZE),
            "attention.sliding_window_pattern": _Key("", _FLAGS),
            "attention.shared_kv_layers": _Key("num_kv_shared_layers", _COUNT, 0),
            "embedding_length_per_layer_input": _Key("hidden_size_per_layer_input", _COUNT, 0),
            "final_logit_softcapping": _Key("", _NOT_BELOW_0, 0.0),
            "rope.freq_base": _Key("", _BASE, 10000.0),
            "rope.freq_base_swa": _Key("", _BASE, 10000.0),
        },
        fixed={"enable_moe_block": True},
        vectors={"rope_freqs.weight": lambda value: value == 1 or value > _NEVER_TURNED},
        more=_gemma4,
        parameters={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
        tokenizer="GemmaTokenizer",
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        keys=_LATENT
        | _HEADS_BY_LAYER
        | _BY_SIGMOID
        | {
            "expert_weights_norm": _Key(kind=_one_of(True), default=True),
            "ssm.conv_kernel": _Key("linear_conv_kernel_dim", _SIZE),
            "kda.head_dim": _Key("linear_head_dim", _SIZE),
            "leading_dense_block_count": _Key(""),
        },
        more=lambda said: {
            **_types_without_heads(said, "linear_attention"),
            **_latent_fields(said),
            **_mlp_types(said),
            "linear_num_heads": said["attention.head_count"],
        },
        parameters={**_LATENT_TENSORS["parameters"], "self_attn.conv1d.weight": _CONVOLUTIONS},
        steps={
            **_LATENT_TENSORS["steps"],
            _CONVOLUTIONS: TensorStep(lambda config, *tensors: torch.cat([each.flatten(0, -2) for each in tensors])),
        },
    ),
    "llama4": Architecture(
        "llama4_text",
        keys=_SIGMOID | {"interleave_moe_layer_step": _Key("interleave_moe_layer_step", _SIZE)},
        more=lambda said: {"use_qk_norm": said["expert_count"] != 128},  # as llama.cpp tells Scout and Maverick apart
        pre=("llama4", "gpt-4o"),
    ),
    "bailingmoe2": Architecture(
        "glm4_moe",  # which computes the same
        keys=_BY_SIGMOID | {"expert_shared_feed_forward_length": _COUNT},
        has_partial_rope=True,
        joined=True,
        named_as="dots1",  # which has names for the parts of what is joined
    ),
    "mimo2": Architecture(
        "mimo_v2_flash",
        keys=_SIGMOID
        | _HEADS_BY_LAYER
        | {
            "attention.sliding_window": _Key("sliding_window", _SIZE),
            "attention.sliding_window_pattern": _Key("", _FLAGS, None),
            "attention.value_length": _Key("v_head_dim", _SIZE, _as("attention.key_length")),
            "attention.value_scale": _Key("attention_value_scale", _NUMBER, 1.0),
            "expert_weights_norm": _Key(kind=_one_of(True), default=True),
            "rope.dimension_count": _Key("", _SIZE, _as("attention.key_length")),
            "rope.freq_base": _Key("", _BASE, 10000.0),
            "rope.freq_base_swa": _Key("", _BASE, 10000.0),
        },
        more=_mimo2,
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe",  # as it is where there is only text
        keys=_NORMED_UNSAID | {"rope.dimension_sections": _SECTIONS, "n_deepstack_layers": _COUNT},
        tokenizer="Qwen2Tokenizer",
    ),
}
"""By GGUF's name of an architecture."""


def architecture_of(name: object) -> Architecture | None:
    """The row of that name, here or an `extension`; None where this transformers has no model of it, or the package
    gguf no names of tensors.
    """
    import gguf

    row: Any = ARCHITECTURES.get(name) or extension(name) if isinstance(name, str) else None
    is_named = isinstance(row, Architecture) and (row.named_as or name) in gguf.MODEL_ARCH_NAMES.values()
    return row if is_named and row.model_type in CONFIG_MAPPING else None


def known_architectures() -> list[str]:
    return [name for name in ARCHITECTURES if architecture_of(name) is not None]


# -- a config of metadata ----------------------------------------------------------------------------------------------


_VECTOR_NBYTES = 1 << 16


class _Metadata:
    """The values of an architecture's keys; each is taken once, and none may be left."""

    def __init__(self, files: GgufFiles, architecture: str) -> None:
        self.path, self._prefix = files.path, f"{architecture}."
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
        return CheckpointError(f"{self.path}: {self._prefix}{key}={value!r:.80}: must be {accepted}")

    def check_left(self, neutral: Mapping[str, _Kind]) -> None:
        """Raises UnsupportedModelError for a key that is not neutral, as its value may change what is computed."""
        for key, value in self._left.items():
            problem = "a key that is not supported, which may change what the model computes"
            if key in neutral:
                problem = f"not supported; accepted: {neutral[key].accepted}"
            if key not in neutral or not neutral[key].is_right(value):
                raise UnsupportedModelError(f"{self.path}: {self._prefix}{key:.80}={value!r:.80}: {problem}")


def fields_of(files: GgufFiles, name: str, num_rows: int) -> Values:
    """The config's fields, with llama.cpp's defaults; `num_rows`: of the embeddings. Raises CheckpointError."""
    row, said = architecture_of(name), _Metadata(files, name)
    assert row is not None
    if row.by_sigmoid is not None and _is_by_sigmoid(files, name):
        row = row.by_sigmoid
    with quiet():
        model = CONFIG_MAPPING[row.model_type]()
        known = {*model.to_dict(), *model.attribute_map}
    tails: dict[str, list[int]] = {}
    for tensor in files.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor)
        tails.setdefault(tensor[layer.end() :] if layer else tensor, []).append(int(layer[1]) if layer else 0)
    values: Values = {"layers": {tail: sorted(layers) for tail, layers in tails.items()}}
    has = {**{to: tail for to, tail in _HAS.items() if to in known}, **row.has}
    fields = {"model_type": row.model_type, **{to: tail in tails for to, tail in has.items()}, **row.fixed}
    further = said.take("nextn_predict_layers", _COUNT, 0)  # the last layers predict further tokens
    for key in [*_KEYS, *(key for key, changed in row.keys.items() if key not in _KEYS and isinstance(changed, _Key))]:
        usual, changed = _KEYS.get(key, _Key("", default=None)), row.keys.get(key, _Key())
        changed = _Key(kind=changed) if isinstance(changed, _Kind) else changed
        names = usual.fields or ""
        to = changed.fields
        if to is None:
            to = next((name for name in names.split() if name in known), None)
        if to is None and isinstance(usual.default, int | float):
            continue
        default = usual.default if changed.default is ... else changed.default
        if key == "expert_feed_forward_length" and to == "intermediate_size":
            default = values["feed_forward_length"]  # which is that of experts
        if callable(default):
            default = None if said.says(key) else default(values)
        kind = changed.kind or usual.kind or _ANY
        kind = kind if isinstance(kind, _Kind) else kind(values)
        value = said.take(key, kind, default, values.get("block_count", 0), further)
        values[key] = value if value or value is False else default  # 0 says nothing
        if to != "":
            to = to or names.split()[0]
            fields[model.attribute_map.get(to, to)] = values[key]
    layers, heads, hidden = (values[key] for key in ("block_count", "attention.head_count", "embedding_length"))
    heads_kv = values["attention.head_count_kv"]
    if any(num and heads % num for num in (heads_kv if isinstance(heads_kv, list) else [heads_kv])):
        raise said.refusal("attention.head_count_kv", heads_kv, f"a divisor of {heads} heads")
    if values["expert_used_count"] > values["expert_count"]:
        raise said.refusal("expert_used_count", values["expert_used_count"], f"at most {values['expert_count']}")
    if further >= layers:
        raise said.refusal("nextn_predict_layers", further, f"less than block_count={layers}")
    values["block_count"] = fields["num_hidden_layers"] = layers - further
    fields["vocab_size"] = said.take("vocab_size", _one_of(num_rows), num_rows)
    head_dim = values["attention.key_length"]
    factors = {tensor: vector(files, tensor, _NUMBER.is_right) for tensor in FACTORS if tensor not in row.vectors}
    fields["rope_parameters"] = values["rope_parameters"] = _rope_of(said, row, values, factors)
    if "attention.scale" not in values:
        scale = said.take("attention.scale", _ANY, 0.0)
        if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
            raise said.refusal("attention.scale", scale, f"{head_dim**-0.5:g}")
    same = {"attention.value_length": _one_of(head_dim), "embedding_length_out": _one_of(hidden)}
    said.check_left({**_NEUTRAL, **same, **{key: kind for key, kind in row.keys.items() if isinstance(kind, _Kind)}})
    values |= {tensor: vector(files, tensor, is_right) for tensor, is_right in row.vectors.items()}
    return fields | row.more(values)


def vector(files: GgufFiles, name: str, is_right: Callable[[float], bool]) -> list[float]:
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
    return gating == 2 or (gating == 0 and any(tensor.endswith(".exp_probs_b.bias") for tensor in files.tensors))


FACTORS = dict.fromkeys(("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"))
"""Tensors by whose numbers the angles of a rope's dimensions are divided: of all texts, of short ones, of long ones."""


def _rope_of(said: _Metadata, row: Architecture, values: Values, factors: Mapping[str, list[float]]) -> Values:
    """The config's rope_parameters: llama.cpp's rules, in transformers' words. `factors`: the numbers of FACTORS."""
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
    said.take("rope.dimension_sections", row.kind("rope.dimension_sections", _ZEROS), 0)
    is_unsaid = len(row.scalings) > 1
    of_all, short, long = (factors.get(tensor) or [] for tensor in FACTORS)
    short, long = short or of_all, long or of_all
    scalings, default = row.scalings, "linear" if is_unsaid else None
    if short or long:
        scalings, default = ("longrope", "none"), "longrope"
        if {len(short), len(long)} != {num_dims // 2}:
            problem = f"{len(short)} and {len(long)} factors of short and long texts: must be {num_dims // 2}"
            raise CheckpointError(f"{said.path}: {', '.join(name for name in factors if factors[name])}: {problem}")
    scaling = said.take("rope.scaling.type", _one_of(*scalings), default)
    old = said.take("rope.scale_linear", _ANY, 1.0)
    factor = said.take("rope.scaling.factor", _NUMBER, (old or 1.0) if is_unsaid else None)
    attention = said.take("rope.scaling.attn_factor", _NUMBER, 1.0)
    original = values.get("rope.scaling.original_context_length")
    original = original or said.take("rope.scaling.original_context_length", _SIZE, values["context_length"])
    beta_fast = said.take("rope.scaling.yarn_beta_fast", _NUMBER, 32.0)
    beta_slow = said.take("rope.scaling.yarn_beta_slow", _NUMBER, 1.0)
    mixing = said.take("rope.scaling.yarn_ext_factor", _ANY, -1.0)
    if mixing >= 0 and mixing != (scaling == "yarn"):
        raise said.refusal("rope.scaling.yarn_ext_factor", mixing, f"{float(scaling == 'yarn')} with {scaling!r}")
    if scaling != "yarn" and attention != 1 and not short:
        raise said.refusal("rope.scaling.attn_factor", attention, f"1.0 with {scaling!r}")
    if short:
        if factor != 1:
            raise said.refusal("rope.scaling.factor", factor, "1.0 beside factors in tensors")
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 1.0}
        rope |= dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), attention)
        rope["original_max_position_embeddings"] = original
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

"""A tiny model of each GGUF architecture, as a file with the metadata and tensors that llama.cpp's converter
(convert_hf_to_gguf.py) makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from expertly.model.structure import find_experts
from tests import every_family
from tests.families import VOCAB_SIZE, draw_weights
from tests.formats.gguf_files import WORDS, set_metadata, write_file

Tensors = dict[str, torch.Tensor]
Values = dict[str, Any]

SIZES: Values = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
"""Whole blocks of 32 in most rows."""

USUAL = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
}
"""Metadata, and the fields of configs that it is written from."""

_VOCABULARY = {"model": "gpt2", "pre": "qwen2", "tokens": WORDS, "merges": ["a b"], "eos_token_id": len(WORDS) - 1}
VOCABULARY: Values = {f"tokenizer.ggml.{name}": value for name, value in _VOCABULARY.items()}
"""Metadata of files whose text llama.cpp is to know."""


@dataclass(frozen=True)
class Case:
    """`metadata`: beside the usual, None for what is not written. `tensors`: what is made of a parameter, by the end of
    its name, and GGUF's names of the layer's tensors for it; a text for one that is only renamed. `more`: tensors that
    are no parameters.
    """

    architecture: str
    model_type: str
    fields: Values = field(default_factory=dict)
    metadata: Callable[[Any], Values] = lambda config: {}
    tensors: Mapping[str, str | Callable[[Any, torch.Tensor], Tensors]] = field(default_factory=dict)
    more: Callable[[Any], Tensors] = lambda config: {}
    make: Callable[[Case], PreTrainedModel] | None = None  # of families that are no language model by themselves


def _pairs(name: str, num_heads: str) -> Callable[[Any, torch.Tensor], Tensors]:
    """Halves of a head's rows to pairs: `LlamaModel.permute`."""

    def convert(config: Any, tensor: torch.Tensor) -> Tensors:
        heads, rest = getattr(config, num_heads), tensor.shape[1:]
        return {name: tensor.reshape(heads, 2, len(tensor) // heads // 2, *rest).swapaxes(1, 2).reshape(tensor.shape)}

    return convert


PAIRS = {
    f"{one}_proj.{kind}": _pairs(f"attn_{one}.{kind}", num_heads)
    for one, num_heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for kind in ("weight", "bias")
}


def _latent(config: Any, tensor: torch.Tensor) -> Tensors:
    heads, nope, width = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    keys, values = tensor.view(heads, nope + width, -1).split((nope, width), dim=1)
    return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}


def _latent_metadata(config: Any) -> Values:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
    }


LATENT = {"kv_b_proj.weight": _latent}
LATENT_SIZES: Values = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8}


def _split(*names: str) -> Callable[[Any, torch.Tensor], Tensors]:
    return lambda config, tensor: dict(zip(names, tensor.chunk(len(names)), strict=True))


_GRANITE: dict[str, Any] = {
    "metadata": lambda config: {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.dimension_count": 16,
        **({"expert_shared_feed_forward_length": config.shared_intermediate_size} if _is_shared(config) else {}),
    },
    "tensors": {
        **PAIRS,
        "router.weight": "ffn_gate_inp.weight",
        "shared_mlp.input_linear.weight": _split("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    },
}
_GRANITE_FIELDS: Values = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.25,
    "logits_scaling": 4.0,
}


def _is_shared(config: Any) -> bool:
    return bool(getattr(config, "shared_intermediate_size", 0))


def _partial(share: float) -> Callable[[Any], Values]:
    return lambda config: {"rope.dimension_count": int(16 * share), "expert_gating_func": 2}


def _log(name: str, *shape: int) -> Callable[[Any, torch.Tensor], Tensors]:
    return lambda config, tensor: {name: -torch.exp(tensor).reshape(*shape, *([] if shape else tensor.shape))}


def _plus_one(name: str) -> Callable[[Any, torch.Tensor], Tensors]:
    return lambda config, tensor: {name: tensor + 1}


def _squeezed(name: str) -> Callable[[Any, torch.Tensor], Tensors]:
    return lambda config, tensor: {name: tensor.squeeze()}


PLUS_ONE = {
    "input_layernorm.weight": _plus_one("attn_norm.weight"),
    "post_attention_layernorm.weight": _plus_one("post_attention_norm.weight"),
    "q_norm.weight": _plus_one("attn_q_norm.weight"),
    "k_norm.weight": _plus_one("attn_k_norm.weight"),
    "model.norm.weight": _plus_one("output_norm.weight"),
}


def _linear_metadata(config: Any) -> Values:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": None,
        "rope.dimension_count": 4,
    }


def _qkvz(config: Any, tensor: torch.Tensor) -> Tensors:
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = tensor.view(keys, -1, tensor.shape[1]).split([width, width, values, values], dim=1)
    *of_state, gate = (part.flatten(0, 1) for part in parts)
    return {"attn_qkv.weight": torch.cat(of_state), "attn_gate.weight": gate}


def _tiled(name: str, of_keys: int = 0, width: int = 1, dim: int = 0) -> Callable[[Any, torch.Tensor], Tensors]:
    """`_reorder_v_heads`, of all but `of_keys` rows for each key head."""

    def convert(config: Any, tensor: torch.Tensor) -> Tensors:
        keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        rows = of_keys * keys
        heads = tensor.movedim(dim, 0)[rows:].reshape(keys, per_key, width, -1)
        moved = heads.permute(1, 0, 2, 3).reshape(tensor.movedim(dim, 0)[rows:].shape)
        made = torch.cat((tensor.movedim(dim, 0)[:rows], moved)).movedim(0, dim)
        return {name: -torch.exp(made) if name == "ssm_a" else made.squeeze()}

    return convert


def _windows(config: Any) -> Values:
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
    }


def _ssm(kernel: int, state: int, groups: int | None, heads: int, inner: int) -> Values:
    return {
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": inner,
    }


def _heads_where(kind: str, config: Any, kinds: list[str]) -> list[int]:
    return [config.num_key_value_heads if each == kind else 0 for each in kinds]


def _nemotron_metadata(config: Any) -> Values:
    kinds, heads = config.layers_block_type, config.mamba_num_heads
    return {
        **_ssm(config.conv_kernel, config.ssm_state_size, config.n_groups, heads, heads * config.mamba_head_dim),
        "attention.head_count_kv": _heads_where("full_attention", config, kinds),
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [config.moe_intermediate_size if each == "moe" else 0 for each in kinds],
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "rope.dimension_count": 16,
        "rope.scaling.finetuned": False,
    }


def _mamba2(prefix: str) -> dict[str, str | Callable[[Any, torch.Tensor], Tensors]]:
    return {
        f"{prefix}.A_log": _log("ssm_a", -1, 1),
        f"{prefix}.D": lambda config, tensor: {"ssm_d": tensor.reshape(-1, 1)},
        f"{prefix}.dt_bias": "ssm_dt.bias",
        f"{prefix}.conv1d.weight": _squeezed("ssm_conv1d.weight"),
        f"{prefix}.conv1d.bias": "ssm_conv1d.bias",
        f"{prefix}.in_proj.weight": "ssm_in.weight",
        f"{prefix}.out_proj.weight": "ssm_out.weight",
    }


def _gemma4_metadata(config: Any) -> Values:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        **_windows(config),
        "attention.head_count_kv": [2 if slid else 1 for slid in slides],
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), 16),
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


def _gpt_oss_metadata(config: Any) -> Values:
    rope = config.rope_parameters
    return {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _factors(short: list[float], long: list[float] | None = None, scale: float = 1.0) -> Values:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "original_max_position_embeddings": 24,
        "short_factor": short,
        "long_factor": long or short,
        **dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), scale),
    }


def _latent_case(
    architecture: str, model_type: str, fields: Values | None = None, yarn: Values | None = None, **metadata: Any
) -> Case:
    """`yarn`: what its rope_parameters have beside the usual of YaRN."""
    if yarn is not None:
        usual = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
        fields = {**(fields or {}), "rope_parameters": usual | yarn}
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 24}
        metadata |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
        metadata["rope.scaling.yarn_log_multiplier"] = yarn["mscale"] / 10
    said = lambda config: {**_latent_metadata(config), **metadata}  # noqa: E731
    return Case(architecture, model_type, LATENT_SIZES | (fields or {}), said, LATENT)


_LLAMA_4: Values = {"intermediate_size_mlp": 64, "moe_layers": None, "attention_chunk_size": 8192}


def _llama_4(config: Any) -> Values:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


CASES: dict[str, Case] = {
    "gpt-oss": Case("gpt-oss", "gpt_oss", {"sliding_window": 16}, _gpt_oss_metadata, {"sinks": "attn_sinks.weight"}),
    "mixtral": Case("llama", "mixtral", metadata=lambda config: {"rope.dimension_count": 16}, tensors=PAIRS),
    "olmoe": Case("olmoe", "olmoe", {"num_key_value_heads": 4}, lambda config: {"expert_weights_norm": None}),
    "deepseek v2": _latent_case("deepseek2", "deepseek_v2"),
    "deepseek v2 lite": _latent_case("deepseek2", "deepseek_v2", {"q_lora_rank": None}),
    "deepseek v2, groups": _latent_case(
        "deepseek2", "deepseek_v2", {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}
    ),
    "deepseek v2 as older files have it": Case(
        "deepseek2",
        "deepseek_v2",
        LATENT_SIZES,
        lambda config: {
            **_latent_metadata(config),
            "attention.head_count_kv": 4,
            "attention.key_length": 24,
            "attention.value_length": 16,
            "attention.key_length_mla": None,
            "attention.value_length_mla": None,
        },
    ),
    "deepseek v3": _latent_case("deepseek2", "deepseek_v3", expert_gating_func=2),
    "deepseek v3, yarn": _latent_case(
        "deepseek2", "deepseek_v3", yarn={"mscale": 0.7, "mscale_all_dim": 0.7}, expert_gating_func=2
    ),
    "mistral 4": _latent_case(
        "mistral4",
        "mistral4",
        {"head_dim": 24},
        {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        **{"attention.temperature_scale": 0.5, "attention.temperature_length": 24},
    ),
    "glm 4.7 flash": _latent_case("deepseek2", "glm4_moe_lite", leading_dense_block_count=1),
    "glm 5": _latent_case(
        "glm-dsa",
        "glm_moe_dsa",
        {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", *["sparse"] * 3]}
        | {"index_n_heads": 2, "index_head_dim": 128, "index_topk": 64},
        leading_dense_block_count=1,
        expert_gating_func=2,
        **{"attention.indexer.head_count": 2, "attention.indexer.key_length": 128, "attention.indexer.top_k": 64},
    ),
    "glm 4.5": Case("glm4moe", "glm4_moe", {"use_qk_norm": True, "attention_bias": True}, _partial(0.5)),
    "glm 4.5 air": Case("glm4moe", "glm4_moe", {}, _partial(0.5)),
    "phimoe": Case("phimoe", "phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "granitemoe": Case("granitemoe", "granitemoe", _GRANITE_FIELDS, **_GRANITE),
    "granitemoe, shared": Case(
        "granitemoe", "granitemoeshared", _GRANITE_FIELDS | {"shared_intermediate_size": 64}, **_GRANITE
    ),
    "dots1": Case("dots1", "dots1", {"num_key_value_heads": 4}, metadata=lambda config: {"expert_gating_func": 2}),
    "ernie4_5": Case(
        "ernie4_5-moe",
        "ernie4_5_moe",
        metadata=lambda config: {
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
            "expert_shared_count": config.moe_num_shared_experts,
            "expert_shared_feed_forward_length": config.moe_intermediate_size,
        },
        tensors={"e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "hunyuan": Case(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        metadata=lambda config: {
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 1,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 512,
        },
    ),
    "lfm2": Case(
        "lfm2moe",
        "lfm2_moe",
        metadata=lambda config: {
            "attention.head_count_kv": _heads_where("full_attention", config, config.layer_types),
            "attention.key_length": None,
            "attention.value_length": None,
            "expert_gating_func": 2,
            "expert_weights_norm": None,
            "expert_weights_scale": None,
            "shortconv.l_cache": config.conv_L_cache,
        },
        tensors={"conv.conv.weight": _squeezed("shortconv.conv.weight")},
    ),
    "qwen3next": Case(
        "qwen3next",
        "qwen3_next",
        {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
        _linear_metadata,
        {
            **PLUS_ONE,
            "A_log": _log("ssm_a"),
            "dt_bias": "ssm_dt.bias",
            "conv1d.weight": _squeezed("ssm_conv1d.weight"),
            "in_proj_qkvz.weight": _qkvz,
        },
    ),
    "qwen3.5": Case(
        "qwen35moe",
        "qwen3_5_moe_text",
        {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
        lambda config: {**_linear_metadata(config), "rope.dimension_sections": [1, 1, 0, 0]},
        {
            **PLUS_ONE,
            "A_log": _tiled("ssm_a"),
            "dt_bias": _tiled("ssm_dt.bias"),
            "conv1d.weight": _tiled("ssm_conv1d.weight", 32, 16),
            "in_proj_qkv.weight": _tiled("attn_qkv.weight", 32, 16),
            "in_proj_z.weight": _tiled("attn_gate.weight", 0, 16),
            "in_proj_a.weight": _tiled("ssm_alpha.weight"),
            "in_proj_b.weight": _tiled("ssm_beta.weight"),
            "out_proj.weight": _tiled("ssm_out.weight", 0, 16, 1),
        },
    ),
    "exaone": Case(
        "exaone-moe",
        "exaone_moe",
        metadata=lambda config: {
            **_windows(config),
            "expert_gating_func": 2,
            "expert_shared_feed_forward_length": 32,
            "rope.scaling.type": "none",
        },
    ),
    "afmoe": Case(
        "afmoe",
        "afmoe",
        {"mup_enabled": True, "route_scale": 2.5},
        lambda config: {
            "attention.sliding_window": config.sliding_window,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
        },
    ),
    "granite, hybrid": Case(
        "granitehybrid",
        "granitemoehybrid",
        _GRANITE_FIELDS | {"shared_intermediate_size": 64, "mamba_d_head": 16},
        lambda config: {
            **_GRANITE["metadata"](config),
            **_ssm(4, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads, 128),
            "attention.head_count_kv": _heads_where("full_attention", config, config.layer_types),
            "rope.scaling.finetuned": False,
        },
        {
            **_GRANITE["tensors"],
            **_mamba2("mamba"),
            "mamba.norm.weight": lambda config, tensor: {"ssm_norm.weight": tensor.reshape(config.mamba_n_groups, -1)},
        },
    ),
    "jamba": Case(
        "jamba",
        "jamba",
        metadata=lambda config: {
            **_ssm(config.mamba_d_conv, config.mamba_d_state, None, config.mamba_dt_rank, 128),
            "attention.head_count_kv": [0, 2, 0, 2],
            "rope.freq_base": None,
        },
        tensors={"A_log": _log("ssm_a"), "mamba.D": "ssm_d", "conv1d.weight": _squeezed("ssm_conv1d.weight")},
    ),
    "nemotron": Case(
        "nemotron_h_moe",
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 64,
        },
        _nemotron_metadata,
        {
            **_mamba2("mixer"),
            "mixer.norm.weight": lambda config, tensor: {"ssm_norm.weight": tensor.reshape(config.n_groups, -1)},
            **PAIRS,
            "mixer.v_proj.weight": "attn_v.weight",
            "mixer.o_proj.weight": "attn_output.weight",
            "mixer.gate.weight": "ffn_gate_inp.weight",
            "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
            "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
        },
    ),
    "gemma4": Case(
        "gemma4",
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 1}},
            "final_logit_softcapping": 30.0,
        },
        _gemma4_metadata,
        {
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        },
        more=lambda config: {"rope_freqs.weight": torch.tensor([1.0] * 4 + [1e30] * 12)},
    ),
    "kimi": Case(
        "kimi-linear",
        "kimi_linear",
        {**LATENT_SIZES, "q_lora_rank": None, "linear_head_dim": 16},
        lambda config: {
            **_latent_metadata(config),
            "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
            "expert_gating_func": 2,
            "expert_group_count": config.num_expert_group,
            "expert_weights_norm": None,
            "context_length": config.model_max_length,
            "leading_dense_block_count": 1,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "kda.head_dim": config.linear_head_dim,
        },
        {
            **LATENT,
            "conv1d.weight": lambda config, tensor: {
                f"ssm_conv1d_{one}.weight": part.reshape(1, -1, 1, 4)
                for one, part in zip("qkv", tensor.chunk(3), strict=True)
            },
            "A_log": _log("ssm_a"),
            "dt_bias": "ssm_dt.bias",
            "f_a_proj.weight": "ssm_f_a.weight",
            "f_b_proj.weight": "ssm_f_b.weight",
        },
    ),
    "llama 4": Case(
        "llama4",
        "llama4_text",
        _LLAMA_4 | {"interleave_moe_layer_step": 2},
        lambda config: _llama_4(config) | {"rope.dimension_count": 16},
    ),
    "llama 4, factors": Case(
        "llama4",
        "llama4_text",
        _LLAMA_4 | {"interleave_moe_layer_step": 1, "rope_parameters": _factors([1.0, 1.5, 2, 3, 4, 6, 8, 8])},
        _llama_4,
        more=lambda config: {"rope_freqs.weight": torch.tensor([1.0, 1.5, 2, 3, 4, 6, 8, 8])},
    ),
    "phimoe, long texts": Case(
        "phimoe",
        "phimoe",
        {"rope_parameters": _factors([1.0] * 8, [1.0, 1, 2, 2, 4, 4, 8, 8], 1.25)},
        lambda config: {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 24},
        more=lambda config: {
            "rope_factors_short.weight": torch.ones(8),
            "rope_factors_long.weight": torch.tensor([1.0, 1, 2, 2, 4, 4, 8, 8]),
        },
    ),
    "ling 2": Case(
        "bailingmoe2",
        "glm4_moe",
        {"use_qk_norm": True},
        lambda config: _partial(0.5)(config) | {"rope.scaling.type": "none", "expert_shared_feed_forward_length": 32},
        {f"{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},  # which are joined
    ),
    "mimo": Case(
        "mimo2",
        "mimo_v2_flash",
        {
            "num_key_value_heads": 1,
            "v_head_dim": 32,
            "attention_value_scale": 0.5,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        },
        lambda config: {
            "attention.head_count_kv": [1, 2, 2, 1],
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [0, 1, 1, 0],
            "attention.value_length": 32,
            "attention.value_scale": 0.5,
            "rope.dimension_count": 8,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "expert_gating_func": 2,
            "leading_dense_block_count": None,
            "expert_weights_norm": None,
        },
        {"sinks": "attn_sinks.weight"},
    ),
    "qwen3vl": Case(
        "qwen3vlmoe",
        "qwen3_vl_moe_text",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8},
        lambda config: {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 1},
        make=lambda case: _qwen3_vl(case),
    ),
}


def _qwen3_vl(case: Case) -> PreTrainedModel:
    """The whole model, whose text part is in the file."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = SIZES | case.fields | {"vocab_size": VOCAB_SIZE, "num_experts_per_tok": 2, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Qwen3VLMoeForConditionalGeneration(config)


def make_model(case: Case) -> PreTrainedModel:
    """Its weights are multiples of 1/512, and each 32 of a row begin with 127 of them, so that Q8_0 is exact."""
    small = every_family.make_config(case.model_type)
    fields = small.to_dict() | {key: size for key, size in SIZES.items() if key in small.to_dict()} | case.fields
    fields = {key: value for key, value in fields.items() if key not in ("model_type", "transformers_version")}

    def build() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if case.make is not None:
                return case.make(case)
            return every_family.make(case.model_type, type(small)(**fields))

    model, drawn = build(), build()
    draw_weights(drawn, 1)
    model.load_state_dict(drawn.state_dict())  # and no buffers that are in no checkpoint
    sites = {site.name: site for site in find_experts(model, 4)}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            site = sites.get(name.rpartition(".")[0])
            rows = tensor.mT if site is not None and site.is_transposed and tensor.dim() > 2 else tensor
            if tensor.dim() > 1 and "conv" not in name and rows.shape[-1] % 32 == 0:
                rows.copy_((rows * 512).round().clamp(-127, 127) / 512)
                rows[..., ::32] = 127 / 512
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def write_model(
    path: Path, model: PreTrainedModel, case: Case, kind: str = "F32", metadata: Mapping[str, Any] | None = None
) -> Path:
    """The file of a model; matrices in `kind` where that holds the same numbers. `metadata`: see `set_metadata`."""
    config = model.config.get_text_config()
    fields = config.to_dict() | {alias: getattr(config, name) for alias, name in config.attribute_map.items()}
    fields["num_hidden_layers"] = config.num_hidden_layers
    said = {
        key: next((value for name in names if (value := fields.get(name)) is not None), None)
        for key, names in USUAL.items()
    }
    rope = getattr(config, "rope_parameters", None) or {}
    said |= {"rope.freq_base": rope.get("rope_theta"), "vocab_size": VOCAB_SIZE} | case.metadata(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_tokenizer_model("none")
    set_metadata(writer, case.architecture, {**said, **(metadata or {})})
    for name, tensor in tensors_of(model, case).items():
        _add(writer, name, tensor.contiguous().float().numpy(), kind)
    write_file(writer)
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if kind != "F32" and values.ndim > 1 and values.shape[-1] % 32 == 0:
        blocks = gguf.quants.quantize(values, number)
        if np.array_equal(gguf.quants.dequantize(blocks, number), values):
            writer.add_tensor(name, blocks, raw_dtype=number)
            return
    writer.add_tensor(name, values)


def tensors_of(model: PreTrainedModel, case: Case) -> Tensors:
    """What the converter makes of a model's parameters, by GGUF's names."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers)
    tied = model.all_tied_weights_keys
    sites = {site.name: site for site in find_experts(model, 4)}
    made = case.more(model.config)
    for path, tensor in model.state_dict().items():
        if path in tied or ".visual." in path:
            continue
        name = path.replace(".language_model.", ".")
        match = re.match(r".*\blayers\.(\d+)\.", name)
        prefix = f"blk.{match[1]}." if match else ""
        convert = next((one for end, one in case.tensors.items() if f".{name}".endswith(f".{end}")), None)
        if isinstance(convert, str):
            made[f"{prefix}{convert}"] = tensor
        elif convert is not None:
            made |= {f"{prefix}{one}": part for one, part in convert(model.config.get_text_config(), tensor).items()}
        elif ".experts." in name:
            experts: Any = sites[path.rpartition(".")[0]]
            matrix, is_weight = name.rpartition(".")[2].removesuffix("_bias"), not name.endswith("_bias")
            tensor = tensor.transpose(1, 2) if experts.is_transposed and is_weight else tensor
            parts = {"down_proj": ("down",), "up_proj": ("up",), "gate_up_proj": ("gate", "up")}[matrix]
            is_whole = experts.is_concatenated or not parts[1:]
            split = tensor.chunk(len(parts), dim=1) if is_whole else (tensor[:, 0::2], tensor[:, 1::2])
            names_of = [f"{prefix}ffn_{one}_exps.{'weight' if is_weight else 'bias'}" for one in parts]
            made |= dict(zip(names_of, split, strict=True))
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            made[f"{prefix}exp_probs_b.bias"] = tensor
        else:
            stem, _, end = name.rpartition(".")
            known = names.get_name(stem)
            assert known is not None and end in ("weight", "bias"), f"{name} has no name in GGUF"
            made[f"{known}.{end}"] = tensor
    for name in [name for name in made if name.endswith("attn_q.weight")] if case.architecture == "bailingmoe2" else ():
        parts = [made.pop(name.replace("attn_q", f"attn_{each}")) for each in "qkv"]
        made[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    return made

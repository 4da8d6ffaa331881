"""Every MoE language model that the installed transformers can make, from its own config made small by a rule."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families import VOCAB_SIZE, draw_weights

NUM_LAYERS = 4

SIZES = {
    "(.*_)?vocab_size(_.*)?": VOCAB_SIZE,
    "hidden_size|d_model": 32,
    "num_hidden_layers|n_layers|num_layers": NUM_LAYERS,
    "(swa_)?num_attention_heads|n_heads|num_heads|linear_num_heads|linear_num_value_heads": 4,
    "(swa_)?num_key_value_heads|linear_num_key_heads": 2,
    "((swa|linear|linear_key|linear_value|mamba)_)?head_dim|kv_channels|qk_(nope|rope)_head_dim|v_head_dim": 8,
    "qk_head_dim|(index|indexer)_head_dim": 16,
    "(.*_)?intermediate_size(_mlp)?|.*ffn_hidden_size|router_hidden_size": 16,
    "((num|n)_(local_|routed_)?|moe_num_)experts": 8,
    "num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|n_group|num_expert_group": 2,
    "(n|num|moe_num)_shared_experts?|topk_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    ".*lora_rank|hc_lowrank": 16,
    "(sliding_window|attention_chunk)(_size)?": 16,
    "max_position_embeddings|max_seq_len|model_max_length": 512,
    "(index|indexer)_n_heads": 2,
    "index_topk": 8,
    "(mamba_)?(d_state|dt_rank)|ssm_state_size": 4,
}
"""A config's fields that set the size of a model, by regular expressions, and their values here."""

# fmt: off
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots3_note_text": {"head_dim": 16},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 100, "heads_per_ngram": 2, "split_ngram_parts": 2, "ple_embed_dim": 32,
        "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_kv_heads": 1, "indexer_n_heads": 2,
        "indexer_head_dim": 16, "ple_layer_ids": [1], "eos_token_id": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# fmt: on
"""What the rule cannot know: fields that a family's default leaves out or that hang together."""

_EXPERTS = "Experts$|MoE|Moe[A-Z]|MOE"
"""Names of classes in the modeling file of a family with experts."""


@cache
def families() -> dict[str, type[PreTrainedModel]]:
    """The model of every type whose modeling file has experts. Of a type that wraps another one, the other."""
    found: dict[str, type[PreTrainedModel]] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type not in CONFIG_MAPPING:
            continue
        kind = CONFIG_MAPPING[model_type]
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        model = model[0] if isinstance(model, tuple) else model
        names = vars(importlib.import_module(model.__module__))
        text = kind.sub_configs.get("text_config")
        has_experts = any(isinstance(member, type) and re.search(_EXPERTS, name) for name, member in names.items())
        if has_experts and text not in MODEL_FOR_CAUSAL_LM_MAPPING:
            found[model_type] = model
    return dict(sorted(found.items()))


def make_config(model_type: str) -> PreTrainedConfig:
    """The family's default made small."""
    kind = CONFIG_MAPPING[model_type]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return kind(**(_small(kind().to_dict()) | tokens | MORE.get(model_type, {})))


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that its small one has otherwise. Of lists of layers' kinds, layers of every kind stay."""
    num_layers = next(
        (values[name] for name in values if re.fullmatch("num_hidden_layers|n_layers|num_layers", name)), 0
    )
    of_layers = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == num_layers}
    kept = _one_of_each([repr(kinds) for kinds in zip(*of_layers.values(), strict=True)])
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _small(value) | {"model_type": value["model_type"]}
        elif name in of_layers:
            small[name] = [_sized(name, value[layer]) for layer in kept]
        elif name == "per_layer_config" and value:
            layers = {int(layer): config for layer, config in value.items()}
            small[name] = {str(i): _small(layers[layer]) for i, layer in enumerate(kept) if layer in layers}
        elif (size := _sized(name, value)) != value:
            small[name] = size
    if "kv_lora_rank" in values:  # of latent attention, whose heads have their own keys
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _one_of_each(kinds: list[str]) -> list[int]:
    """NUM_LAYERS layers, the first of every kind among them."""
    first = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    rest = [layer for layer in range(len(kinds)) if layer not in first]
    return sorted((first + rest)[:NUM_LAYERS])


def _sized(name: str, value: Any) -> Any:
    if type(value) is not int or value <= 0:
        return value
    return next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value)


def make_model(model_type: str, seed: int = 1) -> PreTrainedModel:
    """With weights as tests.families draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = families()[model_type](make_config(model_type))
    draw_weights(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()

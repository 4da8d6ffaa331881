"""Every MoE language model that the installed transformers can make, from its own config made small by a rule."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, models
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.families import VOCAB_SIZE, draw_weights

NUM_LAYERS = 4

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
QWEN4_EXP = {
    "ngram_vocab_size_base": 100,
    "heads_per_ngram": 2,
    "split_ngram_parts": 2,
    "ple_embed_dim": 32,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 2,
    "indexer_head_dim": 16,
    "ple_layer_ids": [1],
    "eos_token_id": 2,
}

SIZES = {
    "(.*_)?vocab_size(_.*)?": VOCAB_SIZE,
    "hidden_size|d_model": 32,
    "num_hidden_layers|n_layers|num_layers": NUM_LAYERS,
    "depth|encoder_layers": 2,  # of what sees or hears, which is only loaded
    "out_hidden_size|output_dim|encoder_ffn_dim|projector_(input|output)_dim|projector_hidden_size": 32,
    "downsample_hidden_size": 8,
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
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_ocr2": {"text_config": {
        "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": {"head_dim": 16}, "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {"head_dim": 16},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [16, 8], "rope_parameters": ROPE | {
        "mrope_section": [1, 1, 2],
    }}},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm4v_moe": {
        "text_config": {"rope_parameters": ROPE | {"mrope_section": [1, 0, 1], "partial_rotary_factor": 0.5}},
        "vision_config": {"depth": 1, "image_size": 28},
    },
    "glm5_next": {"text_config": {"index_kpool": 4, "qk_rope_head_dim": 0}},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4_vl": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}},
    "inkling_mm_model": {"vision_config": {"patch_size": 8}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 32}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "llama4_text": {"num_experts_per_tok": 1},
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "longcat_flash": {"zero_expert_num": 4},
    "mistral4": {"head_dim": 16},
    "muse_spark": {"text_config": {"moe_hidden_size": 24},
                   "audio_config": {"out_hidden_size": 32, "hidden_sizes": [8] * 4, "depths": [1] * 4},
                   "out_hidden_size": 64, "projector_hidden_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "video_temporal_patch_size": 2},
    "qwen3_omni_moe_thinker": {
        "audio_config": {"encoder_attention_heads": 4, "num_attention_heads": 4}, "vision_start_token_id": 120,
    },
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    "step3p7": {"text_config": {
        "sliding_window": 16, "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "swiglu_limits": [None, None, 2.0, None],
    }},
    "zaya": {"num_experts_per_tok": 1},
}
# fmt: on
"""What the rule cannot know: fields that a family's default leaves out or that hang together."""

TEXTS = {"kimi_k25": "deepseek_v3", "mistral3": "mistral4", "nemotron_h_omni": "nemotron_h", "lfm2_vl": "lfm2_moe"}
"""Models of images and any text, and the text with experts that they are published with."""

_EXPERTS = "Experts$|MoE|Moe[A-Z]|MOE"
"""Names of classes in the modeling file of a family with experts."""


@cache
def families() -> dict[str, str]:
    """The class of the model of every type whose modeling file has experts: of text, or as it is published, of images
    and text. Read from the sources: to import all that transformers can make takes seconds.
    """
    have_experts = _classes_beside_experts()
    classes: dict[str, str] = {}
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for model_type, name in names.items():
            name = name if isinstance(name, str) else name[0]
            if model_type in CONFIG_MAPPING_NAMES and (name in have_experts or model_type in TEXTS):
                classes[model_type] = name
    return dict(sorted(classes.items()))


def is_wrapper(model_type: str) -> bool:
    """Whether its model takes images or sound, too."""
    kind = CONFIG_MAPPING[model_type]
    return kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and "text_config" in kind.sub_configs


def _classes_beside_experts() -> set[str]:
    found: set[str] = set()
    for path in Path(models.__path__[0]).glob("*/modeling_*.py"):
        names = re.findall(r"^(?:class|def) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if any(re.search(_EXPERTS, name) for name in names):
            found.update(names)
    return found


def make_config(model_type: str) -> PreTrainedConfig:
    """The family's default made small."""
    kind = CONFIG_MAPPING[model_type]
    values = _small(kind().to_dict())
    if model_type in TEXTS:
        text = TEXTS[model_type]
        values["text_config"] = _small(CONFIG_MAPPING[text]().to_dict()) | MORE.get(text, {}) | {"model_type": text}
    of_text = values["text_config"] if kind.sub_configs.get("text_config") else values
    of_text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return kind(**_joined(values, MORE.get(model_type, {})))


def _joined(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    inner = {
        key: _joined(values[key], value)
        for key, value in more.items()
        if isinstance(value, dict) and isinstance(values.get(key), dict)
    }
    return values | more | inner


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


def make(model_type: str, config: PreTrainedConfig) -> PreTrainedModel:
    """As the family initialises it."""
    made: PreTrainedModel = getattr(transformers, families()[model_type])(config)
    return made


def make_model(model_type: str, seed: int = 1, **fields: Any) -> PreTrainedModel:
    """With weights as tests.families draws them; `fields` replace those of its config."""
    config = make_config(model_type)
    config.update(fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(model_type, config)
    draw_weights(model, seed)
    for table in model.buffers():
        if table.dtype == torch.long and table.shape == (VOCAB_SIZE, 2):  # the experts of each token
            table[:, 0], table[:, 1] = torch.arange(VOCAB_SIZE) % 8, torch.arange(VOCAB_SIZE) % 7 // 2 + 4
            table[:, 1] += table[:, 0] == table[:, 1]
            table %= 8
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()

"""The architectures of GGUF files that run, a row each, and the config of transformers that a file's metadata makes.

A row says what is not usual: `_KEYS` has the keys that most architectures share, and a parameter's name is what the
package gguf calls it. What metadata or a tensor means is what llama.cpp computes; what its converter changed in a
tensor, a step undoes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING

from expertly.core.errors import CheckpointError, UnsupportedModelError
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
    """Makes a parameter of its tensors. `is_of_rows`: it moves rows of one tensor and does nothing else."""

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
ROWS = TensorStep(lambda config, *tensors: torch.cat(tensors))

# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the metadata and tensors of one architecture become a model of transformers."""

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)  # of the config, by key, unlike _KEYS; "": see `more`
    kinds: Mapping[str, _Kind] = field(default_factory=dict)  # of keys, unlike _KEYS and _NEUTRAL
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
    pre: tuple[str, ...] = ("qwen2",)  # how its text is split into words, the usual one first
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


_DEEPSEEK = ("deepseek-llm", "deepseek-v3", "kimi-k2", "glm4")

ARCHITECTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        kinds={"expert_shared_count": _one_of(0, 1)},
        defaults={"expert_shared_feed_forward_length": lambda said: said["feed_forward_length"]},
        tokenizer="Qwen2Tokenizer",
    ),
    "qwen3moe": Architecture("qwen3_moe", defaults={"expert_weights_norm": True}, tokenizer="Qwen2Tokenizer"),
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
    "llama": Architecture("mixtral", kinds=_ALWAYS_NORMED, steps=_PAIRED, pre=("llama-bpe",)),
    "olmoe": Architecture("olmoe", pre=("olmo",)),
    "deepseek2": Architecture(
        "deepseek_v2",
        kinds=_LATENT_KINDS | _SOFTMAX | {"expert_weights_norm": _one_of(False)},
        more=_latent_fields,
        **_LATENT_ATTENTION,
        pre=_DEEPSEEK,
        by_sigmoid=Architecture(
            "deepseek_v3", kinds=_LATENT_KINDS | _SIGMOID, more=_latent_fields, **_LATENT_ATTENTION
        ),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        kinds=_SIGMOID,
        has={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        has_partial_rope=True,
        pre=("glm4",),
    ),
    "phimoe": Architecture("phimoe", has={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"}),
    "granitemoe": Architecture(
        "granitemoeshared",
        fields={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        kinds=dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale"), _NOT_BELOW_0)
        | {"logit_scale": _NUMBER},
        defaults={
            "attention.scale": lambda said: said["attention.key_length"] ** -0.5,
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
        },
        has={"attention_bias": "attn_q.bias"},
        parameters={
            "router.weight": "ffn_gate_inp.weight",
            "shared_mlp.input_linear.weight": "ffn_gate_shexp.weight ffn_up_shexp.weight",
        },
        steps=_PAIRED,
    ),
    "dots1": Architecture("dots1", kinds=_SIGMOID, fixed={"sliding_window": None}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        fields={"interleave_moe_layer_step": "moe_layer_interval"},
        kinds={"interleave_moe_layer_step": _SIZE, **_SHARED_WIDTHS},
        defaults={"interleave_moe_layer_step": 1},
        has={"use_bias": "attn_q.bias"},
        more=lambda said: {"moe_layer_end_index": said["block_count"] - 1},
        pre=("default",),
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe", kinds=_SHARED_WIDTHS, has={"attention_bias": "attn_q.bias"}, pre=("hunyuan",)
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


class _Metadata:
    """The values of an architecture's keys; each is taken once, and none may be left."""

    def __init__(self, files: GgufFiles, architecture: str) -> None:
        self._path, self._prefix = files.path, f"{architecture}."
        start = len(self._prefix)
        self._left = {key[start:]: value for key, value in files.metadata.items() if key.startswith(self._prefix)}

    def take(self, key: str, kind: _Kind, default: Any = None, num_layers: int = 0) -> Any:
        """The value, or the default where there is none. Raises CheckpointError where neither is right."""
        value = self._left.pop(key, default)
        if kind.is_by_layer:
            numbers = value.numbers().tolist() if isinstance(value, GgufList) and not value.is_text else value
            values = numbers if isinstance(numbers, list) else [numbers] * num_layers
            if len(values) != num_layers or not all(map(kind.is_right, values)):
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
    values: Values = {}
    tails = {name.split(".", 2)[-1] if name.startswith("blk.") else name for name in files.tensors}
    fields = {"model_type": row.model_type, **row.fixed, **{to: tail in tails for to, tail in row.has.items()}}
    keys = _KEYS | {key: _Key("", _ANY) for key in row.fields if key not in _KEYS}
    for key, (names, kind, default) in keys.items():
        to = row.fields.get(key, next((one for one in names.split() if hasattr(usual, one)), None))
        if to is None and isinstance(default, int | float):
            continue
        default = row.defaults.get(key, default)
        if key == "expert_feed_forward_length" and to == "intermediate_size":
            default = values["feed_forward_length"]  # which is that of experts
        default = default(values) if callable(default) else default
        value = said.take(key, row.kinds.get(key, kind), default, values.get("block_count", 0))
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
    further = said.take("nextn_predict_layers", _COUNT, 0)  # the last layers predict further tokens
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
    return fields | row.more(values)


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

"""Tiny random checkpoints of every tested family, and what the unmodified model does with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 128
HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 16  # of an expert: P may be 1, 2, 4, 8, 16
NUM_EXPERTS = 8
NUM_NEW_TOKENS = 7
"""That tests generate unless they say: each takes as long as a fifth of loading a model."""


@dataclass(frozen=True, eq=False)
class Family:
    """How to make a tiny model of one family; `config` overrides what all families share."""

    model_type: str
    num_moe_layers: int
    top_k: int = 2
    config: dict[str, Any] = field(default_factory=dict)

    def make_config(self) -> PreTrainedConfig:
        shared: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        }
        return AutoConfig.for_model(self.model_type, **(shared | self.config))


def _sizes(num_experts_key: str, top_k_key: str = "num_experts_per_tok", top_k: int = 2, **more: Any) -> dict[str, Any]:
    """Config of a family whose only width is that of experts."""
    return {num_experts_key: NUM_EXPERTS, top_k_key: top_k, "intermediate_size": INTERMEDIATE_SIZE} | more


def _moe(num_experts_key: str = "num_experts", **more: Any) -> dict[str, Any]:
    """Config of a family that has its own width for experts."""
    return _sizes(num_experts_key, **{"moe_intermediate_size": INTERMEDIATE_SIZE, "intermediate_size": 48, **more})


def _deepseek(**more: Any) -> dict[str, Any]:
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
    experts = _moe("n_routed_experts", first_k_dense_replace=1, n_shared_experts=1)
    return experts | {"kv_lora_rank": 16, "q_lora_rank": 16} | heads | more


_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_QWEN3_NEXT = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("mixtral", 3, 2, _sizes("num_local_experts")),
        Family("qwen2_moe", 3, 3, _moe(top_k=3, shared_expert_intermediate_size=24)),
        Family("qwen3_moe", 3, 3, _moe(top_k=3, head_dim=8, norm_topk_prob=True)),
        Family("phimoe", 3, 2, _sizes("num_local_experts")),
        Family("olmoe", 3, 3, _sizes("num_experts", top_k=3, num_key_value_heads=4)),
        Family("deepseek_v2", 2, 2, _deepseek()),
        Family("deepseek_v3", 2, 2, _deepseek(n_group=2, topk_group=1)),
        Family("gpt_oss", 3, 2, _sizes("num_local_experts", head_dim=8, sliding_window=16)),
        Family("glm4_moe", 2, 2, _moe("n_routed_experts", first_k_dense_replace=1, head_dim=8)),
        Family("granitemoe", 3, 2, _sizes("num_local_experts", attention_multiplier=0.25)),
        Family(
            *("ernie4_5_moe", 2, 2),
            _moe("moe_num_experts", top_k_key="moe_k", moe_num_shared_experts=1, moe_layer_start_index=1),
        ),
        Family("dots1", 2, 2, _moe("n_routed_experts", first_k_dense_replace=1, n_shared_experts=1)),
        Family("hunyuan_v1_moe", 3, 2, _sizes("num_experts", "moe_topk", head_dim=8)),
        Family(*("lfm2_moe", 2, 2), _moe(num_dense_layers=1, layer_types=["full_attention", "conv", "full_attention"])),
        Family(
            *("jamba", 2, 2),
            _sizes("num_experts", num_hidden_layers=4, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)
            | _JAMBA,
        ),
        Family(
            *("qwen3_next", 3, 3),
            _moe(top_k=3, shared_expert_intermediate_size=24, head_dim=8, linear_num_value_heads=4, **_QWEN3_NEXT)
            | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        ),
    )
}
"""Every family that must work, by model type."""

_KEPT = ("A_log", "dt_bias", ".D", "norm.weight", "layernorm.weight", "layer_norm.weight")


def make_model(family: Family | str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model: routing varies by token, greedy choices have a margin, biases are not zero."""
    family = FAMILIES[family] if isinstance(family, str) else family
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what is kept below as the family initialises it
        model = AutoModelForCausalLM.from_config(family.make_config(), dtype=torch.float32)
    draw_weights(model, seed)
    generation_config = model.generation_config
    generation_config.eos_token_id = None
    generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if id(tensor) in seen or not tensor.is_floating_point() or name.endswith(_KEPT) or "inv_freq" in name:
                continue
            seen.add(id(tensor))
            if tensor.dim() == 1 or "bias" in name:
                if not name.endswith("weight"):  # a norm whose name says nothing keeps its ones
                    tensor.normal_(0.0, 0.1, generator=generator)
            else:
                tensor.normal_(0.0, _std(name), generator=generator)


def _std(name: str) -> float:
    if name.endswith("classifier.weight"):
        return 0.8
    if any(word in name for word in ("router", "gate.weight", "gate.wg")):
        return 0.4
    if name.endswith((".q.weight", ".k.weight")):
        return 0.2  # T5 attention is not scaled: larger weights amplify rounding beyond what tests allow
    if any(word in name for word in ("embed", "shared.weight", "lm_head")):
        return 0.5
    return 0.3


def fill_with_nan(folder: Path, prefix: str) -> None:
    """The tensors of a checkpoint in one file whose names begin so."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.startswith(prefix):
            weights[name].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def made_once(make: Callable[..., Path]) -> Callable[..., Path]:
    """What makes a checkpoint in the folder among its arguments makes the same one once a process, and copies it:
    making one takes longer than a test of it.
    """

    @cache
    def made(before: int, *values: Any, **options: Any) -> Path:
        folder = Path(tempfile.mkdtemp(dir=_scratch().name), "made")
        return make(*values[:before], folder, *values[before:], **options)

    @wraps(make)
    def copied(*values: Any, **options: Any) -> Path:
        before = next(number for number, value in enumerate(values) if isinstance(value, Path))
        source = made(before, *values[:before], *values[before + 1 :], **options)
        return Path(shutil.copytree(source, values[before], dirs_exist_ok=True))

    return copied


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="expertly-tests-")


@made_once
def make_checkpoint(
    family: Family | str,
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    tokenizer: bool = False,
) -> Path:
    """Save a tiny random model as a checkpoint folder, in the format of the hub; `max_shard_size="20KB"` shards it."""
    model = make_model(family, seed, dtype)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """A tokenizer of single characters that fits `VOCAB_SIZE`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = ["<pad>", "<s>", "</s>", "<unk>", *characters]
    words += [f"<{index}>" for index in range(len(words), VOCAB_SIZE)]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=512,
    )


def make_prompts(num_prompts: int = 1, length: int = 12, seed: int = 0) -> list[list[int]]:
    """Random prompts of different lengths (the first is the longest); no special tokens."""
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        torch.randint(4, VOCAB_SIZE, (max(1, length - 3 * index),), generator=generator).tolist()
        for index in range(num_prompts)
    ]


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask), both [B, S]."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def load_reference(folder: str | Path, **kwargs: Any) -> PreTrainedModel:
    """The unmodified model with transformers' default experts implementation (grouped_mm)."""
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int = NUM_NEW_TOKENS, **kwargs: Any
) -> list[list[int]]:
    """New tokens of each prompt, greedy unless `kwargs` says otherwise; prompts are padded on the left."""
    ids, mask = pad_left(prompts)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens} | kwargs
    with torch.no_grad():
        output = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **settings)
    return output[:, ids.shape[1] :].tolist()


def reference_generate(
    folder: str | Path, prompts: Sequence[Sequence[int]], max_new_tokens: int = NUM_NEW_TOKENS, **kwargs: Any
) -> list[list[int]]:
    """What the unmodified model generates: the expected tokens of a lossless run."""
    return generate(load_reference(folder), prompts, max_new_tokens, **kwargs)


def logits_of(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [B, S, V] of one forward without a cache."""
    ids, mask = pad_left(prompts)
    ids, mask = ids.to(model.device), mask.to(model.device)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

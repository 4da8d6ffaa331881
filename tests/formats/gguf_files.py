"""Tiny models as GGUF files, and transformers' model of one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.families import NUM_EXPERTS, VOCAB_SIZE

_LETTERS = [chr(code) for code in range(33, 127)]
WORDS = [*_LETTERS, "ab", *(f"<{number}>" for number in range(VOCAB_SIZE - len(_LETTERS) - 1))]
"""A vocabulary; its last word is the end of a text."""

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "minimax_m2": "minimax-m2"}

SCALES: dict[str, dict[int, float]] = {
    "Q8_0": {0: 70}, "Q4_0": {0: 4.6}, "Q4_1": {0: 4.6, 2: -0.61}, "Q5_0": {0: 9.2}, "Q5_1": {0: 9.2, 2: -0.59},
    "IQ4_NL": {0: 66}, "Q4_K": {0: 200, 2: 27}, "Q5_K": {0: 400, 2: 27}, "Q6_K": {208: 1350}, "Q2_K": {80: 15, 82: 10},
    "Q3_K": {108: 42}, "IQ4_XS": {0: 1200}, "IQ2_XXS": {0: 66}, "IQ2_XS": {0: 66}, "IQ2_S": {0: 66},
    "IQ3_XXS": {0: 150}, "IQ3_S": {0: 160}, "IQ1_S": {0: 7.5}, "IQ1_M": {0: 7.5}, "TQ1_0": {52: 0.8},
    "TQ2_0": {64: 1.2},
}  # fmt: skip
"""Of a type the places of float16 numbers in a block, and by how much weights are larger. IQ1_M's lies in pieces."""


def gguf_blocks(type_name: str, shape: tuple[int, ...], dice: np.random.Generator, std: float = 0.15) -> Any:
    """Random bytes [..., rows, blocks * nbytes] of a GGUF type whose weights are about `std` large; its python package
    quantises few.
    """
    if type_name == "BF16":
        weights = dice.standard_normal(shape).astype(np.float32) * std
        return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name])
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = dice.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = dice.integers(122, 125, blocks.shape[:-1])
    if type_name == "NVFP4":
        blocks[..., :4] = dice.integers(16, 32, (*blocks.shape[:-1], 4))
    for place, over in SCALES.get(type_name, {}).items():
        numbers = dice.uniform(0.5, 1.5, (*blocks.shape[:-1], 1)) * std / over
        set_scales(blocks, type_name, place, numbers)
    return blocks.reshape(*shape[:-1], -1)


def set_scales(blocks: Any, type_name: str, place: int, numbers: Any) -> None:
    """Put float16 `numbers` [..., 1] into blocks: at a place, or with IQ1_M into the highest bits of four words."""
    if type_name != "IQ1_M":
        blocks[..., place : place + 2] = numbers.astype(np.float16).view(np.uint8)
        return
    nibbles = numbers.astype(np.float16).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
    blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | nibbles.astype(np.uint8) << 4


def make_gguf(
    path: Path,
    inner: str = "Q8_0",
    down: str | None = None,
    dense: str = "Q8_0",
    architecture: str = "qwen3moe",
    hidden: int = 256,
    intermediate: int = 512,
    split: int = 0,
    words: Sequence[str] = (),
    others: Mapping[str, str | None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    more: Mapping[str, tuple[int, ...]] | None = None,
    std: float = 0.15,
) -> Path:
    """A tiny model as llama.cpp has it, its experts in GGUF types, those of down of the last layer in `down`. `split`:
    tensors of a file, whose first is returned. `words`: of its vocabulary. `others`: types of single tensors, None for
    those that are missing. `metadata`: see `set_metadata`. `more`: further tensors by name, of float32, and their
    shapes. `std`: of experts' weights, about.
    """
    kinds = gguf.GGMLQuantizationType
    path.parent.mkdir(parents=True, exist_ok=True)
    writer, dice = gguf.GGUFWriter(path, architecture, split_max_tensors=split), np.random.default_rng(1)
    is_minimax, is_qwen2 = architecture == "minimax-m2", architecture == "qwen2moe"
    head = hidden // 4 if is_qwen2 else 16
    usual = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": hidden,
        "feed_forward_length": intermediate if is_minimax else 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "expert_count": NUM_EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": intermediate,
        "vocab_size": VOCAB_SIZE,
        **({"rope.dimension_count": 8, "expert_gating_func": 2} if is_minimax else {}),  # by sigmoid
        **({"expert_shared_feed_forward_length": 64} if is_qwen2 else {}),
    }
    writer.add_tokenizer_model("gpt2" if words else "none")
    if words:
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(list(words))
        writer.add_token_types([1] * len(words))
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(len(words) - 1)

    def add(name: str, shape: tuple[int, ...], kind: str = "F32", std: float = 0.15, mean: float = 0.0) -> None:
        changed = (others or {}).get(name, kind)
        if changed is None:
            return
        kind = changed
        if kind in ("F32", "F16"):
            numbers = (dice.standard_normal(shape) * std + mean).astype(np.float32 if kind == "F32" else np.float16)
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf_blocks(kind, shape, dice, std), raw_dtype=kinds[kind])

    add("token_embd.weight", (VOCAB_SIZE, hidden), "F16", 0.5)
    add("output_norm.weight", (hidden,), mean=1.0)
    add("output.weight", (VOCAB_SIZE, hidden), dense, 0.5)
    for layer in range(3):
        blk = f"blk.{layer}"
        add(f"{blk}.attn_norm.weight", (hidden,), mean=1.0)
        add(f"{blk}.ffn_norm.weight", (hidden,), mean=1.0)
        add(f"{blk}.attn_q.weight", (4 * head, hidden), dense)
        add(f"{blk}.attn_k.weight", (2 * head, hidden), dense)
        add(f"{blk}.attn_v.weight", (2 * head, hidden), dense)
        add(f"{blk}.attn_output.weight", (hidden, 4 * head), dense if 4 * head % 256 == 0 else "Q8_0")
        add(f"{blk}.ffn_gate_inp.weight", (NUM_EXPERTS, hidden), std=0.4)
        if is_qwen2:
            for one, size in (("q", 4), ("k", 2), ("v", 2)):
                add(f"{blk}.attn_{one}.bias", (size * head,), std=0.1)
            add(f"{blk}.ffn_gate_inp_shexp.weight", (hidden,))
            for one, shape in (("gate", (64, hidden)), ("up", (64, hidden)), ("down", (hidden, 64))):
                add(f"{blk}.ffn_{one}_shexp.weight", shape)
        else:
            for one, size in (("q", 4), ("k", 2)):
                add(f"{blk}.attn_{one}_norm.weight", (head * size if is_minimax else head,), mean=1.0)
        if is_minimax:
            add(f"{blk}.exp_probs_b.bias", (NUM_EXPERTS,), std=0.3)
        of_down = down if down is not None and layer == 2 else inner
        add(f"{blk}.ffn_gate_exps.weight", (NUM_EXPERTS, intermediate, hidden), inner, std)
        add(f"{blk}.ffn_up_exps.weight", (NUM_EXPERTS, intermediate, hidden), inner, std)
        add(f"{blk}.ffn_down_exps.weight", (NUM_EXPERTS, hidden, intermediate), of_down, std)
    for name, shape in (more or {}).items():
        numbers = dice.uniform(0.5, 1.5, shape) if name.endswith("scale") else dice.standard_normal(shape) * 0.15
        writer.add_tensor(name, numbers.astype(np.float32))
    set_metadata(writer, architecture, {**usual, **(metadata or {})})
    write_file(writer)
    return path if not split else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def set_metadata(writer: gguf.GGUFWriter, architecture: str, metadata: Mapping[str, Any]) -> None:
    """Change or add values, None for those that are to be missing; the architecture's keys without its name. A pair of
    a value and one of GGUF's types is written in that.
    """
    kinds, values = gguf.GGUFValueType, writer.kv_data[0]
    usual = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}
    for name, value in metadata.items():
        key = name if name.startswith(("tokenizer.", "general.", "split.", "quantize.")) else f"{architecture}.{name}"
        values.pop(key, None)
        if value is not None:
            plain, kind = value if isinstance(value, tuple) else (value, usual[type(value)])
            element = None if kind != kinds.ARRAY else kinds.get_type(plain[0])
            values[key] = gguf.GGUFValue(plain, kind, element)


def set_strings(key: str, place: int, raw: bytes) -> Callable[[bytearray], None]:
    """A change of a file's bytes: those of an entry of a list of texts, each of one byte before it."""

    def change(data: bytearray) -> None:
        begin = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4 + 4 + 8
        at = begin + 9 * place
        assert struct.unpack_from("<Q", data, at) == (1,)
        data[at + 8 : at + 9] = raw

    return change


def write_file(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(path: Path, dtype: torch.dtype = torch.float32, **rope: Any) -> PreTrainedModel:
    """transformers' model of the file, with a config that has the experts' widths, which it does not read. `rope`: what
    is changed in its rope_parameters.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    field = gguf.GGUFReader(path).get_field(f"{ARCHITECTURES[config.model_type]}.expert_feed_forward_length")
    config.moe_intermediate_size = int(field.contents())
    config.shared_expert_intermediate_size = 64
    config.rope_parameters = config.rope_parameters | rope
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=dtype).eval()

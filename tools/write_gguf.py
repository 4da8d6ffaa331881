"""Write a qwen3_moe checkpoint (the demo model, inflated or not) as a GGUF file, which llama.cpp runs.

    python tools/write_gguf.py MODEL OUT.gguf

Weights stay the bits they are; norms and routers become float32, as llama.cpp wants them. There is no vocabulary in the
file: what runs it feeds token ids. Holds one tensor of the result at a time, all experts of a layer's projection; the
others wait in a temporary file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from torch import Tensor

FAMILY = "qwen3_moe"
EXPERT = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.weight$")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GgufError(Exception):
    """The request cannot be met; the message says what was given and what is accepted."""


Sources = list[tuple[int, Path, str]]
"""Tensors of the checkpoint that one of the result is made of: each with its number among them, its file and name."""


def sources_of(folder: Path) -> dict[str, Sources]:
    """By the name of the whole: all experts of a layer's projection are one. Raises GgufError where there are none."""
    found: dict[str, Sources] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                expert = EXPERT.match(name)
                stem = f"{expert[1]}.{expert[3]}" if expert else name.removesuffix(".weight")
                found.setdefault(stem, []).append((int(expert[2]) if expert else 0, path, name))
    if not found:
        raise GgufError(f"{folder}: no safetensors files there; accepted: a checkpoint folder of transformers")
    return found


def read(sources: Sources) -> Tensor:
    tensors = []
    for _, path, name in sorted(sources):
        with safe_open(path, "pt") as file:
            tensors.append(file.get_tensor(name))
    return torch.stack(tensors) if EXPERT.match(sources[0][2]) else tensors[0]


def describe(writer: Any, config: dict[str, Any]) -> None:
    """The hyperparameters, in GGUF's words."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def check(folder: Path, config: dict[str, Any]) -> None:
    """Raises GgufError for what would be written wrongly."""
    wrong = {
        "model_type": config.get("model_type") != FAMILY,
        "norm_topk_prob": not config.get("norm_topk_prob"),
        "rope_parameters": config.get("rope_parameters", {}).get("rope_type") != "default",
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "attention_bias": bool(config.get("attention_bias")),
    }
    if any(wrong.values()):
        field = next(name for name, is_wrong in wrong.items() if is_wrong)
        raise GgufError(
            f"{folder}: {field} is {config.get(field)!r}; accepted: {FAMILY} with MoE in every layer, normalised "
            "weights, plain RoPE and no attention biases"
        )


def write_gguf(model: Path, out: Path) -> int:
    """Write `out`, which appears when it is complete; its tensors' bytes. Raises GgufError."""
    if not (model / "config.json").is_file():
        raise GgufError(f"{model}: no config.json there; give a transformers model folder")
    config = json.loads((model / "config.json").read_text())
    check(model, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    partial = out.with_name(f".{out.name}.partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe", use_temp_file=True)
    try:
        describe(writer, config)
        total = 0
        for stem, sources in sorted(sources_of(model).items()):
            name, tensor = names.get_name(stem), read(sources)
            if name is None or tensor.dtype not in DTYPES:
                raise GgufError(f"{model}: {stem} ({tensor.dtype}) is nothing that a {FAMILY} model of llama.cpp has")
            if tensor.dim() == 1 or stem.endswith(".mlp.gate"):
                tensor = tensor.float()
            kind = gguf.GGMLQuantizationType.BF16 if tensor.dtype == torch.bfloat16 else None
            array = (tensor.contiguous().view(torch.uint8) if kind else tensor.contiguous()).numpy()
            writer.add_tensor(f"{name}.weight", array, raw_dtype=kind)
            total += array.nbytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="transformers model folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write")
    given = parser.parse_args(arguments)
    try:
        nbytes = write_gguf(given.model, given.out)
    except GgufError as error:
        print(f"write_gguf: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {nbytes} bytes of weights ({nbytes / 2**30:.3f} GiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

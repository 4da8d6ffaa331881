"""Write a qwen3_moe checkpoint (the demo model, inflated or not) as a GGUF file, which llama.cpp runs.

    python tools/write_gguf.py MODEL OUT.gguf [--experts TYPE]

Weights stay the bits they are, but for experts where --experts says to which type of GGUF they are rounded; norms and
routers become float32, as llama.cpp wants them. There is no vocabulary in the file: what runs it feeds token ids. Needs
the package `gguf`. Holds one tensor of the result at a time: all experts of a layer's projection.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FAMILY = "qwen3_moe"
EXPERT = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.weight$")
ROUNDED = ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # to which the package gguf rounds
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class GgufError(Exception):
    """The request cannot be met; the message says what was given and what is accepted."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the result: those of the checkpoint that it is made of, stacked where there are several."""

    name: str  # in llama.cpp's words, with ".weight"
    sources: tuple[tuple[Path, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_expert: bool = False

    def read(self) -> Tensor:
        found = []
        for path, name in self.sources:
            with safe_open(path, "pt") as file:
                found.append(file.get_tensor(name).to(self.dtype))
        tensor = found[0] if len(found) == 1 else torch.stack(found)
        assert tuple(tensor.shape) == self.shape
        return tensor.contiguous()


def parts_of(folder: Path, config: dict[str, Any]) -> list[Part]:
    """What the file will hold. GgufError where the folder holds a tensor that llama.cpp has no name for."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    sources: dict[str, list[tuple[int, Path, str]]] = {}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                expert = EXPERT.match(name)
                stem = f"{expert[1]}.{expert[3]}" if expert else name.removesuffix(".weight")
                sources.setdefault(stem, []).append((int(expert[2]) if expert else 0, path, name))
                opened = file.get_slice(name)
                shapes[stem] = tuple(opened.get_shape()), opened.get_dtype()
    if not sources:
        raise GgufError(f"{folder}: no safetensors files there; accepted: a checkpoint folder of transformers")
    found = []
    for stem, pieces in sorted(sources.items()):
        name = names.get_name(stem)
        shape, code = shapes[stem]
        if name is None or code not in DTYPES:
            raise GgufError(f"{folder}: {stem} ({code}) is nothing that a {FAMILY} model of llama.cpp has")
        is_small = len(shape) == 1 or stem.endswith(".mlp.gate")
        is_expert = EXPERT.match(pieces[0][2]) is not None
        whole = (len(pieces), *shape) if is_expert else shape
        dtype = torch.float32 if is_small else DTYPES[code]
        found.append(
            Part(f"{name}.weight", tuple((path, one) for _, path, one in sorted(pieces)), whole, dtype, is_expert)
        )
    return found


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


def numpy_of(tensor: Tensor) -> Any:
    """NumPy has no bfloat16: its bytes."""
    return tensor.view(torch.uint8).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def write_gguf(model: Path, out: Path, experts: str | None = None) -> int:
    """Write `out`, which appears when it is complete; its tensors' bytes. Raises GgufError. `experts`: the type of GGUF
    to which they are rounded; by default they stay what they are.
    """
    if not (model / "config.json").is_file():
        raise GgufError(f"{model}: no config.json there; give a transformers model folder")
    config = json.loads((model / "config.json").read_text())
    check(model, config)
    try:
        import gguf
    except ImportError:
        raise GgufError("the package gguf is not installed: pip install gguf") from None

    if experts not in (None, *ROUNDED):
        raise GgufError(f"experts={experts!r}: accepted: {', '.join(ROUNDED)}")
    kind = gguf.GGMLQuantizationType[experts] if experts else None
    partial = out.with_name(f".{out.name}.partial")
    parts = parts_of(model, config)
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    try:
        describe(writer, config)
        total = 0
        for part in parts:
            raw = gguf.GGMLQuantizationType.BF16 if part.dtype == torch.bfloat16 else None
            raw = kind if kind is not None and part.is_expert else raw
            shape = part.shape if raw is None else gguf.quant_shape_to_byte_shape(part.shape, raw)  # in bytes
            blank = numpy_of(torch.empty((0,), dtype=torch.uint8 if raw is not None else part.dtype))
            nbytes = math.prod(shape) * blank.itemsize
            total += nbytes
            writer.add_tensor_info(part.name, shape, blank.dtype, nbytes, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for part in parts:
            tensor = part.read()
            if kind is not None and part.is_expert:
                writer.write_tensor_data(gguf.quants.quantize(tensor.float().numpy(), kind))
            else:
                writer.write_tensor_data(numpy_of(tensor))
        writer.close()
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="transformers model folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write")
    parser.add_argument(
        "--experts", metavar="TYPE", help=f"of GGUF, to which experts are rounded: {', '.join(ROUNDED)}"
    )
    given = parser.parse_args(arguments)
    try:
        nbytes = write_gguf(given.model, given.out, given.experts)
    except GgufError as error:
        print(f"write_gguf: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {nbytes} bytes of weights ({nbytes / 2**30:.3f} GiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tiny models as GPTQ and AWQ checkpoints, packed here, as the libraries that make them need another torch; and their
weights as these compute them. test_gptq.py compares both with GPTQModel itself where that is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.families import load_reference, made_once, make_model
from tests.model.checkpoints import in_groups, read_tensors, write_checkpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs of a word, from its lowest bits
Tensors = dict[str, torch.Tensor]
"""Of a matrix, by the ends of their names."""


def words(numbers: torch.Tensor) -> torch.Tensor:
    """Int32 [..., n] from numbers of 0 to 15 [..., n, 8], the first in the lowest bits."""
    made = torch.zeros(numbers.shape[:-1], dtype=torch.int64)
    for place in range(8):
        made |= numbers[..., place].long() << 4 * place
    return made.to(torch.int32)


def numbers_of(words: torch.Tensor) -> torch.Tensor:
    """[..., n, 8] from words [..., n]."""
    return torch.stack([words >> 4 * place & 15 for place in range(8)], dim=-1)


def gptq_tensors(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, version: str = "gptq") -> Tensors:
    """From codes [inputs, outputs], scales and zero points [groups, outputs]."""
    inputs = len(codes)
    stored = words(zeros.unflatten(1, (-1, 8))) - (0x11111111 if version == "gptq" else 0)
    return {
        "qweight": words(codes.unflatten(0, (-1, 8)).transpose(1, 2)),
        "scales": scales.half(),
        "qzeros": stored,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // len(scales)),
    }


def awq_tensors(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    packed = [words(one.unflatten(1, (-1, 8))[..., AWQ_ORDER]) for one in (codes, zeros)]
    return {"qweight": packed[0], "scales": scales.half(), "qzeros": packed[1]}


def gptq_weight(tensors: Tensors, version: str = "gptq", dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """[outputs, inputs] in `dtype`, as gptqmodel's TorchLinear.dequantize_weight with scales in that."""
    zeros = tensors["qzeros"] + (0x11111111 if version == "gptq" else 0)
    codes, group = numbers_of(tensors["qweight"]).transpose(1, 2).flatten(0, 1), tensors["g_idx"].long()
    return (tensors["scales"].to(dtype)[group] * (codes - numbers_of(zeros).flatten(1)[group])).T


def awq_weight(tensors: Tensors, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """[outputs, inputs] in `dtype`, as gptqmodel's and AutoAWQ's dequantize_gemm with scales in that."""
    places = [AWQ_ORDER.index(output) for output in range(8)]
    codes, zeros = (numbers_of(tensors[one])[..., places].flatten(1) for one in ("qweight", "qzeros"))
    group = len(codes) // len(zeros)
    scales = tensors["scales"].to(dtype)
    return ((codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)).T


def rounded(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zero points as `gptq_tensors` takes them."""
    groups = weight.float().T.unflatten(0, (-1, group))  # [groups, group, outputs]
    low, high = groups.amin(dim=1).clamp(max=0), groups.amax(dim=1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / 15).half()
    zeros = torch.full_like(low, 8) if symmetric else (-low / scales).round().clamp(1, 15)
    codes = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).int(), scales, zeros.int()


@made_once
def make_gptq_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float16, group: int = 128, symmetric: bool = True, version: str = "gptq"
) -> Path:
    """qwen3_moe in GPTQ: linear layers, those of experts too, but not lm_head and routers."""
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": version,
        "damp_percent": 0.01,
    }

    def tensors_of(weight: torch.Tensor) -> Tensors:
        return gptq_tensors(*rounded(weight, group, symmetric), version)

    return _make(folder, dtype, group, quantization, tensors_of)


@made_once
def make_awq_checkpoint(folder: Path, dtype: torch.dtype = torch.float16, group: int = 128) -> Path:
    """The same in AWQ."""
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["gate"],
    }
    return _make(folder, dtype, group, quantization, lambda weight: awq_tensors(*rounded(weight, group, False)))


def _make(folder: Path, dtype: torch.dtype, group: int, quantization: dict[str, Any], tensors_of: Any) -> Path:
    source = folder.with_name(f"{folder.name}-source")
    make_model(in_groups(group), dtype=dtype).save_pretrained(source)
    tensors: Tensors = {}
    for name, tensor in read_tensors(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        smaller = tensor * (64 / tensor.shape[1]) ** 0.5  # wider sums would make more of what is rounded
        for end, made in tensors_of(smaller).items():
            tensors[f"{name.removesuffix('weight')}{end}"] = made
    return write_checkpoint(folder, tensors, source, quantization_config=quantization)


def load_gptq(source: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """transformers' model of a GPTQ or AWQ checkpoint, with the weights that the libraries compute."""
    config = json.loads((source / "config.json").read_text())
    quantization = config["quantization_config"]
    dtype = dtype or getattr(torch, config["dtype"])
    tensors = read_tensors(source)
    plain = {
        name: one for name, one in tensors.items() if not name.endswith((".qweight", ".scales", ".qzeros", ".g_idx"))
    }
    scales = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    for name in (one for one in tensors if one.endswith(".qweight")):
        stem = name.removesuffix("qweight")
        parts = {end: tensors[stem + end] for end in ("qweight", "scales", "qzeros", "g_idx") if stem + end in tensors}
        if quantization["quant_method"] == "gptq":
            plain[f"{stem}weight"] = gptq_weight(parts, quantization["checkpoint_format"], scales)
        else:
            plain[f"{stem}weight"] = awq_weight(parts, scales)
    folder = write_checkpoint(source.with_name(f"{source.name}-plain"), plain, source, quantization_config=None)
    return load_reference(folder, dtype=dtype)

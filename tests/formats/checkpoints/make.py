"""Makes the checkpoints of this folder. See README.md for the packages that it needs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from awq.models._config import AwqConfig
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.quantize.quantizer import AwqQuantizer
from awq.utils.packing_utils import dequantize_gemm
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file

from tests.families import VOCAB_SIZE, Family, make_model, make_tokenizer

HERE = Path(__file__).parent
MADE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "gptq": (torch.float16, {"group_size": 32, "lm_head": True}),
    "gptq_asymmetric": (torch.bfloat16, {"group_size": 128, "sym": False}),
    "gptq_v2": (torch.float16, {"group_size": 32, "sym": False, "format": "gptq_v2"}),
    "gptq_desc_act": (torch.float16, {"group_size": 32, "desc_act": True, "lm_head": True}),
    "awq": (torch.bfloat16, {"group_size": 128, "method": "awq", "format": "gemm"}),
    "autoawq": (torch.float16, {"group_size": 32}),
}


def make_source(folder: Path, dtype: torch.dtype, group: int) -> Path:
    """Two layers, or one where groups are large, of 4 experts."""
    config = {
        "hidden_size": max(64, group),
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1 if group == 128 else 2,
        "tie_word_embeddings": group == 128,
        "head_dim": max(64, group) // 4,
        "norm_topk_prob": True,
    }
    model = make_model(Family("qwen3_moe", config["num_hidden_layers"], config=config))
    for name, weight in model.named_parameters():
        if "_proj" in name:
            weight.data *= (64 / weight.shape[-1]) ** 0.5  # wider sums would make more of what is rounded
            weight.data[..., :2, :].abs_()  # the zero points of these outputs are 0
    model.to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def quantise(source: Path, folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = GPTQModel.load(str(source), QuantizeConfig(bits=4, device="cpu", **options), dtype=dtype)
    dice = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, VOCAB_SIZE, (64,), generator=dice).tolist() for _ in range(64)]
    model.quantize([{"input_ids": text, "attention_mask": [1] * 64} for text in texts], batch_size=1)
    model.save(str(folder))


def weights_of(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Those that GPTQModel computes with: the products of its layers with a unit matrix."""
    model = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=dtype)
    layers = {name: one for name, one in model.model.named_modules() if hasattr(one, "qweight")}
    with torch.no_grad():
        return {name: one(torch.eye(one.in_features, dtype=dtype)).T for name, one in layers.items()}


def pack_by_autoawq(source: Path, folder: Path, group: int) -> dict[str, torch.Tensor]:
    """As `AwqQuantizer._apply_quant` does with each linear layer. Returns the weights, by its dequantize_gemm."""
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.group_size, quantizer.w_bit, quantizer.zero_point = group, 4, True
    tensors, weights = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        linear, stem = torch.nn.Linear(*tensor.shape[::-1], bias=False), name.removesuffix(".weight")
        linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(tensor)
        scales, zeros = (one.t().contiguous() for one in (scales, zeros))
        packed = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales, zeros=zeros)
        tensors |= {f"{stem}.{end}": one for end, one in packed.state_dict().items()}
        weights[stem] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group).T
    config = json.loads((source / "config.json").read_text())
    method = AwqConfig(q_group_size=group, modules_to_not_convert=["gate"])
    config["quantization_config"] = method.to_transformers_dict()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return weights


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {name: one.contiguous().view(torch.uint8).numpy().tobytes() for name, one in sorted(weights.items())}
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in found.items()}


def main(name: str) -> None:
    """One a process, as GPTQModel changes transformers' classes."""
    dtype, options = MADE[name]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # where GPTQModel writes its logs
        source, made = make_source(Path(scratch, "source"), dtype, options["group_size"]), Path(scratch, "made")
        if name == "autoawq":
            found = {"float16": digests(pack_by_autoawq(source, made, options["group_size"]))}
        else:
            quantise(source, made, dtype, options)
            found = {one: digests(weights_of(made, getattr(torch, one))) for one in ("float16", "bfloat16")}
        (HERE / name).mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            (HERE / name / file).write_bytes((made / file).read_bytes())
        (HERE / name / "weights.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Quantised checkpoints that people have: decoded to the bit as who made them does, and computed with losslessly."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats import layout_of
from expertly.formats.matrix import E2M1
from expertly.model.needs import needs_of
from expertly.model.packing import pack
from expertly.store.packed import PackedStore
from tests import every_family
from tests.families import load_reference, make_checkpoint, make_model
from tests.formats.compressed import make_compressed
from tests.formats.references import assert_computes, library_checkpoint
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    in_groups,
    make_fused_checkpoint,
    read_experts,
    read_tensors,
    refused,
    set_config,
    spread_blocks,
    write_checkpoint,
)
from tests.tables import IS_FULL, crossed

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = {"num_bits": 8, "type": "float", "format": "float-quantized", "scales": F32}
INT4 = {"num_bits": 4, "type": "int", "format": "pack-quantized", "scales": BF16}
OF_MXFP4 = {"num_bits": 4, "type": "float", "scales": F32, "format": "mxfp4-pack-quantized"}
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def scheme(kind: dict[str, Any], strategy: str | int | tuple[int, int], **fields: Any) -> dict[str, Any]:
    """`strategy`: or the size of a group or of a block."""
    if isinstance(strategy, int):
        return {**kind, "strategy": "group", "group_size": strategy, **fields}
    if isinstance(strategy, tuple):
        return {**kind, "strategy": "block", "block_structure": list(strategy), **fields}
    return {**kind, "strategy": strategy, **fields}


INT_TOKENS = PER_TOKEN | {"type": "int"}
COMPRESSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8 a channel": (scheme(FP8, "channel", scales=BF16, activations=PER_TOKEN), "float32", "fp8_rows"),
    "fp8 a channel, float32": (scheme(FP8, "channel"), "fp8_rows", "fp8_rows"),
    "fp8 a tensor": (scheme(FP8, "tensor", activations=PER_TENSOR), "fp8", "fp8"),
    "fp8 a tensor, bfloat16": (scheme(FP8, "tensor", scales=BF16), "float32", "fp8"),
    "fp8 blocks": (scheme(FP8, (128, 128)), "fp8", "fp8"),
    "fp8 small blocks": (scheme(FP8, (64, 32)), "float32", "bfloat16"),
    "int4 g64": (scheme(INT4, 64), "int4_g32", "int4_g32"),
    "int4 a channel": (scheme(INT4, "channel"), "int4_g128", "int4_g128"),
    "int4 g32 asymmetric": (scheme(INT4, 32, symmetric=False), "int4_g32_zeros", "int4_g32_zeros"),
    "int4 a channel, asymmetric": (scheme(INT4, "channel", symmetric=False), "int4_g128_zeros", "int4_g128_zeros"),
    "int4 float16": (scheme(INT4, 128, scales=F16), "int4_g128_f16", "bfloat16"),
    "int8 a channel": (scheme(INT4, "channel", num_bits=8), "float32", "bfloat16"),
    "int8 g128 asymmetric": (scheme(INT4, 128, num_bits=8, symmetric=False), "float32", "bfloat16"),
    "int8 with activations": (
        scheme(INT4, "channel", num_bits=8, format="int-quantized", activations=INT_TOKENS),
        *("float32", "bfloat16"),
    ),
    "int3": (scheme(INT4, 32, num_bits=3), "float32", "bfloat16"),
    "mxfp4": (scheme(OF_MXFP4, 32), "mxfp4", "mxfp4"),
}
"""Schemes, and what experts are stored as in models of float32 and of bfloat16."""

RUN = (
    *("fp8 a channel", "fp8 a channel, float32", "fp8 a tensor", "int4 a channel, asymmetric", "int4 g64", "mxfp4"),
    "nvfp4 of compressed-tensors",
)
"""Of which tokens and logits are compared each time."""


def assert_holds(store: PackedStore, source: Path, plain: Path, runs: bool = True) -> None:
    """The decoded model to the bit, and (`runs`) its tokens and logits."""
    reference = load_reference(plain)
    assert_holds_what_transformers_loads(store, source, reference)
    if runs:
        assert_computes(store.folder, reference)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_decodes_them_so(name: str, tmp_path: Path) -> None:
    fields, *stored_as = COMPRESSED[name]
    for dtype, form in zip((F32, BF16), stored_as, strict=True):
        source, plain = make_compressed(tmp_path / f"{dtype}", dtype, fields, static="tensor" in name)
        store = pack(source, tmp_path / f"{dtype}-store")
        assert store.manifest.stored_as == form
        assert_holds(store, source, plain, dtype == F32 and (IS_FULL or name in RUN))


# -- other makers, by the definition -----------------------------------------------------------------------------------

NUMBERS = torch.tensor(E2M1)


def changed(
    folder: Path, make: Any, quantization: dict[str, Any] | None, dtype: torch.dtype = F32, by_name: bool = False
) -> tuple[Path, Path]:
    """qwen3_moe with what `make` (`by_name`: `make(name)`) makes of linear layers, tensors by ending and a decoded one;
    and the decoded model.
    """
    source = make_checkpoint(in_groups(128, 2), folder.with_name(f"{folder.name}-source"), dtype=dtype)
    tensors, decoded = {}, {}
    for name, tensor in read_tensors(source).items():
        decoded[name] = tensors[name] = tensor
        if name.endswith("_proj.weight"):
            stem = name.removesuffix(".weight")
            made, decoded[name] = (make(name) if by_name else make)(tensor.float() * (64 / tensor.shape[1]) ** 0.5)
            decoded[name] = decoded[name].to(dtype)
            del tensors[name]
            tensors |= {stem + ending: part for ending, part in made.items()}
    plain = write_checkpoint(folder.with_name(f"{folder.name}-decoded"), decoded, source)
    return write_checkpoint(folder, tensors, source, quantization_config=quantization), plain


def nvfp4(weight: torch.Tensor, names: tuple[str, str, str], is_factor: bool) -> Any:
    """NVIDIA's definition: codes of E2M1, a scale of E4M3 for each 16, and one of float32 for the matrix."""
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().amax() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn)
    whole = whole if is_factor else 1 / whole
    factors = (scales.float() * whole if is_factor else scales.float() / whole).unsqueeze(2)
    codes = (groups / factors.clamp(min=1e-9)).unsqueeze(-1).sub(NUMBERS).abs().argmin(-1)
    decoded = (NUMBERS[codes] * factors).flatten(1)
    flat = codes.flatten(1).to(torch.uint8)
    packed = flat[:, 0::2] | flat[:, 1::2] << 4
    return dict(zip(names, (packed, scales, whole if is_factor else whole.reshape(1)), strict=True)), decoded


def fp8(weight: torch.Tensor, *endings: str, rows: bool = False) -> Any:
    scale = (weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax()) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return dict(zip(endings, (codes, scale, torch.tensor(0.5)), strict=True)), codes.float() * scale


OF_16 = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
COMPRESSED_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": OF_16 | {"group_size": 16},
            "input_activations": OF_16 | {"dynamic": "local"},
        }
    },
}
PACKED = (".weight_packed", ".weight_scale", ".weight_global_scale")
OF_FP8 = (".weight", ".weight_scale", ".input_scale")
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MADE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nvfp4 of compressed-tensors": (partial(nvfp4, names=PACKED, is_factor=False), COMPRESSED_NVFP4, "nvfp4_global"),
    "nvfp4 of modelopt": (
        partial(nvfp4, names=(".weight", ".weight_scale", ".weight_scale_2"), is_factor=True),
        *(MODELOPT, "nvfp4_global"),
    ),
    "fp8 of modelopt": (lambda one: fp8(one, *OF_FP8), MODELOPT | {"quant_algo": "FP8"}, "fp8"),
    "AutoFP8": (lambda one: fp8(one, *OF_FP8), STATIC | {"ignored_layers": ["lm_head"]}, "fp8"),
    "fp8 of FBGEMM": (lambda one: fp8(one, *OF_FP8, rows=True), {"quant_method": "fbgemm_fp8"}, "fp8_rows"),
    "fp8 a row": (lambda one: fp8(one, *OF_FP8, rows=True), STATIC, "fp8_rows"),
}


@pytest.mark.parametrize("name", MADE)
def test_they_are_decoded_by_their_definition(name: str, tmp_path: Path) -> None:
    make, quantization, stored_as = MADE[name]
    for dtype in (F32, BF16):
        source, plain = changed(tmp_path / f"{dtype}", make, quantization, dtype)
        store = pack(source, tmp_path / f"{dtype}-store")
        assert store.manifest.stored_as == stored_as
        assert_holds(store, source, plain, dtype == F32 and (IS_FULL or name in RUN))


@pytest.mark.parametrize("name", ["nvfp4 of compressed-tensors", "nvfp4 of modelopt"])
def test_the_scale_of_an_nvfp4_matrix_is_above_zero(name: str, tmp_path: Path) -> None:
    """Kept or decoded: else other weights would come of it."""
    make, quantization, _ = MADE[name]
    source, _ = changed(tmp_path / "model", make, quantization)
    tensors = read_tensors(source)
    for part, whole in product((".experts.", ".self_attn."), (-0.5, 0.0, float("nan"))):
        first = next(key for key in tensors if part in key and key.endswith(("_global_scale", "weight_scale_2")))
        spoiled = tensors | {first: torch.full_like(tensors[first], whole)}
        write_checkpoint(tmp_path / "wrong", spoiled, source, quantization_config=quantization)
        with pytest.raises(CheckpointError, match=f"the scale of the matrix is {whole:g}: must be"):
            pack(tmp_path / "wrong", tmp_path / "store")


def test_modelopt_may_say_so_in_a_file_of_its_own(tmp_path: Path) -> None:
    make, quantization, _ = MADE["nvfp4 of modelopt"]
    source, plain = changed(tmp_path / "model", make, None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": quantization["quant_algo"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    store = pack(source, tmp_path / "store")
    assert_holds(store, source, plain, runs=False)


@pytest.mark.parametrize(("block", "scale"), crossed([128, 64, 0], ["_scale_inv", "_scale"]))
def test_stacked_experts_in_fp8(block: int, scale: str, tmp_path: Path) -> None:
    """Of names without ".weight": blocks, or (0) one scale for each expert. Those of 128 and experts are kept."""
    model = make_model(in_groups(128, 2))
    model.save_pretrained(tmp_path / "names")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = write_checkpoint(tmp_path / "source", tensors, tmp_path / "names")
    tensors, decoded = read_tensors(source), read_tensors(source)
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors[name]
        size = (block, block) if block else tuple(weight.shape[1:])
        sizes = (len(weight), *(-(-n // of) for n, of in zip(weight.shape[1:], size, strict=True)))
        scales = torch.rand(sizes, generator=torch.Generator().manual_seed(2)) / 448 + 1e-3
        spread = torch.stack([spread_blocks(one, size, *weight.shape[1:]) for one in scales])
        codes = (weight / spread).to(torch.float8_e4m3fn)
        decoded[name] = codes.float() * spread
        tensors |= {name: codes, name + scale: scales if block else scales.flatten()}
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block] if block else None}
    write_checkpoint(tmp_path / "model", tensors, source, quantization_config=quantization)
    plain = write_checkpoint(tmp_path / "decoded", decoded, source)
    store = pack(tmp_path / "model", tmp_path / "store")
    assert store.manifest.stored_as == ("float32" if block == 64 else "fp8")
    assert_holds(store, tmp_path / "model", plain)


WEIGHTS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
LLAMA_4: dict[str, tuple[dict[str, Any] | None, str]] = {
    "llm-compressor, plain": (None, "float32"),
    "llm-compressor": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": WEIGHTS}},
        "fp8_rows",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "float32"),
}


@pytest.mark.parametrize("maker", LLAMA_4)
def test_llama_4_as_others_write_it(maker: str, tmp_path: Path) -> None:
    """llm-compressor a tensor for each expert, [outputs, inputs]; FBGEMM as transformers, all in one and turned."""
    quantization, stored_as = LLAMA_4[maker]
    every_family.make_model("llama4_text", hidden_size=128, intermediate_size=128).save_pretrained(tmp_path / "source")
    tensors = read_tensors(tmp_path / "source")
    decoded = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        path, _, last = name.rpartition(".")
        experts = tensors.pop(name).mT
        scales = experts.abs().amax(2, keepdim=True) / 448
        codes = (experts / scales).to(torch.float8_e4m3fn)
        if quantization:
            decoded[name] = (codes.float() * scales).mT.contiguous()
        if maker == "fbgemm":
            of_outputs = scales if last == "down_proj" else scales.mT.contiguous()
            tensors |= {name: codes.mT.contiguous(), f"{name}_scale": of_outputs}
            continue
        for part in ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,):
            rows = slice(128 * (part == "up_proj"), 128 * (part == "up_proj") + 128)
            for expert in range(len(experts)):
                stem = f"{path}.{expert}.{part}"
                tensors[f"{stem}.weight"] = (codes if quantization else experts)[expert, rows].contiguous()
                if quantization:
                    tensors[f"{stem}.weight_scale"] = scales[expert, rows]
    source = write_checkpoint(tmp_path / "model", tensors, tmp_path / "source", quantization_config=quantization)
    plain = write_checkpoint(tmp_path / "decoded", decoded, tmp_path / "source")
    store = pack(source, tmp_path / "store")
    assert store.manifest.stored_as == stored_as
    assert_holds(store, source, plain)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "mistral4"])
def test_experts_that_transformers_stacks_may_have_a_tensor_each(family: str, tmp_path: Path) -> None:
    every_family.make_model(family).save_pretrained(tmp_path / "source")
    tensors = read_tensors(tmp_path / "source")
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        stem, _, last = name.rpartition(".")
        for number, expert in enumerate(tensors.pop(name)):
            parts = {last: expert}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            tensors |= {f"{stem}.{number}.{part}.weight": matrix.clone() for part, matrix in parts.items()}
    apart = pack(write_checkpoint(tmp_path / "apart", tensors, tmp_path / "source"), tmp_path / "of_apart")
    store = pack(tmp_path / "source", tmp_path / "store")
    for layer in range(len(store.manifest.layers)):
        assert torch.equal(read_experts(apart, layer), read_experts(store, layer))


def test_the_text_of_a_model_of_images_may_be_quantised_alone(tmp_path: Path) -> None:
    """As Kimi-K2.5 is published: `quantization_config` is in its `text_config`."""
    model = every_family.make_model("kimi_k25")
    model.save_pretrained(tmp_path / "source")
    tensors = read_tensors(tmp_path / "source")
    decoded = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        made, decoded[name] = fp8(tensors.pop(name), *OF_FP8, rows=True)
        tensors |= {name.removesuffix(".weight") + ending: part for ending, part in made.items()}
    text = json.loads((tmp_path / "source" / "config.json").read_text())["text_config"]
    text["quantization_config"] = LLAMA_4["llm-compressor"][0]
    source = write_checkpoint(tmp_path / "model", tensors, tmp_path / "source", text_config=text)
    plain = write_checkpoint(tmp_path / "decoded", decoded, tmp_path / "source")
    reference = type(model).from_pretrained(plain).eval()
    assert_computes(pack(source, tmp_path / "store", "float32").folder, reference, [("expertly-ahead", "25%", 1)])


OF_TENSOR = scheme(FP8, "tensor")
SEVERAL: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    "fp8 attention, int4 experts": (
        (OF_TENSOR | {"targets": ["self_attn"]}, scheme(INT4, 32, targets=["experts"])),
        "int4_g32",
    ),
    "down in more bits": (
        (OF_TENSOR | {"targets": ["down_proj"]}, scheme(INT4, 128, targets=["gate_proj", "up_proj"])),
        "fp8+int4_g128",
    ),
    "experts that are decoded": (
        (scheme(INT4, "channel", num_bits=8, targets=["experts"]), scheme(INT4, 32, targets=["self_attn"])),
        "float32",
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_groups_of_a_config(name: str, tmp_path: Path) -> None:
    schemes, stored_as = SEVERAL[name]
    source, plain = make_compressed(tmp_path / "model", F32, *schemes)
    store = pack(source, tmp_path / "store")
    assert store.manifest.stored_as == stored_as
    assert_holds(store, source, plain)


def test_what_configs_of_compressed_tensors_leave_out_or_say_of_other_things(tmp_path: Path) -> None:
    """The strategy, which the size of a group says; groups of activations; a sparsity that is none; an older name."""
    source, _ = make_compressed(tmp_path / "model", F32, COMPRESSED["int4 g64"][0])
    usual = json.loads((source / "config.json").read_text())["quantization_config"]
    wanted = pack(source, tmp_path / "store")
    (group,) = usual["config_groups"].values()
    weights = {field: value for field, value in group["weights"].items() if field != "strategy"}
    of_cache = {"targets": ["re:.*self_attn$"], "weights": None, "output_activations": PER_TENSOR}
    changes: dict[str, dict[str, Any]] = {
        "strategy": {"config_groups": {"group_0": group | {"weights": weights}}},
        "activations": {"config_groups": {"group_0": of_cache, "group_1": group}},
        "sparsity": {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}},
        "transforms": {"transform_config": {"config_groups": {}}},
    }
    for number, change_of in enumerate([*changes.values(), {}]):
        new, old = ("quantization_config", "compression_config")[:: 1 if change_of else -1]
        set_config(source, **{new: usual | change_of, old: None})
        store = pack(source, tmp_path / f"{number}")
        assert store.manifest.stored_as == wanted.manifest.stored_as
        assert torch.equal(read_experts(store, 0), read_experts(wanted, 0))
    set_config(source, quantization_config=usual | {"sparsity_config": {"format": "sparse-24-bitmask"}})
    refused(source, CheckpointError, r'sparsity_config=.*must be none, or one with \{"format": "dense"\}')
    set_config(source, quantization_config=usual | {"config_groups": {"group_0": of_cache}})
    refused(source, CheckpointError, "config_groups=.*one of them with `weights`")


def test_what_is_decoded_is_said_with_both_sizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = make_compressed(tmp_path / "model", BF16, COMPRESSED["int8 a channel"][0])
    pack(source, tmp_path / "store")
    assert re.search(r"quantised experts of 3 layers are decoded, .*: \S+ MiB in bfloat16 for \S+ MiB", caplog.text)
    caplog.clear()
    pack(source, tmp_path / "named", "bfloat16")
    assert "decoded" not in caplog.text


# -- MLX ---------------------------------------------------------------------------------------------------------------


def mlx(weight: torch.Tensor, bits: int, size: int, dtype: torch.dtype) -> Any:
    """Words, scales and biases as mlx-lm stores them, and the weights: number * scale + bias."""
    groups = weight.unflatten(-1, (-1, size))
    low, top = groups.amin(-1), groups.amax(-1)
    scales, biases = ((top - low) / (2**bits - 1)).to(dtype), low.to(dtype)
    numbers = ((groups - biases.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    decoded = numbers * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)
    places = (numbers.long().flatten(-2).unsqueeze(-1) >> torch.arange(bits)) & 1
    words = (places.flatten(-2).unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return {".weight": words.to(torch.uint32), ".scales": scales, ".biases": biases}, decoded.flatten(-2)


def make_mlx(folder: Path, dtype: torch.dtype, bits: int, size: int = 64, **fields: Any) -> tuple[Path, Path]:
    """qwen3_moe as mlx-lm converts it: layers, tables and stacked experts; the router always in 8 bits."""
    source = make_checkpoint(in_groups(128, 2), folder.with_name(f"{folder.name}-source"), dtype=dtype)
    decoded = read_tensors(source)
    tensors, stacks = {}, defaultdict(list)
    for name in sorted(decoded, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        stem, is_expert = name.removesuffix(".weight"), ".experts." in name
        if decoded[name].dim() < 2:
            tensors[name] = decoded[name]
            continue
        weight = decoded[name].float() * ((64 / decoded[name].shape[1]) ** 0.5 if "_proj" in name else 1)
        made, weights = mlx(weight, 8 if name.endswith("mlp.gate.weight") else bits, size, dtype)
        decoded[name] = weights.to(dtype)
        if is_expert:
            stacks[re.sub(r"experts\.\d+", "switch_mlp", stem)].append(made)
        else:
            tensors |= {stem + ending: part for ending, part in made.items()}
    for stem, several in stacks.items():
        tensors |= {stem + ending: torch.stack([one[ending] for one in several]) for ending in several[0]}
    quantization = {"group_size": size, "bits": bits, "model.layers.0.mlp.gate": {"group_size": size, "bits": 8}}
    plain = write_checkpoint(folder.with_name(f"{folder.name}-decoded"), decoded, source)
    return write_checkpoint(folder, tensors, source, quantization=quantization | fields), plain


@pytest.mark.parametrize("bits", [4, 8, 6])
def test_mlx(bits: int, tmp_path: Path) -> None:
    for dtype in (F32, BF16):
        source, plain = make_mlx(tmp_path / f"{dtype}", dtype, bits, mode="affine")
        store = pack(source, tmp_path / f"{dtype}-store")
        assert_holds(store, source, plain, dtype == F32 and (IS_FULL or bits == 4))


def test_mlx_in_other_families_and_groups_is_refused(tmp_path: Path) -> None:
    source, _ = make_mlx(tmp_path / "model", F32, 4)
    set_config(source, quantization={"group_size": 32, "bits": 4})
    refused(source, CheckpointError, r"scales: 2 groups of 32 \(quantization.group_size\) in 32 words")
    set_config(source, quantization={"group_size": 64, "bits": 4, "lm_head": {"group_size": 32, "bits": 4}})
    refused(source, CheckpointError, r"lm_head.group_size=32: must be 64")
    set_config(source, quantization={"group_size": 64, "bits": 4}, model_type="qwen3_next")
    refused(source, CheckpointError, r"MLX changes more than names in a qwen3_next; accepted of MLX: glm4_moe, ")


# -- auto-round: GPTQ's and AWQ's packing under another name -----------------------------------------------------------

AUTO_ROUND = {"gptq": "auto_round:auto_gptq", "gptq_v2": "auto_round:gptqmodel", "autoawq": "auto_round:auto_awq"}


@pytest.mark.parametrize("name", AUTO_ROUND)
def test_auto_round(name: str, tmp_path: Path) -> None:
    """Without the order of inputs, which it does not store."""
    source = library_checkpoint(tmp_path / "source", F32, name)
    wanted = pack(source, tmp_path / "wanted")
    old = json.loads((source / "config.json").read_text())["quantization_config"]
    fields = {key: old[key] for key in ("bits", "group_size", "sym") if key in old}
    layers = {"lm_head": {"bits": 8}} if name == "gptq" else {"model.layers.0.mlp.gate": {"bits": 16}}
    change(source, lambda name, tensor: None if name.endswith("g_idx") else tensor)
    quantization = {**fields, "quant_method": "auto-round", "packing_format": AUTO_ROUND[name], "extra_config": layers}
    set_config(source, quantization_config=quantization)
    store = pack(source, tmp_path / "store")
    assert store.manifest.stored_as == wanted.manifest.stored_as
    for layer in range(len(store.manifest.layers)):
        assert torch.equal(read_experts(store, layer), read_experts(wanted, layer))
    dense = [load_file(one.folder / "dense.safetensors") for one in (store, wanted)]
    assert dense[0].keys() == dense[1].keys() and all(torch.equal(dense[0][key], dense[1][key]) for key in dense[0])
    set_config(source, quantization_config=quantization | {"packing_format": "auto_round:fp8"})
    refused(source, CheckpointError, r"packing_format='auto_round:fp8': must be 'auto_round:auto_gptq' or ")


# -- GPTQ and inputs in another order ----------------------------------------------------------------------------------


def gptq(weight: torch.Tensor, bits: int, size: int, sym: bool = True) -> Any:
    """As GPTQModel packs it: words along inputs, zero points less one; computed in float16."""
    size = weight.shape[1] if size == -1 else size
    groups, most, middle = weight.unflatten(1, (-1, size)), 2**bits - 1, 2 ** (bits - 1)
    scales = (groups.abs().amax(2) / (middle - 0.5)).half()
    points = torch.full(scales.shape, middle)
    if not sym:
        points += torch.randint(-2, 3, scales.shape, generator=torch.Generator().manual_seed(1))
    codes = (groups / scales.float().unsqueeze(2) + points.unsqueeze(2)).round().clamp(0, most)
    decoded = (codes - points.unsqueeze(2)).half() * scales.unsqueeze(2)
    words = _words(codes.flatten(1).T, bits, 0), scales.T, _words(points.T - 1, bits, 1)
    order = (torch.arange(weight.shape[1]) // size).int()
    return dict(zip((".qweight", ".scales", ".qzeros", ".g_idx"), (*words, order), strict=True)), decoded.flatten(1)


def _words(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """32 / bits neighbours along `dim` to a word, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits)
    apart = numbers.long().movedim(dim, -1).unflatten(-1, (-1, len(shifts)))
    return (apart << shifts).sum(-1).to(torch.int32).movedim(-1, dim)


GPTQ: dict[str, tuple[dict[str, Any], str]] = {
    "8 bits": ({"bits": 8, "group_size": 128}, "float16"),
    "g64": ({"bits": 4, "group_size": 64}, "int4_g32_f16"),
    "a group as usual": ({"bits": 4}, "int4_g128_f16"),
    "a row": ({"bits": 4, "group_size": -1}, "int4_g128_f16"),
    "asymmetric, a row": ({"bits": 4, "group_size": -1, "sym": False}, "int4_g128_zeros_f16"),
    "g16": ({"bits": 4, "group_size": 16}, "float16"),
}


@pytest.mark.parametrize("name", GPTQ)
def test_gptq(name: str, tmp_path: Path) -> None:
    fields, stored_as = GPTQ[name]
    make = partial(gptq, bits=fields["bits"], size=fields.get("group_size", 128), sym=fields.get("sym", True))
    source, plain = changed(tmp_path / "model", make, {"quant_method": "gptq", "desc_act": False, **fields}, F16)
    store = pack(source, tmp_path / "store")
    assert store.manifest.stored_as == stored_as
    assert_holds(store, source, plain, runs=False)


def test_gptq_of_other_bits_and_groups_by_layer(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: experts in groups of 64, attention in 8 bits, some layers not quantised."""
    rules = {
        r"+:.*\.self_attn\.": {"bits": 8, "group_size": 32},
        r"+:.*\.gate_proj$": {"group_size": 64, "sym": False},
        r"-:.*layers\.0\.self_attn\.q_proj": {},
    }
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": rules}

    def make(name: str) -> Any:
        if "layers.0.self_attn.q_proj" in name:
            return lambda weight: ({".weight": weight.half()}, weight.half())
        if "self_attn" in name:
            return partial(gptq, bits=8, size=32)
        return partial(gptq, bits=4, size=64, sym=False) if "gate_proj" in name else partial(gptq, bits=4, size=128)

    source, plain = changed(tmp_path / "model", make, quantization, F16, by_name=True)
    store = pack(source, tmp_path / "store")
    assert_holds(store, source, plain, runs=False)
    set_config(plain, dtype="float32")
    assert_computes(pack(source, tmp_path / "wide", "float32").folder, load_reference(plain))


def test_inputs_in_another_order_than_their_groups(tmp_path: Path) -> None:
    """`actorder` "group" of compressed-tensors, which 0.20 no longer reads: input i has the scale of group g_idx[i]."""
    source, plain = make_compressed(tmp_path / "model", F32, COMPRESSED["int4 g32 asymmetric"][0])
    tensors, decoded = read_tensors(source), read_tensors(plain)
    dice = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        columns = int(tensors[f"{stem}.weight_shape"][1])
        order = torch.randperm(columns, generator=dice)
        nibbles = tensors[name].view(torch.uint8)
        codes = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1)[:, order]
        tensors[name] = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)
        tensors[f"{stem}.weight_g_idx"] = (order // 32).int()
        decoded[f"{stem}.weight"] = decoded[f"{stem}.weight"][:, order]
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    source = write_checkpoint(tmp_path / "moved", tensors, source, quantization_config=config)
    plain = write_checkpoint(tmp_path / "decoded", decoded, plain)
    store = pack(source, tmp_path / "store")
    assert_holds(store, source, plain)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "torchao", "quark"])
def test_others_are_refused(method: str, tmp_path: Path) -> None:
    source = make_fused_checkpoint("qwen3_moe", tmp_path / "model")
    set_config(source, quantization_config={"quant_method": method, "bits": 4})
    for dtype in (None, "bfloat16"):
        refused(source, CheckpointError, rf"quant_method='{method}': packing cannot undo it, .*supported", dtype)


@pytest.mark.parametrize(
    ("name", "usual"),
    [("compressed_tensors", "compressed-tensors"), ("modelopt_fp4", "modelopt"), ("intel/auto-round", "auto-round")],
)
def test_methods_by_their_other_names(name: str, usual: str) -> None:
    """Both are refused for the same field that is not there."""
    said = []
    for method in (name, usual):
        with pytest.raises(UnsupportedModelError) as raised:
            layout_of({"quant_method": method}, "bfloat16")
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_three_dimensions_in_compressed_tensors_are_refused(tmp_path: Path) -> None:
    source, _ = make_compressed(tmp_path / "model", F32, scheme(FP8, "channel"))
    tensors = read_tensors(source)
    name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn)
    write_checkpoint(tmp_path / "spoilt", tensors | {name: tensors[name][None]}, source)
    stem = re.escape(name.removesuffix(".weight"))
    refused(tmp_path / "spoilt", CheckpointError, f"{stem}: 3 dimensions: a matrix of compressed-tensors has 2")


def test_experts_of_deepseek_v4_keep_their_fp4(tmp_path: Path) -> None:
    """Its config.json names their dtype beside the quantisation of the rest: MXFP4, a quarter of bfloat16."""
    model = every_family.make_model("deepseek_v4", moe_intermediate_size=32)
    model.save_pretrained(tmp_path / "plain")
    dice, tensors = torch.Generator().manual_seed(4), read_tensors(tmp_path / "plain")
    decoded = dict(tensors)
    for name in [name for name in tensors if re.search(r"\.experts\.\d+\.", name)]:
        rows, columns = tensors[name].shape
        codes = torch.randint(-128, 128, (rows, columns // 2), generator=dice, dtype=torch.int8)
        scales = torch.randint(118, 123, (rows, columns // 32), generator=dice, dtype=torch.uint8)
        decoded[name] = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        tensors |= {name: codes, name.replace(".weight", ".scale"): scales.view(torch.float8_e8m0fnu)}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    more = {"quantization_config": quantization, "expert_dtype": "fp4"}
    write_checkpoint(tmp_path / "model", tensors, tmp_path / "plain", **more)
    plain = write_checkpoint(tmp_path / "decoded", decoded, tmp_path / "plain")
    store = pack(tmp_path / "model", tmp_path / "store")
    assert store.manifest.stored_as == "mxfp4"
    assert_holds(store, tmp_path / "model", plain)
    assert_holds(pack(tmp_path / "model", tmp_path / "wide", "float32"), tmp_path / "model", plain, runs=False)
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "alone")
    for source in ("model", "alone"):
        assert needs_of(str(tmp_path / source)).stored_as == "mxfp4"
    set_config(tmp_path / "model", expert_dtype="fp8")
    refused(tmp_path / "model", CheckpointError, "must be FP8, as config.json has it", "float32")

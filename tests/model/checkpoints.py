"""Checkpoints in the layouts and quantisations that hubs hold, made from tiny models; and what stores must hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig, PreTrainedModel

from expertly.core.errors import ExpertlyError
from expertly.formats import FORMATS, expert_format
from expertly.model.conversion import Conversion
from expertly.model.packing import pack
from expertly.model.structure import ExpertsSite, build_meta_model, find_experts
from expertly.store.packed import PackedStore, tiles_name
from tests.families import FAMILIES, NUM_EXPERTS, Family, load_reference, made_once, make_checkpoint, make_model


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that is one file."""
    return load_file(folder / "model.safetensors")


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], source: Path, **config: Any) -> Path:
    """One file of `tensors` beside the other files of `source`, with `config` changed (None removes a field)."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json" and not path.name.endswith("index.json"):
            shutil.copy(path, folder / path.name)
    merged = json.loads((source / "config.json").read_text()) | config
    merged = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_fused_checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint whose tensors have the names and shapes of the module's parameters."""
    source = make_checkpoint(family, folder.with_name(f"{folder.name}-source"))
    state = load_reference(source).state_dict()
    return write_checkpoint(folder, {name: tensor.clone() for name, tensor in state.items()}, source)


@made_once
def make_mxfp4_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, intermediate: int = 128) -> Path:
    """gpt_oss as released: experts in blocks of 32 four-bit numbers with a scale each."""
    hidden = 64
    family = Family(
        "gpt_oss",
        3,
        config={
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 16,
        },
    )
    source = folder.with_name(f"{folder.name}-source")
    make_model(family, dtype=dtype).save_pretrained(source)
    tensors = read_tensors(source)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        del tensors[name]
        rows, columns = (2 * intermediate, hidden) if "gate_up" in name else (hidden, intermediate)
        shape = (NUM_EXPERTS, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(116, 122, shape, generator=generator, dtype=torch.uint8)
    return write_checkpoint(folder, tensors, source, quantization_config={"quant_method": "mxfp4"})


@made_once
def make_fp8_checkpoint(
    family: str,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    block: int | tuple[int, int] = 8,
    scale: str = "weight_scale_inv",
    **config: Any,
) -> Path:
    """Linear layers, those of experts too, in float8 with a scale a block, as DeepSeek-V3 is released. `scale`: the end
    of its name.
    """
    high, wide = block if isinstance(block, tuple) else (block, block)
    made = replace(FAMILIES[family], config=FAMILIES[family].config | config)
    source = make_checkpoint(made, folder.with_name(f"{folder.name}-source"), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, tensor in read_tensors(source).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.rand(-(-rows // high), -(-columns // wide), generator=generator) * 0.01 + 0.005
        codes = (tensor.float() / spread_blocks(scales, (high, wide), rows, columns)).clamp(-448, 448)
        tensors[name] = codes.to(torch.float8_e4m3fn)
        stem = name.removesuffix("weight")
        tensors[stem + scale] = scales / 4  # or a wide model would amplify what float32 rounds
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [high, wide]}
    return write_checkpoint(folder, tensors, source, quantization_config=quantization)


def spread_blocks(scales: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Each weight's scale, where each block of weights has one; the last of a row or column may be cut."""
    high, wide = min(block[0], rows), min(block[1], columns)
    return scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]


@made_once
def make_int4_checkpoint(
    folder: Path, dtype: torch.dtype = torch.bfloat16, group: int = 32, scales: torch.dtype = torch.bfloat16
) -> Path:
    """qwen3_moe in INT4 as compressed-tensors packs it: linear layers, those of experts too, but not lm_head."""
    from tests.formats.compressed import make_compressed

    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "format": "pack-quantized"}
    return make_compressed(folder, dtype, scheme | {"scales": scales}, group=group, of_expert=4)[0]


def load_dequantised(source: Path, **options: Any) -> PreTrainedModel:
    """The model that transformers makes of a checkpoint when it dequantises, all in one dtype."""
    quantization = json.loads((source / "config.json").read_text()).get("quantization_config", {})
    if quantization.get("quant_method") != "compressed-tensors":
        return load_reference(source, **options)
    model = load_reference(source, quantization_config=CompressedTensorsConfig(dequantize=True), **options)
    return model.to(model.dtype)  # experts were in that of their scales


@cache  # make_checkpoint knows a family again
def in_groups(group: int, of_expert: int = 4) -> Family:
    """qwen3_moe of sizes that are whole groups, its experts of `of_expert`."""
    head_dim = group // 4  # of 4 heads
    config = {
        "hidden_size": max(64, group),
        "moe_intermediate_size": of_expert * group,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "head_dim": head_dim,
        "num_attention_heads": 4,
        "norm_topk_prob": True,
    }
    return Family("qwen3_moe", 3, config=config)


def set_config(source: Path, **fields: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(source: Path, function: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    """Rewrite each tensor of a one-file checkpoint; None drops it."""
    changed = {name: function(name, tensor) for name, tensor in read_tensors(source).items()}
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})


def canonical(site: ExpertsSite, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[E, I, M, H] from a loaded model's parameters, worked out apart from the packer."""
    up, down = (state[name] for name in site.parameters)
    if site.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    rows = [up]
    if site.has_gate:
        rows = list(up.chunk(2, dim=1)) if site.is_concatenated else [up[:, 0::2], up[:, 1::2]]
    return torch.stack([*rows, down.transpose(1, 2)], dim=2)


def refused(source: Path, error: type[ExpertlyError], message: str, dtype: str | None = None) -> str:
    """Packing it fails with this message, which is returned, and leaves nothing beside it."""
    before = set(source.parent.iterdir())
    with pytest.raises(error, match=message) as raised:
        pack(source, source.with_name("refused"), dtype)
    assert set(source.parent.iterdir()) == before
    return str(raised.value)


def read_experts(store: PackedStore, layer: int) -> torch.Tensor:
    """[E, I, M, H]; those in a weight format as they are computed with."""
    with safe_open(store.extents[layer][0], "pt") as file:
        experts = file.get_tensor("experts")
    shape = store.manifest.layers[layer]
    if not shape.format:
        return experts
    form, blocks = expert_format(shape.format), experts.reshape(shape.num_experts, -1, shape.block_nbytes)
    weights = torch.stack([form.decode(block, shape.num_matrices, shape.hidden_size) for block in blocks])
    return weights.to(getattr(torch, store.manifest.dtype))


def assert_holds_what_transformers_loads(
    store: PackedStore, source: Path, reference: PreTrainedModel | None = None, **load: Any
) -> None:
    """Experts and dense tensors, bit for bit; all parameters of the model are there."""
    reference = reference or load_reference(source, **load)
    state = reference.state_dict()
    sites = find_experts(reference, 1)
    assert store.manifest.sites == tuple(site.name for site in sites)
    for layer, site in enumerate(sites):
        stored = read_experts(store, layer)
        expected = canonical(site, state)
        assert torch.equal(stored.view(torch.uint8), expected.to(stored.dtype).contiguous().view(torch.uint8)), (
            site.name
        )
    conversion = Conversion(build_meta_model(store.folder))  # an unquantised model's names
    dense = load_file(store.folder / "dense.safetensors")
    for path, form in store.manifest.dense_formats.items():
        weight = FORMATS[form].decode(dense.pop(tiles_name(path))).to(state[f"{path}.weight"].dtype)
        assert torch.equal(weight, state[f"{path}.weight"]), path
    for name, tensor in dense.items():
        target, pattern = conversion.target(name)
        if pattern is None:
            assert torch.equal(tensor.to(state[target].dtype), state[target]), name
    experts = {name for site in sites for name in site.parameters}
    tied = reference.all_tied_weights_keys
    made = {conversion.target(name)[0] for name in dense} | {f"{path}.weight" for path in store.manifest.dense_formats}
    assert {n for n, _ in reference.named_parameters()} - made - experts - set(tied) - set(tied.values()) == set()

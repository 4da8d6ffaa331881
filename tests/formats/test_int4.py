"""INT4 of compressed-tensors: what its checkpoints may say, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import generate, make_prompts
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    load_dequantised,
    make_int4_checkpoint,
    read_tensors,
    refused,
    set_config,
)


@pytest.mark.parametrize("group", [32, 128])
def test_scales_in_float16(group: int, tmp_path: Path) -> None:
    """The bytes are kept where the model computes in that dtype, or in float32; else they are converted."""
    source = make_int4_checkpoint(tmp_path / "source", torch.float32, group, torch.float16)
    name, prompts = f"int4_g{group}_f16", make_prompts(1, length=14)
    tokens = generate(load_dequantised(source), prompts)
    for dtype, stored_as in (("float32", name), ("float16", name), ("bfloat16", "bfloat16")):
        set_config(source, dtype=dtype)
        store = pack(source, tmp_path / dtype)
        assert (store.manifest.stored_as, store.manifest.dtype) == (stored_as, dtype)
        assert_holds_what_transformers_loads(store, source, load_dequantised(source, dtype=getattr(torch, dtype)))
    with loaded(tmp_path / "float32", memory="25%") as model:
        assert generate(model, prompts) == tokens


def without(*endings: str) -> Any:
    return lambda name, tensor: None if name.endswith(endings) else tensor


def spoiled(ending: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda name, tensor: spoil(tensor) if name.endswith(ending) else tensor


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("1.mlp.experts.3.up_proj.weight_scale"), r"experts\.3\.up_proj.*there is no .*up_proj\.weight_scale"),
        (without("self_attn.q_proj.weight_scale"), r"there is no .*self_attn\.q_proj\.weight_scale beside it"),
        (without("down_proj.weight_shape"), r"there is no .*down_proj\.weight_shape beside it"),
        (
            spoiled("down_proj.weight_scale", lambda one: one[:, :2]),
            r"BF16 \[64, 2\].*must be BF16 \[64, 4\]",
        ),
        (spoiled("down_proj.weight_scale", lambda one: one.float()), r"weight_scale.*F32 .*must be BF16"),
        (spoiled("0.down_proj.weight_scale", lambda one: one.half()), r"down_proj\.weight_scale.*unlike"),
        (
            spoiled("down_proj.weight_scale", lambda one: one * torch.nan),
            "a scale of nan in size: must be at most",
        ),
        (spoiled("down_proj.weight_scale", lambda one: one + 1e9), r"a scale of \S+e\+08 in size: must be at most"),
        (spoiled("up_proj.weight_packed", lambda one: one[:, :4]), r"weight_packed.*I32 .*must be I32 \[128, 8\]"),
        (spoiled("2.up_proj.weight_shape", lambda one: one * 2), r"a shape of \[256, 128\]: must be \[128, 64\]"),
    ],
)
def test_a_damaged_int4_checkpoint_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    source = make_int4_checkpoint(tmp_path / "source")
    change(source, damage)
    refused(source, CheckpointError, message)


def test_other_tensors_of_an_int4_matrix_are_refused(tmp_path: Path) -> None:
    for ending, message in (
        ("weight_zero_point", "of asymmetric weights"),
        ("weight_g_idx", r"inputs in another order \(actorder 'group'\)"),
        ("weight_global_scale", "of NVFP4"),
    ):
        source = make_int4_checkpoint(tmp_path / ending)
        tensors = read_tensors(source)
        tensors[f"model.layers.0.mlp.experts.0.down_proj.{ending}"] = torch.zeros(4)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        refused(source, CheckpointError, rf"down_proj\.{ending}': {message}.*accepted .*weight_scale")


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("format", "nvfp4-pack-quantized", "'pack-quantized'"),
        ("format", "int-quantized", "'pack-quantized'"),
        ("config_groups", {}, "an object of one group"),
        ("config_groups.group_0.weights", None, "an object with `weights`"),
        ("config_groups.group_0.input_activations", {"num_bits": 8}, "None"),
        ("config_groups.group_0.weights.num_bits", 8, "4"),
        ("config_groups.group_0.weights.type", "float", "'int'"),
        ("config_groups.group_0.weights.strategy", "channel", "'group'"),
        ("config_groups.group_0.weights.group_size", 64, "32 or 128"),
        ("config_groups.group_0.weights.symmetric", False, "True"),
        ("config_groups.group_0.weights.actorder", "group", "None or .*'weight'"),
        ("transform_config", {"config_groups": {"u": {}}}, "None or {}"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused(field: str, value: Any, accepted: str, tmp_path: Path) -> None:
    source = make_int4_checkpoint(tmp_path / "source")
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    *parents, last = field.split(".")
    fields = quantization
    for name in parents:
        fields = fields[name]
    fields[last] = value
    set_config(source, quantization_config=quantization)
    for dtype in (None, "bfloat16"):
        refused(source, UnsupportedModelError, rf"{last}.*must be {accepted}|group_0=.*must be {accepted}", dtype)

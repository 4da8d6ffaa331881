"""GPTQ and AWQ: what their checkpoints may say, what is refused, and that our reference is the library's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import generate, logits_of, make_prompts
from tests.formats.gptq_files import (
    awq_tensors,
    awq_weight,
    gptq_tensors,
    gptq_weight,
    load_gptq,
    make_awq_checkpoint,
    make_gptq_checkpoint,
    rounded,
)
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    refused,
    set_config,
)

KINDS: dict[str, Callable[..., Path]] = {
    "gptq": make_gptq_checkpoint,
    "gptq 32": partial(make_gptq_checkpoint, group=32),
    "gptq_v2 32": partial(make_gptq_checkpoint, group=32, version="gptq_v2"),
    "gptq asymmetric": partial(make_gptq_checkpoint, symmetric=False),
    "gptq_v2 asymmetric 32": partial(make_gptq_checkpoint, group=32, symmetric=False, version="gptq_v2"),
    "awq": make_awq_checkpoint,
    "awq 32": partial(make_awq_checkpoint, group=32),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("gptq", "float32"), ("gptq 32", "bfloat16"), ("gptq_v2 32", "float16"), ("gptq asymmetric", "float32")),
        *(("gptq asymmetric", "bfloat16"), ("gptq_v2 asymmetric 32", "float16")),
        *(("awq", "float16"), ("awq", "bfloat16"), ("awq 32", "float32")),
    ],
)
def test_weights_are_those_of_the_library(kind: str, dtype: str, tmp_path: Path) -> None:
    """Of experts, whose bytes are kept, and of dense layers, which are dequantised; to the bit."""
    source = KINDS[kind](tmp_path / "source", getattr(torch, dtype))
    store, reference = pack(source, tmp_path / "store"), load_gptq(source)
    name = "int4_g32" if "32" in kind else "int4_g128"
    name += "_zeros" if "awq" in kind or "asymmetric" in kind else ""
    name += "" if dtype == "bfloat16" else "_f16"
    assert (store.manifest.stored_as, store.manifest.dtype) == (name, dtype)
    assert "quantization_config" not in store.config
    assert_holds_what_transformers_loads(store, source, reference)
    prompts = make_prompts(1, length=14)
    logits = logits_of(reference, prompts)
    with loaded(store.folder, memory="50%") as model:
        near = 2e-5 if dtype == "float32" else 2e-2
        torch.testing.assert_close(logits_of(model, prompts), logits, rtol=0, atol=near * logits.abs().max().item())
        if dtype == "float32":
            assert generate(model, prompts) == generate(reference, prompts)


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [("gptq", ["float16", "float32"]), ("gptq asymmetric", ["bfloat16"]), ("awq", ["bfloat16", "float32"])],
)
def test_a_named_dtype_undoes_it(kind: str, dtypes: list[str], tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path / "source")
    for dtype in dtypes:
        store = pack(source, tmp_path / dtype, dtype)
        assert store.manifest.stored_as == dtype
        assert_holds_what_transformers_loads(store, source, load_gptq(source, getattr(torch, dtype)))


# -- zero points, and what is refused ----------------------------------------------------------------------------------


def on(ending: str, spoil: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    return lambda name, tensor: spoil(tensor) if name.endswith(ending) else tensor


EXPERT = "1.mlp.experts.3.down_proj"


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("gptq", on(f"{EXPERT}.scales", lambda one: None), rf"{EXPERT}\.\w+': there is no .*down_proj.scales beside"),
        ("awq", on("q_proj.qzeros", lambda one: None), r"q_proj\.\w+': there is no .*q_proj\.qzeros beside it"),
        ("gptq", on("down_proj.scales", lambda one: one[:2]), r"scales.*: F16 \[2, 128\] .*must be .* \[4, 128\]"),
        ("gptq", on("up_proj.qweight", lambda one: one[:4]), r"qweight.*: I32 \[4, 512\] .*must be I32 \[16, 512\]"),
        ("awq", on("up_proj.qweight", lambda one: one.T), r"qweight.*: I32 \[64, 128\] .*must be I32 \[128, 64\]"),
        ("awq", on("down_proj.qzeros", lambda one: one[:, :3]), r"qzeros.*: I32 \[4, 3\] .*must be I32 \[4, 16\]"),
        ("awq", on("o_proj.qzeros", lambda one: one[:, :3]), r"\.qzeros: \[1, 3\]: must be \[1, 16\]"),
        ("gptq", on("down_proj.scales", lambda one: one.float()), r"scales.*: F32 .*must be F16 or BF16"),
        ("awq", on(f"{EXPERT}.scales", lambda one: one * torch.nan), f"expert 3 of .*{EXPERT}.*a scale of nan in size"),
        (
            "gptq",
            on(f"{EXPERT}.qzeros", lambda one: one + 0x300),
            f"expert 3 of .*{EXPERT}.*a zero point of 11: must be 8, as quantization_config.sym is true",
        ),
        (
            "gptq asymmetric",
            on(f"{EXPERT}.qzeros", lambda one: one | 0xF0),
            f"expert 3 of .*{EXPERT}.*a zero point of 16, stored as 15: must be 1 to 15",
        ),
        (
            "gptq 32",
            on(f"{EXPERT}.g_idx", lambda one: one.flip(0)),
            rf"expert 3 of .*{EXPERT}.*g_idx: inputs in another order than their groups of 32 \(desc_act\)",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(kind: str, damage: Any, message: str, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path / "source")
    change(source, damage)
    refused(source, CheckpointError, message)


def test_zero_points_of_zero_that_gptqmodel_stores(tmp_path: Path) -> None:
    """Less one of a whole word, which borrows from the next nibble; it adds one again where it loads."""
    source = make_gptq_checkpoint(tmp_path / "source", symmetric=False)
    change(source, on("qzeros", lambda one: (one & ~0xFF0) - 0x110))  # the second and third of a word: 0 less one
    set_quantization(source, meta={"quantizer": ["gptqmodel:7.7.0"]})
    store = pack(source, tmp_path / "store")
    assert_holds_what_transformers_loads(store, source, load_gptq(source))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scales_in_bfloat16(dtype: str, tmp_path: Path) -> None:
    """As GPTQModel stores those of a bfloat16 model in AWQ; computed in float16 where that is not the model's."""
    source = make_awq_checkpoint(tmp_path / "source", getattr(torch, dtype))
    change(source, on(".scales", lambda one: one.bfloat16()))
    store = pack(source, tmp_path / "store")
    assert store.manifest.stored_as == ("int4_g128_zeros" if dtype == "bfloat16" else "int4_g128_zeros_f16")
    assert_holds_what_transformers_loads(store, source, load_gptq(source))


def set_quantization(source: Path, **fields: Any) -> None:
    found = json.loads((source / "config.json").read_text())["quantization_config"] | fields
    set_config(source, quantization_config={key: value for key, value in found.items() if value != "missing"})


@pytest.mark.parametrize(
    ("kind", "field", "value", "accepted"),
    [
        ("gptq", "bits", 8, "4"),
        ("gptq", "bits", "missing", "4"),
        ("gptq", "group_size", -1, "32 or 128"),
        ("gptq", "group_size", 64, "32 or 128"),
        ("gptq", "checkpoint_format", "marlin", "'gptq' or 'gptq_v2'"),
        ("gptq", "sym", "yes", "True or False or None"),
        ("gptq", "is_marlin_format", True, "False or None"),
        ("gptq", "rotation", "hadamard", "None"),
        ("awq", "bits", 3, "4"),
        ("awq", "group_size", 64, "32 or 128"),
        ("awq", "version", "gemv", "'gemm'"),
    ],
)
def test_other_schemes_are_refused_by_field(kind: str, field: str, value: Any, accepted: str, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path / "source")
    set_quantization(source, **{field: value})
    for dtype in (None, "bfloat16"):
        refused(source, UnsupportedModelError, rf"quantization_config\.{field}=.*: must be {accepted}", dtype)


@pytest.mark.parametrize("field", ["bits", "group_size", "version"])
def test_what_transformers_assumes_of_awq(field: str, tmp_path: Path) -> None:
    source = make_awq_checkpoint(tmp_path / "source")
    set_quantization(source, **{field: "missing"})
    assert pack(source, tmp_path / "store").manifest.stored_as == "int4_g128_zeros_f16"


# -- our reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 128])
def test_packing_and_weights_are_those_of_gptqmodel(group: int, dtype: torch.dtype) -> None:
    """By its layers for any processor: what they pack, and their products with a unit matrix."""
    pytest.importorskip("gptqmodel", reason="its own reading of these checkpoints")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    options = {"bits": 4, "group_size": group, "sym": False, "desc_act": False, "in_features": 256, "out_features": 64}
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    codes, scales, zeros = rounded(weight, group, symmetric=False)
    zeros[0, :4] = torch.tensor([0, 15, 0, 3])
    linear, unit = torch.nn.Linear(256, 64, bias=False), torch.eye(256, dtype=dtype)

    layer = TorchLinear(**options)
    tensors = gptq_tensors(codes, scales, zeros, "gptq_v2")
    linear.weight.data = gptq_weight(tensors, "gptq_v2").float()
    layer.pack_original(linear, scales.T.float(), zeros.T, tensors["g_idx"])
    assert all(torch.equal(getattr(layer, end), tensor) for end, tensor in tensors.items())
    for version in ("gptq_v2", "gptq"):
        tensors = gptq_tensors(codes, scales, zeros, version)
        layer.load_state_dict(tensors, strict=False)
        if version == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
        layer.eval()._init_wf_unsqueeze_buffers()
        assert torch.equal(layer(unit).T, gptq_weight(tensors, version).to(dtype))

    awq = AwqTorchLinear(**options, register_buffers=True)
    tensors = awq_tensors(codes, scales, zeros)
    linear.weight.data = awq_weight(tensors).float()
    awq.pack(linear, scales.T.float(), zeros.T)
    assert all(torch.equal(getattr(awq, end), tensor) for end, tensor in tensors.items())
    awq.load_state_dict(tensors)
    computed = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    assert torch.equal(awq.eval()(unit).T, awq_weight(tensors, computed).to(dtype))

"""GPTQ and AWQ: checkpoints that the libraries made, what they may say, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import generate, logits_of, make_prompts
from tests.formats.gptq_files import library_checkpoint, load_gptq
from tests.model.checkpoints import assert_holds_what_transformers_loads, change, refused, set_config

KEPT = {
    "gptq": "int4_g32",
    "gptq_v2": "int4_g32_zeros",
    "gptq_asymmetric": "int4_g128_zeros",
    "awq": "int4_g128_zeros",
    "autoawq": "int4_g32_zeros",
}
DTYPES = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype) for name in KEPT for dtype in DTYPES if (name, dtype) != ("autoawq", "bfloat16")
    ],  # computes in half
)
def test_weights_are_those_of_the_library(name: str, dtype: str, tmp_path: Path) -> None:
    """Of experts, whose bytes are kept, and of dense layers; to the bit."""
    source = library_checkpoint(tmp_path / "source", getattr(torch, dtype), name)
    store, reference = pack(source, tmp_path / "store"), load_gptq(source)
    kept = KEPT[name] + ("" if dtype == "bfloat16" else "_f16")
    assert (store.manifest.stored_as, store.manifest.dtype) == (kept, dtype)
    assert "quantization_config" not in store.config
    assert_holds_what_transformers_loads(store, source, reference)
    assert set(store.manifest.dense_formats.values()) == {kept}
    assert "lm_head" not in store.manifest.dense_formats, "it has 8 bits, or is not quantised"
    prompts = make_prompts(1, length=14)
    logits = logits_of(reference, prompts)
    with loaded(store.folder, memory="60%") as model:
        near = 2e-5 if dtype == "float32" else 2e-2
        torch.testing.assert_close(logits_of(model, prompts), logits, rtol=0, atol=near * logits.abs().max().item())
        if dtype == "float32":
            assert generate(model, prompts) == generate(reference, prompts)


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "gptq_desc_act", "awq", "autoawq"])
def test_a_named_dtype_undoes_it(name: str, tmp_path: Path) -> None:
    source = library_checkpoint(tmp_path / "source", name=name)
    for dtype in DTYPES[: 1 if name == "autoawq" else 3]:
        store = pack(source, tmp_path / dtype, dtype)
        assert store.manifest.stored_as == dtype
        assert_holds_what_transformers_loads(store, source, load_gptq(source, getattr(torch, dtype)))


# -- what is refused ---------------------------------------------------------------------------------------------------


def on(ending: str, spoil: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    return lambda name, tensor: spoil(tensor) if name.endswith(ending) else tensor


EXPERT = "1.mlp.experts.3.down_proj"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gptq", on(f"{EXPERT}.scales", lambda one: None), rf"{EXPERT}\.\w+': there is no .*down_proj.scales beside"),
        ("autoawq", on("q_proj.qzeros", lambda one: None), r"q_proj\.\w+': there is no .*q_proj\.qzeros beside it"),
        ("gptq", on("down_proj.scales", lambda one: one[:2]), r"scales.*: F16 \[2, 64\] .*must be .* \[4, 64\]"),
        ("gptq", on("up_proj.qweight", lambda one: one[:4]), r"qweight.*: I32 \[4, 128\] .*must be I32 \[8, 128\]"),
        ("autoawq", on("up_proj.qweight", lambda one: one.T), r"qweight.*: I32 \[16, 64\] .*must be I32 \[64, 16\]"),
        ("autoawq", on("down_proj.qzeros", lambda one: one[:, :3]), r"qzeros.*: I32 \[4, 3\] .*must be I32 \[4, 8\]"),
        ("autoawq", on("o_proj.qzeros", lambda one: one[:, :3]), r"\.qzeros: \[2, 3\]: must be \[2, 8\]"),
        ("gptq", on("o_proj.qzeros", lambda one: one[:, :3]), r"\.qzeros: \[2, 3\]: must be \[2, 8\]"),
        ("gptq", on("lm_head.g_idx", lambda one: one[0]), r"lm_head.*\.qweight: \[16, 128\]: must be \[0, 128\]"),
        (
            "gptq",
            on("lm_head.qzeros", lambda one: one.float()),
            r"lm_head.*\.qzeros: torch.float32 .*must be torch.int32",
        ),
        ("gptq", on("lm_head.g_idx", lambda one: one * 2), "lm_head.*g_idx: from 0 to 2: must be from 0 to 1"),
        (
            "gptq",
            on("lm_head.qzeros", lambda one: one + 3),
            "lm_head.*a zero point of 131: must be 128, as .*sym is true",
        ),
        ("gptq", on("lm_head.scales", lambda one: one * torch.nan), "lm_head.*a scale of nan in size"),
        ("gptq", on("down_proj.scales", lambda one: one.float()), r"scales.*: F32 .*must be F16 or BF16"),
        (
            "autoawq",
            on(f"{EXPERT}.scales", lambda one: one * torch.nan),
            f"expert 3 of .*{EXPERT}.*a scale of nan in size",
        ),
        (
            "gptq",
            on(f"{EXPERT}.qzeros", lambda one: one + 0x300),
            f"expert 3 of .*{EXPERT}.*a zero point of 11: must be 8, as quantization_config.sym is true",
        ),
        (
            "gptq_desc_act",
            lambda name, tensor: tensor,
            r"expert 0 of .*g_idx: inputs in another order than their groups of 32 \(desc_act\).* name a dtype",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    source = library_checkpoint(tmp_path / "source", name=name)
    change(source, damage)
    refused(source, CheckpointError, message)


def set_quantization(source: Path, **fields: Any) -> None:
    found = json.loads((source / "config.json").read_text())["quantization_config"] | fields
    set_config(source, quantization_config={key: value for key, value in found.items() if value != "missing"})


def test_a_zero_point_that_readers_understand_differently_is_refused(tmp_path: Path) -> None:
    """GPTQModel stores 0 less one, from the whole word; AutoGPTQ reads that as 16."""
    source = library_checkpoint(tmp_path / "source", name="gptq_asymmetric")
    set_quantization(source, meta="missing")
    for dtype in (None, "float16"):
        refused(source, CheckpointError, "a zero point of 16, stored as 15: must be 1 to 15", dtype)


@pytest.mark.parametrize(
    ("name", "field", "value", "accepted"),
    [
        ("gptq", "bits", 8, "4"),
        ("gptq", "bits", "missing", "4"),
        ("gptq", "group_size", -1, "32 or 128"),
        ("gptq", "group_size", 64, "32 or 128"),
        ("gptq", "checkpoint_format", "marlin", "'gptq' or 'gptq_v2'"),
        ("gptq", "sym", "yes", "True or False or None"),
        ("gptq", "is_marlin_format", True, "False or None"),
        ("gptq", "rotation", "hadamard", "None"),
        ("autoawq", "bits", 3, "4"),
        ("autoawq", "group_size", 64, "32 or 128"),
        ("autoawq", "version", "gemv", "'gemm'"),
    ],
)
def test_other_schemes_are_refused_by_field(name: str, field: str, value: Any, accepted: str, tmp_path: Path) -> None:
    source = library_checkpoint(tmp_path / "source", name=name)
    set_quantization(source, **{field: value})
    for dtype in (None, "bfloat16"):
        refused(source, UnsupportedModelError, rf"quantization_config\.{field}=.*: must be {accepted}", dtype)


@pytest.mark.parametrize("field", ["bits", "group_size", "version"])
def test_what_transformers_assumes_of_awq(field: str, tmp_path: Path) -> None:
    source = library_checkpoint(tmp_path / "source", torch.float16, "awq")
    set_quantization(source, **dict.fromkeys((field, "format", "checkpoint_format"), "missing"))
    assert pack(source, tmp_path / "store").manifest.stored_as == "int4_g128_zeros_f16"

"""INT4 in groups of inputs (compressed-tensors, GPTQ, AWQ): what checkpoints may say, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.formats import layouts
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import generate, logits_of, make_prompts
from tests.formats.references import library_checkpoint, load_gptq
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    make_int4_checkpoint,
    read_tensors,
    refused,
    set_config,
)

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


@pytest.mark.parametrize("name", ["gptq", "gptq_desc_act", "awq", "autoawq"])
def test_a_named_dtype_undoes_it(name: str, tmp_path: Path) -> None:
    source = library_checkpoint(tmp_path / "source", name=name)
    for dtype in DTYPES[: 1 if name == "autoawq" else 3]:
        store = pack(source, tmp_path / dtype, dtype)
        assert store.manifest.stored_as == dtype
        assert_holds_what_transformers_loads(store, source, load_gptq(source, getattr(torch, dtype)))


# -- what is refused ---------------------------------------------------------------------------------------------------


def on(ending: str, spoil: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    return lambda name, tensor: spoil(tensor) if name.endswith(ending) else tensor


def checkpoint(folder: Path, name: str) -> Path:
    return make_int4_checkpoint(folder) if name == "int4" else library_checkpoint(folder, name=name)


EXPERT = "1.mlp.experts.3.down_proj"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gptq", on(f"{EXPERT}.scales", lambda one: None), rf"{EXPERT}\.\w+': there is no .*down_proj.scales beside"),
        ("autoawq", on("q_proj.qzeros", lambda one: None), r"q_proj\.\w+': there is no .*q_proj\.qzeros beside it"),
        ("gptq", on("down_proj.scales", lambda one: one[:2]), r"down_proj.qzeros': I32 \[4, 8\]: must be \[2, 8\] for"),
        ("gptq", on("up_proj.qweight", lambda one: one[:4]), r"up_proj.g_idx': I32 \[64\]: must be \[32\] for"),
        ("autoawq", on("up_proj.qweight", lambda one: one.T), r"\.scales': F16 \[2, 128\]: must be \[2, 512\]"),
        ("autoawq", on("down_proj.qzeros", lambda one: one[:, :3]), r"qzeros': I32 \[4, 3\]: must be \[4, 8\]"),
        ("autoawq", on("o_proj.qzeros", lambda one: one[:, :3]), r"\.qzeros': I32 \[2, 3\]: must be \[2, 8\]"),
        ("gptq", on("lm_head.g_idx", lambda one: one[0]), r"lm_head.g_idx': I32 \[\]: must be \[64\]"),
        ("gptq", on("lm_head.g_idx", lambda one: one * 2), "lm_head.*g_idx: from 0 to 2: must be from 0 to 1"),
        (
            "gptq",
            on("lm_head.qzeros", lambda one: one + 3),
            "lm_head.*a zero point of 131: must be 128, as .*sym is true",
        ),
        ("gptq", on("down_proj.scales", lambda one: one.float()), r"scales.*: F32 .*must be F16 or BF16"),
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
        ("int4", on("1.mlp.experts.3.up_proj.weight_scale", lambda one: None), r"there is no .*up_proj\.weight_scale"),
        ("int4", on("down_proj.weight_shape", lambda one: None), r"there is no .*down_proj\.weight_shape beside it"),
        ("int4", on("down_proj.weight_scale", lambda one: one[:, :2]), r"\[64, 2\]: must be \[64, 4\] for"),
        ("int4", on("down_proj.weight_scale", lambda one: one.double()), r"_scale.*F64 .*: must be BF16 or F16 or F32"),
        ("int4", on("0.down_proj.weight_scale", lambda one: one.half()), r"down_proj\.weight_scale.*unlike"),
        ("int4", on("down_proj.weight_scale", lambda one: one + 1e9), r"a scale of \S+e\+08 in size: must be at most"),
        ("int4", on("up_proj.weight_packed", lambda one: one[:, :4]), r"_scale': BF16 \[128, 2\]: must be \[128, 1\]"),
        ("int4", on("2.up_proj.weight_shape", lambda one: one * 2), r"a shape of \[256, 128\]: must be 128 rows"),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", name)
    change(source, damage)
    refused(source, CheckpointError, message)


def set_quantization(source: Path, **fields: Any) -> None:
    """Names of fields in others have dots."""
    quantization = json.loads((source / "config.json").read_text())["quantization_config"]
    for field, value in fields.items():
        *parents, last = field.split(".")
        within = quantization
        for name in parents:
            within = within[name]
        within[last] = value
    kept = {key: value for key, value in quantization.items() if value != "missing"}
    set_config(source, quantization_config=kept)


def test_a_zero_point_that_readers_understand_differently_is_refused(tmp_path: Path) -> None:
    """GPTQModel stores 0 less one, from the whole word; AutoGPTQ reads that as 16."""
    source = library_checkpoint(tmp_path / "source", name="gptq_asymmetric")
    set_quantization(source, meta="missing")
    for dtype in (None, "float16"):
        refused(source, CheckpointError, "a zero point of 16, stored as 15: must be 1 to 15", dtype)


@pytest.mark.parametrize(
    ("name", "field", "value", "accepted"),
    [
        ("gptq", "bits", 3, "2 or 4 or 8"),
        ("gptq", "group_size", 0, "a whole number above 0, or -1"),
        ("gptq", "dynamic", {"+:.*down_proj": {"bits": 5}}, "2 or 4 or 8"),
        ("gptq", "checkpoint_format", "marlin", "'gptq' or 'gptq_v2'"),
        ("gptq", "sym", "yes", "True or False or None"),
        ("gptq", "rotation", "hadamard", "None"),
        ("autoawq", "bits", 3, "4"),
        ("autoawq", "version", "gemv", "'gemm'"),
        ("int4", "config_groups.group_0.format", "marlin-24", "'pack-quantized' or "),
        ("int4", "config_groups", {}, "an object of groups"),
        ("int4", "config_groups.group_0.weights", None, "an object of groups, one of them with `weights`"),
        ("int4", "config_groups.group_0.weights.num_bits", 1, "2 or 3 or 4 or 5 or 6 or 7 or 8"),
        ("int4", "config_groups.group_0.weights.type", "float", "'int'"),
        ("int4", "config_groups.group_0.weights.strategy", "token", "'group' or 'channel'"),
        ("int4", "config_groups.group_0.weights.group_size", -1, "a whole number above 0"),
        ("int4", "config_groups.group_0.weights.dynamic", True, "False or None"),
        ("int4", "config_groups.group_0.weights.actorder", "magic", "None or .*'group'"),
        ("int4", "transform_config", {"config_groups": {"u": {}}}, "none"),
    ],
)
def test_other_schemes_are_refused_by_field(name: str, field: str, value: Any, accepted: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", name)
    set_quantization(source, **{field: value})
    last = field.rpartition(".")[2]
    for dtype in (None, "bfloat16"):
        refused(source, UnsupportedModelError, rf"({last}|config_groups|group_0|bits)=.*must be {accepted}", dtype)


@pytest.mark.parametrize("field", ["bits", "group_size", "version"])
def test_what_transformers_assumes_of_awq(field: str, tmp_path: Path) -> None:
    source = library_checkpoint(tmp_path / "source", torch.float16, "awq")
    set_quantization(source, **dict.fromkeys((field, "format", "checkpoint_format"), "missing"))
    assert pack(source, tmp_path / "store").manifest.stored_as == "int4_g128_zeros_f16"


def test_other_tensors_of_an_int4_matrix_are_refused(tmp_path: Path) -> None:
    for ending in ("weight_zero_point", "weight_global_scale"):
        source = make_int4_checkpoint(tmp_path / ending)
        tensors = read_tensors(source)
        tensors[f"model.layers.0.mlp.experts.0.down_proj.{ending}"] = torch.zeros(4)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        refused(
            source, CheckpointError, rf"down_proj\.{ending}': quantization_config has none.*accepted: .*weight_scale"
        )


@pytest.mark.parametrize(
    ("pattern", "problem"), [(r"(?:[\w.]|[\w.]{2})*\d!?$", "takes more than 0.2 s"), ("(", "must be a pattern")]
)
def test_patterns_of_names_are_bounded(
    pattern: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few letters in a config can match for ever. Of GPTQ a pattern decides only whether bytes are kept."""
    monkeypatch.setattr(layouts, "PATTERN_S", 0.2)
    source = checkpoint(tmp_path / "int4", "int4")
    set_quantization(source, **{"config_groups.group_0.targets": [f"re:{pattern}"]})
    refused(source, CheckpointError, f"targets.*{problem}")
    source = checkpoint(tmp_path / "gptq", "gptq")
    set_quantization(source, dynamic={f"+:{pattern}": {"bits": 4}})
    if pattern == "(":
        refused(source, UnsupportedModelError, f"dynamic.*{problem}")
    else:
        assert pack(source, tmp_path / "store").manifest.stored_as == "float16"

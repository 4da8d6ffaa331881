"""Quantised checkpoints that people have: decoded to the bit as who made them does, and computed with losslessly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import generate, load_reference, logits_of, make_prompts
from tests.formats.compressed import make_compressed
from tests.model.checkpoints import assert_holds_what_transformers_loads

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = {"num_bits": 8, "type": "float", "format": "float-quantized"}
INT4 = {"num_bits": 4, "type": "int", "format": "pack-quantized", "scales": BF16}
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}

COMPRESSED: dict[str, tuple[tuple[dict[str, Any], ...], str, str]] = {
    "fp8 a channel": (
        ({**FP8, "strategy": "channel", "scales": BF16, "activations": PER_TOKEN},),
        "float32",
        "bfloat16",
    ),
    "fp8 a tensor": (({**FP8, "strategy": "tensor", "scales": F32, "activations": PER_TENSOR},), "fp8", "fp8"),
    "fp8 a tensor, bfloat16": (({**FP8, "strategy": "tensor", "scales": BF16},), "float32", "fp8"),
    "fp8 blocks": (({**FP8, "strategy": "block", "block_structure": [128, 128], "scales": F32},), "fp8", "fp8"),
    "fp8 small blocks": (
        ({**FP8, "strategy": "block", "block_structure": [64, 32], "scales": F32},),
        "float32",
        "bfloat16",
    ),
    "int4 g64": (({**INT4, "strategy": "group", "group_size": 64},), "int4_g32", "int4_g32"),
    "int4 a channel": (({**INT4, "strategy": "channel"},), "int4_g128", "int4_g128"),
    "int4 g32 asymmetric": (
        ({**INT4, "strategy": "group", "group_size": 32, "symmetric": False},),
        "int4_g32_zeros",
        "int4_g32_zeros",
    ),
    "int4 a channel, asymmetric": (
        ({**INT4, "strategy": "channel", "symmetric": False},),
        "int4_g128_zeros",
        "int4_g128_zeros",
    ),
    "int4 float16": (({**INT4, "strategy": "group", "group_size": 128, "scales": F16},), "int4_g128_f16", "bfloat16"),
    "int8 a channel": (({**INT4, "num_bits": 8, "strategy": "channel"},), "float32", "bfloat16"),
    "int8 g128 asymmetric": (
        ({**INT4, "num_bits": 8, "strategy": "group", "group_size": 128, "symmetric": False},),
        "float32",
        "bfloat16",
    ),
    "int8 with activations": (
        (
            {
                **INT4,
                "num_bits": 8,
                "strategy": "channel",
                "format": "int-quantized",
                "activations": {**PER_TOKEN, "type": "int"},
            },
        ),
        "float32",
        "bfloat16",
    ),
    "int3": (({**INT4, "num_bits": 3, "strategy": "group", "group_size": 32},), "float32", "bfloat16"),
    "mxfp4": (
        (
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scales": F32,
                "format": "mxfp4-pack-quantized",
            },
        ),
        "mxfp4",
        "mxfp4",
    ),
}
"""Schemes, and what experts are stored as in models of float32 and of bfloat16."""

SYSTEMS = [(system, memory) for system in ("lru", "expertly-ahead") for memory in ("25%", "100%")]


def assert_runs(store_folder: Path, plain: Path) -> None:
    """The tokens and logits, of decode steps too, of the decoded model."""
    reference, prompts = load_reference(plain), make_prompts(2, length=14)
    tokens, logits = generate(reference, prompts), logits_of(reference, prompts)
    for system, memory in SYSTEMS:
        with loaded(store_folder, memory=memory, system=system) as model:
            assert generate(model, prompts) == tokens, f"{system} {memory}"
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=2e-5 * logits.abs().max())
            assert memory == "100%" or expertly.stats(model).as_dict()["phases"]["decode"]["bytes_loaded"] > 0


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_decodes_them_so(name: str, tmp_path: Path) -> None:
    schemes, *stored_as = COMPRESSED[name]
    for dtype, form in zip((F32, BF16), stored_as, strict=True):
        source, plain = make_compressed(tmp_path / f"{dtype}", dtype, *schemes, static="tensor" in name)
        store = pack(source, tmp_path / f"{dtype}-store")
        assert store.manifest.stored_as == form
        assert_holds_what_transformers_loads(store, source, load_reference(plain))
        if dtype == F32:
            assert_runs(store.folder, plain)

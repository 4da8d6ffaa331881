"""Quantised checkpoints that libraries made (checkpoints/README.md), and transformers' model of a dequantised one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from expertly.formats import layout_of
from expertly.model.packing import pack
from expertly.store.packed import PackedStore
from tests.families import load_reference
from tests.formats.gguf_files import load_gguf
from tests.model.checkpoints import load_dequantised, read_tensors, set_config, write_checkpoint

CHECKPOINTS = Path(__file__).with_name("checkpoints")


def library_checkpoint(folder: Path, dtype: torch.dtype | None = None, name: str = "gptq") -> Path:
    """A copy. `dtype`: that its config says, in place of that of the model that was quantised."""
    shutil.copytree(CHECKPOINTS / name, folder, dirs_exist_ok=True)
    if dtype is not None:
        set_config(folder, dtype=str(dtype).removeprefix("torch."))
    return folder


def load_gptq(source: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """transformers' model with the weights of the library, which has told a digest of each as it computes them."""
    config = json.loads((source / "config.json").read_text())
    dtype = dtype or getattr(torch, config["dtype"])
    computed = "bfloat16" if dtype == torch.bfloat16 else "float16"
    layout, tensors = layout_of(config["quantization_config"], computed), read_tensors(source)
    plain = {name: one for name, one in tensors.items() if not name.endswith(layout.suffixes)}
    for stem, digest in json.loads((source / "weights.json").read_text())[computed].items():
        weight = layout.weight({suffix: tensors[stem + suffix] for suffix in layout.suffixes}).contiguous()
        assert hashlib.sha256(weight.view(torch.uint8).numpy()).hexdigest()[:16] == digest, stem
        plain[f"{stem}.weight"] = weight
    assert len(plain) + (len(layout.suffixes) - 1) * sum(name.endswith(".qweight") for name in tensors) == len(tensors)
    folder = write_checkpoint(source.with_name(f"{source.name}-plain"), plain, source, quantization_config=None)
    return load_reference(folder, dtype=dtype)


class Packed:
    """Checkpoints by name and dtype, and their stores; each is made once."""

    def __init__(self, folder: Path, makers: Mapping[str, Callable[[Path, torch.dtype], Path]]) -> None:
        self._folder, self._makers = folder, makers
        self._made: dict[str, tuple[Path, PackedStore]] = {}

    def __call__(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, PackedStore]:
        if name.startswith("fp8"):
            pytest.importorskip("accelerate", reason="transformers' own reading of it needs accelerate")
        key = f"{name.replace(' ', '-')}-{dtype}"
        if key not in self._made:
            path = self._makers[name](self._folder / key, dtype)
            self._made[key] = path, pack(path, self._folder / f"{key}-store")
        return self._made[key]


@cache  # some take seconds to dequantise
def reference_of(source: Path) -> PreTrainedModel:
    if source.suffix == ".gguf":
        return load_gguf(source)
    method = json.loads((source / "config.json").read_text())["quantization_config"]["quant_method"]
    return load_gptq(source) if method in ("gptq", "awq") else load_dequantised(source)

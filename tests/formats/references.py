"""Quantised checkpoints that libraries made (checkpoints/README.md), and transformers' model of a dequantised one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import expertly
from expertly.formats import layout_of
from expertly.model.packing import pack
from expertly.store.packed import PackedStore
from tests.engine.observe import loaded
from tests.families import generate, load_reference, logits_of, make_prompts
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


SYSTEMS = [(system, memory, 1) for system in ("lru", "expertly-ahead") for memory in ("25%", "100%")]


def assert_computes(
    folder: Path,
    reference: PreTrainedModel,
    usages: Sequence[tuple[str, str, int]] = SYSTEMS,
    length: int = 14,
    near: float = 2e-5,
) -> list[dict[str, Any]]:
    """A store's tokens and logits are the reference's, by each system in so much memory with so many parts of experts;
    their statistics.
    """
    prompts, said = make_prompts(2, length=length), []
    tokens, logits = generate(reference, prompts), logits_of(reference, prompts)
    for system, memory, segments in usages:
        with loaded(folder, memory=memory, system=system, segments=segments) as model:
            assert generate(model, prompts) == tokens, f"{system} {memory} P={segments}"
            assert generate(model, prompts[:1]) == tokens[:1]
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=near * logits.abs().max())
            said.append(expertly.stats(model).as_dict())
        assert memory == "100%" or said[-1]["phases"]["decode"]["bytes_loaded"] > 0
    return said


def assert_is_the_same(path: Path, reference: Any, store: Path, near: float = 1e-4) -> list[int]:
    """Logits of prompts and of decode steps, and greedy tokens, are the reference's. Returns these."""
    prompts = make_prompts(1, length=40)
    logits, tokens = logits_of(reference, prompts), generate(reference, prompts)
    steps = decoded(reference, prompts[0], tokens[0])
    with loaded(pack(path, store).folder, memory="50%") as model:
        assert generate(model, prompts) == tokens
        for made, expected in ((logits_of(model, prompts), logits), (decoded(model, prompts[0], tokens[0]), steps)):
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=near * logits.abs().max())
    return tokens[0]


def decoded(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits [steps, V] of tokens after a prompt, one at a time through the cache."""
    with torch.no_grad():
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
        steps = [model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits for token in tokens]
    return torch.cat(steps)[:, -1]


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

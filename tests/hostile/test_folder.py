"""A checkpoint's weights and index, edited: what is said of a tensor that is not there is why, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hostile.cases import edited
from tests.hostile.conftest import RunChanged

WEIGHTS = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"

Tensors = dict[str, torch.Tensor]


def weights(change: Callable[[Tensors], Tensors | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(change(tensors) or tensors, folder / WEIGHTS, {"format": "pt"})

    return apply


def without(*parts: str) -> Callable[[Path], None]:
    return weights(lambda tensors: {k: v for k, v in tensors.items() if not any(part in k for part in parts)})


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return weights(lambda tensors: {k.replace(old, new): v for k, v in tensors.items()})


def header(name: str = "t", **entry: Any) -> Callable[[Path], None]:
    """A file with one tensor that its header describes so."""
    raw = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | entry}).encode()
    return lambda folder: (folder / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + b"x") and None


def index(**files: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        names = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names | files}))

    return apply


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def adapter_alone(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "maker/base"}')


def adapter_below(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir()
    (folder / WEIGHTS).rename(folder / "checkpoint-500" / "adapter_model.safetensors")


def pointer(name: str) -> Callable[[Path], None]:
    """What git leaves of a large file without git-lfs."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 4976698672\n"
    return lambda folder: (folder / name).write_text(text) and None


def as_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def lone_expert(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.0.up_proj.weight"] = torch.zeros(4, 4)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer that is not there": (
        edited("config.json", lambda config: config.update(num_hidden_layers=4)),
        "model: no tensor for model.layers.3.mlp.experts.gate_up_proj: its tensors are of 3 layers, from 0 to 2",
    ),
    "renamed experts": (
        renamed(".mlp.experts.", ".mlp.specialists."),
        "model.layers.0.mlp.specialists.0.down_proj.weight and tensors like it are none of a qwen3_moe",
    ),
    "an expert less": (
        without("layers.1.mlp.experts.3."),
        "model.layers.1.mlp.experts: the checkpoint has 7 experts, but config.json says 8 (tensor "
        "'model.layers.1.mlp.experts.0.gate_proj.weight' and its like): expert 3 is not in the checkpoint",
    ),
    "the odd expert is the first": (
        weights(lone_expert),
        "tensor 'model.layers.1.mlp.experts.0.up_proj.weight': F32 [4, 4] is unlike that of other experts",
    ),
    "an index that names a missing file": (index(b="b.safetensors"), "b.safetensors: missing shard: "),
    "a long name": (
        weights(lambda tensors: {k.replace("model.norm", "n" * 100_000): v for k, v in tensors.items()}),
        "a name of 100007 characters; accepted: 512 that can",
    ),
    "a name that writes to a terminal": (
        renamed("model.norm", "\x1b[31mnorm"),
        "\\x1b[31mnorm.weight': a name of 16 characters",
    ),
    "experts of two layouts": (
        weights(lambda tensors: tensors | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(8, 32, 32)}),
        "model.layers.1.mlp.experts",
    ),
    "whole numbers in a dense layer": (
        weights(lambda tensors: {k: v.to(torch.int64) if "q_proj" in k else v for k, v in tensors.items()}),
        "q_proj.weight': dtype='I64': must be BF16, F16, F32 or F64",
    ),
    **{
        f"a pointer as {name}": (pointer(name), f"{name}: is a git-lfs pointer, not the file: run git lfs pull")
        for name in (WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    },
    "a pointer as a shard": (
        both(index(b="b.safetensors"), pointer("b.safetensors")),
        "b.safetensors: is a git-lfs pointer",
    ),
    "an adapter alone": (
        adapter_alone,
        "model: an adapter (LoRA) of 'maker/base' without its model; merge it into that first",
    ),
    "an adapter alone in a folder": (adapter_below, "model: an adapter (LoRA) without its model; merge it into that"),
    "a pipe": (as_pipe, f"{WEIGHTS}: a pipe; must be a file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_is_said_with_its_cause(name: str, run_changed: RunChanged) -> None:
    change, sentence = REFUSED[name]
    ended = run_changed(change, is_large=name == "a long name")
    ended.is_refused(sentence)
    assert "0 others" not in ended.err and "model" in ended.err

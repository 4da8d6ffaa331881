"""Widen every expert of a qwen3_moe checkpoint, as the demo model is one, without changing the function it computes.

    python tools/inflate_model.py OUT --experts-gib 3 [--model DIR] [--layers N] [--dtype bfloat16]

Intermediate neurons are added whose gate and up rows are random, and whose down-projection is random, too, but so small
that no sum changes. The model's own neurons are spread evenly over the new width, so that a lost part of an expert
shows. The routing stays that of the trained model while the experts get as many bytes as asked for: for measurements of
size and speed. With `--layers` only the first layers are taken: they route as in the whole model, but what comes out of
the last of them was not meant to be read as a token.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DEMO = Path(__file__).parent.parent / "src" / "expertly" / "data" / "demo"
WIDTH_STEP = 128
SHARD_NBYTES = 1 << 28
TINY = 2.0**-80
"""A down-projection of this size adds nothing to any output of a usual size. float16 has none."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FAMILY, WIDTH_FIELD = "qwen3_moe", "moe_intermediate_size"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight$")


class InflateError(Exception):
    """The request cannot be met; the message says what was given and what is accepted."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's tensors by name: (file, shape), in order of name; nothing is loaded."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[Path, tuple[int, ...]]]
    expert_kinds: dict[str, str]
    """Tensor name -> gate_proj, up_proj or down_proj, for the tensors that are experts."""
    width: int

    @property
    def bytes_per_neuron(self) -> int:
        """Elements that one more intermediate neuron in every expert adds (bytes once times the item size)."""
        return sum(math.prod(self.tensors[name][1]) for name in self.expert_kinds) // self.width


def open_source(folder: Path, num_layers: int | None = None) -> Source:
    """Index `folder`, or its first `num_layers`. InflateError if it is not a checkpoint of FAMILY."""
    if not (folder / "config.json").exists():
        raise InflateError(f"--model {folder}: no config.json there; give a transformers model folder")
    config = json.loads((folder / "config.json").read_text())
    family = config.get("model_type")
    if family != FAMILY:
        raise InflateError(f"--model {folder}: model_type {family!r} is not supported; accepted: {FAMILY}")
    tensors: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = (file, tuple(opened.get_slice(name).get_shape()))
    if num_layers is not None:
        tensors = _cut_layers(config, tensors, num_layers)
    kinds = {name: m[1] for name in tensors if (m := EXPERT.search(name))}
    width = int(config[WIDTH_FIELD])
    unknown = sorted(name for name in tensors if ".experts." in name and name not in kinds)
    if unknown or not kinds:
        raise InflateError(
            f"--model {folder}: experts must be gate, up and down projections of their own: {unknown[:1]}"
        )
    for name, kind in kinds.items():
        if tensors[name][1][-1 if kind == "down_proj" else -2] != width:
            shape = tensors[name][1]
            raise InflateError(f"--model {folder}: {name} is {shape}, expected {width} intermediate neurons")
    return Source(folder, config, dict(sorted(tensors.items(), key=_by_number)), kinds, width)


def _cut_layers(config: dict[str, Any], tensors: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The tensors of the first layers; `config` is changed to match."""
    there = int(config["num_hidden_layers"])
    if not 1 <= num_layers <= there:
        raise InflateError(f"--layers {num_layers}: the model has {there}; accepted: 1 to {there}")
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    numbers = {name: LAYER.search(name) for name in tensors}
    return {name: value for name, value in tensors.items() if (m := numbers[name]) is None or int(m[1]) < num_layers}


def _by_number(item: tuple[str, Any]) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def choose_width(source: Source, experts_nbytes: int, item_nbytes: int) -> int:
    """The multiple of WIDTH_STEP whose experts come nearest to `experts_nbytes`, at least the model's own width."""
    wanted = experts_nbytes / (source.bytes_per_neuron * item_nbytes)
    width = max(WIDTH_STEP, WIDTH_STEP * round(wanted / WIDTH_STEP))
    if width < source.width:
        least = source.bytes_per_neuron * item_nbytes * source.width / 2**30
        raise InflateError(
            f"--experts-gib {experts_nbytes / 2**30:g}: the experts already are {least:.4g} GiB; give more"
        )
    return width


class Widener:
    """Widens one tensor at a time; the random rows of all tensors are slices of one seeded block, as drawing new ones
    would take most of the time.
    """

    def __init__(self, old: int, new: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.new, self.dtype = new, dtype
        self._generator = generator
        self._noise = torch.randn(1 << 23, generator=generator).to(dtype)
        self._positions = torch.arange(old) * new // old  # where the old neurons go among the new ones

    def widen(self, kind: str, tensor: Tensor) -> Tensor:
        """[I, H] (gate, up) or [H, I] (down), I = old -> the same, I = new."""
        if kind == "down_proj":
            widened = self._random(tensor.shape[0], self.new, TINY)
            widened[:, self._positions] = tensor.to(self.dtype)
        else:
            widened = self._random(self.new, tensor.shape[1], float(tensor.float().std()))
            widened[self._positions] = tensor.to(self.dtype)
        return widened

    def _random(self, rows: int, columns: int, std: float) -> Tensor:
        count, noise = rows * columns, self._noise
        if count >= len(noise):
            noise = noise.repeat(count // len(noise) + 1)
        start = int(torch.randint(len(noise) - count, (1,), generator=self._generator))
        return (noise[start : start + count] * std).view(rows, columns)


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(kept.nbytes for kept in shard.values()) + tensor.nbytes > SHARD_NBYTES:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    yield shard


def write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Write safetensors files of at most SHARD_NBYTES, or one tensor, and their index; the number of files."""
    weight_map, total = dict[str, str](), 0
    for number, shard in enumerate(_shards(tensors), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return number


@dataclass(frozen=True, slots=True)
class Inflated:
    experts_nbytes: int
    width: int
    num_shards: int


def inflate(
    out: Path,
    experts_gib: float,
    model: Path = DEMO,
    dtype: str = "bfloat16",
    seed: int = 0,
    num_layers: int | None = None,
) -> Inflated:
    """Write to `out`, which must not exist, `model` (or its first layers) with experts of about `experts_gib` GiB.

    Holds one file of the result at a time in memory. `out` appears when it is complete.
    """
    if out.exists():
        raise InflateError(f"OUT {out}: exists already; give a new path")
    if dtype not in DTYPES:
        raise InflateError(f"--dtype {dtype}: accepted: {', '.join(DTYPES)}")
    torch_dtype = DTYPES[dtype]
    source = open_source(model, num_layers)
    width = choose_width(source, int(experts_gib * 2**30), torch_dtype.itemsize)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy_other_files(source, partial, width, dtype)
        widener = Widener(source.width, width, torch_dtype, torch.Generator().manual_seed(seed))
        num_shards = write_shards(partial, _tensors(source, widener))
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Inflated(source.bytes_per_neuron * width * torch_dtype.itemsize, width, num_shards)


def _copy_other_files(source: Source, to: Path, width: int, dtype: str) -> None:
    for file in source.folder.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in {".bin", ".md", ".py"}:
            shutil.copy(file, to / file.name)
    config = dict(source.config)
    config[WIDTH_FIELD] = width
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensors(source: Source, widener: Widener) -> Iterator[tuple[str, Tensor]]:
    path: Path | None = None
    opened: Any = None
    for name, (file, _) in source.tensors.items():
        if file != path:
            path, opened = file, safe_open(file, "pt")
        tensor = opened.get_tensor(name)
        kind = source.expert_kinds.get(name)
        yield name, tensor.to(widener.dtype) if kind is None else widener.widen(kind, tensor)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    parser.add_argument("--experts-gib", type=float, required=True, help="GiB of all experts together")
    parser.add_argument("--model", type=Path, default=DEMO, help="transformers model folder (default: the demo model)")
    parser.add_argument("--layers", type=int, help="only the first so many of the model's layers")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the work is copying: on a busy machine, waiting for a second thread made it 20x slower
    try:
        result = inflate(args.out, args.experts_gib, args.model, args.dtype, args.seed, args.layers)
    except InflateError as error:
        print(f"inflate_model: {error}", file=sys.stderr)
        return 2
    gib = result.experts_nbytes / 2**30
    size = f"{result.experts_nbytes} bytes ({gib:.3f} GiB)"
    print(f"{args.out}: experts {size}, I = {result.width}, {result.num_shards} safetensors files")
    return 0


if __name__ == "__main__":
    sys.exit(main())

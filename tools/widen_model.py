"""Give a qwen3_moe checkpoint, as the demo model is one, the shape of a larger one, and what it routes.

    python tools/widen_model.py OUT [--model DIR] [--layers 4]

By default the shape of Qwen3-30B-A3B's layers: H 2048, I 768, 128 experts, top-8, 32 heads of 128. The model's numbers
lie among random ones that nothing reaches: its hidden states are the first columns, its heads the first of each group,
with their pairs of rotary dimensions where the frequencies are the same. Each expert comes in several variants that
compute the same; their router rows differ a little (`spread`), so that a token takes some variants of its best
experts. What no peer may lose is the shape, the bytes and a routing that was learned; the text is the model's own only
when all variants of its experts are taken and spread is 0. Vocabulary and tokenizer stay; the head is not tied.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inflate_model import DEMO, TINY, InflateError, Widener, open_source, write_shards
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Defaults: Qwen3-30B-A3B's, from its config.json."""

    hidden_size: int = 2048
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128


def widen(out: Path, shape: Shape, model: Path = DEMO, num_layers: int | None = None, spread: float = 0.3) -> None:
    """Write `out`, which must not exist. Raises InflateError where `shape` cannot hold the model."""
    if out.exists():
        raise InflateError(f"OUT {out}: exists already; give a new path")
    source = open_source(model, num_layers)
    _check(shape, source.config)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in source.folder.glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, partial / file.name)
        fields = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
        config = source.config | fields | {"tie_word_embeddings": False, "dtype": "bfloat16"}
        config.pop("num_local_experts", None)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_shards(partial, iter(_Tensors(source, shape, spread)))
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(shape: Shape, config: dict[str, Any]) -> None:
    for name in shape.__dataclass_fields__:
        if getattr(shape, name) < config[name]:
            raise InflateError(f"{name}={getattr(shape, name)}: accepted: at least the model's {config[name]}")
    for name in ("num_experts", "head_dim"):
        if getattr(shape, name) % config[name]:
            raise InflateError(f"{name}={getattr(shape, name)}: accepted: multiples of the model's {config[name]}")
    if shape.num_attention_heads * config["num_key_value_heads"] < config["num_attention_heads"] * (
        shape.num_key_value_heads
    ):
        raise InflateError("num_attention_heads: a group of heads must be no smaller than the model's")


class _Tensors:
    """Iterates over the names and tensors of the result."""

    def __init__(self, source: Any, shape: Shape, spread: float) -> None:
        self._source, self._shape, self._spread, old = source, shape, spread, source.config
        self._dice = torch.Generator().manual_seed(0)
        self._widener = Widener(source.width, shape.moe_intermediate_size, torch.bfloat16, self._dice)
        self._hidden = torch.arange(old["hidden_size"])
        half, step = old["head_dim"] // 2, shape.head_dim // old["head_dim"]
        self._dims = torch.cat([torch.arange(half) * step, torch.arange(half) * step + shape.head_dim // 2])
        group = old["num_attention_heads"] // old["num_key_value_heads"]
        wide_group = shape.num_attention_heads // shape.num_key_value_heads
        heads = torch.arange(old["num_attention_heads"])
        self._queries = self._rows_of(heads // group * wide_group + heads % group)
        self._keys = self._rows_of(torch.arange(old["num_key_value_heads"]))
        self._hidden_factor = (old["hidden_size"] / shape.hidden_size) ** 0.5
        self._head_factor = (old["head_dim"] / shape.head_dim) ** 0.5

    def _rows_of(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self._shape.head_dim + self._dims).flatten()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, (file, _) in self._source.tensors.items():
            with safe_open(file, "pt") as opened:
                tensor = opened.get_tensor(name).float()
            if name in self._source.expert_kinds:
                yield from self._variants(name, tensor)
                continue
            yield name, self._dense(name, tensor).bfloat16()
            if name == "model.embed_tokens.weight":
                yield "lm_head.weight", self._among(tensor, None, self._hidden, rest=0.02).bfloat16()

    def _variants(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Expert e becomes e, e + E, e + 2E, ... of E experts before."""
        stem, tail = name.split(".experts.")
        expert, kind = tail.split(".", 1)
        before = self._source.config["num_experts"]
        is_down = kind.startswith("down")
        for number in range(int(expert), self._shape.num_experts, before):
            wide = (
                self._among(tensor, self._hidden, None, rest=TINY)
                if is_down
                else self._among(tensor, None, self._hidden, rest=float(tensor.std()))
            )
            yield f"{stem}.experts.{number}.{kind}", self._widener.widen("down_proj" if is_down else "up_proj", wide)

    def _dense(self, name: str, tensor: Tensor) -> Tensor:
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        usual = float(tensor.std())
        if part == "embed_tokens":
            return self._among(tensor, None, self._hidden, rest=TINY)
        if part in ("q_norm", "k_norm"):  # of more dimensions that are 0; and attention's scale is another
            factor = self._head_factor * (1 / self._head_factor if part == "q_norm" else 1)
            wide = torch.ones(self._shape.head_dim)
            wide[self._dims] = tensor * factor
            return wide
        if tensor.dim() == 1:
            wide = torch.ones(self._shape.hidden_size)
            wide[self._hidden] = tensor * self._hidden_factor
            return wide
        if part == "gate":
            rows = tensor.repeat(self._shape.num_experts // len(tensor), 1)
            noise = torch.randn(rows.shape, generator=self._dice)
            rows += self._spread * noise * rows.norm(dim=1, keepdim=True) / rows.shape[1] ** 0.5
            return self._among(rows, None, self._hidden, rest=usual)
        if part == "o_proj":
            return self._among(tensor, self._hidden, self._queries, rest=TINY)
        places = self._queries if part == "q_proj" else self._keys
        wide = self._among(tensor, None, self._hidden, rest=usual)
        heads = self._shape.num_attention_heads if part == "q_proj" else self._shape.num_key_value_heads
        return self._among(wide, places, None, rest=TINY, size=heads * self._shape.head_dim)

    def _among(
        self, tensor: Tensor, rows: Tensor | None, columns: Tensor | None, rest: float, size: int | None = None
    ) -> Tensor:
        """`tensor` at these rows and columns (None: those it has) of a wider one, whose other numbers are random."""
        shape = [len(tensor) if rows is None else size or self._shape.hidden_size, tensor.shape[1]]
        if columns is not None:
            is_heads = columns is self._queries
            heads = self._shape.num_attention_heads * self._shape.head_dim
            shape[1] = heads if is_heads else self._shape.hidden_size
        wide = torch.randn(shape, generator=self._dice) * rest
        at = [torch.arange(n) if p is None else p for n, p in zip(tensor.shape, (rows, columns), strict=True)]
        wide[at[0][:, None], at[1]] = tensor
        return wide


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    parser.add_argument("--model", type=Path, default=DEMO, help="transformers model folder (default: the demo model)")
    parser.add_argument("--layers", type=int, default=4, help="only the first so many of the model's layers")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        widen(args.out, Shape(), args.model, args.layers)
    except InflateError as error:
        print(f"widen_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Toy models: everything of expertly.model, with neither packer nor engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expertly.native.kernels import Kernels
from tests.families import make_checkpoint
from tests.model.toy import Toy


class Toys:
    """One a family, made when first asked for. Tests that change a model use `fresh`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Toy] = {}
        self._num_made = 0

    def __getitem__(self, family: str) -> Toy:
        if family not in self._made:
            self._made[family] = self.fresh(family)
        return self._made[family]

    def fresh(self, family: str, dtype: torch.dtype = torch.float32, tokenizer: bool = False) -> Toy:
        self._num_made += 1
        folder = self._folder / f"{family}-{self._num_made}"
        source = make_checkpoint(family, folder / "checkpoint", dtype=dtype, tokenizer=tokenizer)
        return Toy.make(source, folder / "store", dtype)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


Calls = dict[str, list[int]]
"""Tokens of each call of the kernels' functions, by their names."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What modules have asked of kernels so far."""
    calls: Calls = {}

    def counted(name: str, function: Any, num_tokens: Callable[..., int]) -> Any:
        def call(self: Kernels, *args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, []).append(num_tokens(*args))
            return function(self, *args, **kwargs)

        return call

    for name, num_tokens in {
        "attention": lambda query, *_: query.shape[2],
        "dots": lambda address, x, *_: x.shape[:-1].numel(),
        "norm": lambda x, *_: x.shape[:-1].numel(),
        "projections": lambda x, *_: x.shape[:2].numel(),
        "router": lambda x, *_: len(x),
    }.items():
        monkeypatch.setattr(Kernels, name, counted(name, getattr(Kernels, name), num_tokens))
    return calls

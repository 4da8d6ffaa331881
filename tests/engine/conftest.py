"""One checkpoint, packed store and reference a family for the whole session."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from expertly.model.packing import pack
from tests.engine.peers import ThreadPeer, put_in_threads
from tests.families import HIDDEN_SIZE, generate, load_reference, logits_of, make_checkpoint, make_prompts
from tests.weights import put_beside


@dataclass
class Case:
    """A family's checkpoint, its store, and what the unmodified model makes of the prompts."""

    folder: Path
    store: Path
    prompts: list[list[int]] = field(default_factory=lambda: make_prompts(2, length=14))

    @cached_property
    def reference(self) -> Any:
        return load_reference(self.folder)

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Those that follow each prompt."""
        return generate(self.reference, self.prompts)

    @cached_property
    def logits(self) -> torch.Tensor:
        return logits_of(self.reference, self.prompts)


class Cases:
    """Made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Case] = {}

    def __getitem__(self, family: str) -> Case:
        if family not in self._made:
            folder = make_checkpoint(family, self._folder / family / "checkpoint")
            pack(folder, self._folder / family / "store")
            put_beside(self._folder / family / "store", HIDDEN_SIZE)
            self._made[family] = Case(folder, self._folder / family / "store")
        return self._made[family]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("families"))


@pytest.fixture
def copied(cases: Cases, tmp_path: Path) -> tuple[Case, Path]:
    """A case, and a copy of its store that may be damaged and has nothing beside it."""
    case = cases["qwen3_moe"]
    return case, Path(shutil.copytree(case.store, tmp_path / "store"))


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> list[ThreadPeer]:
    """The workers of models that are loaded with some."""
    return put_in_threads(monkeypatch)

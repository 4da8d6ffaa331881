"""A small checkpoint, and what a run of it says when its files were changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import make_checkpoint
from tests.hostile.cases import Ended, run_command


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("hostile") / "model", tokenizer=True)


RunChanged = Callable[[Callable[[Path], Any]], Ended]


@pytest.fixture
def run_changed(checkpoint: Path, imported: Any, tmp_path: Path) -> RunChanged:
    """Runs a copy of it, after a change."""

    def run(change: Callable[[Path], Any]) -> Ended:
        change(shutil.copytree(checkpoint, tmp_path / "model"))
        return run_command(imported, tmp_path, "run", "model", "hello", "--max-new-tokens", "4")

    return run

"""A small checkpoint, and what a run of it says when its files were changed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from tests.families import make_checkpoint
from tests.hostile.cases import MAX_CPU_S, Ended, run_command


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("hostile") / "model", tokenizer=True)


RunChanged = Callable[..., Ended]


@pytest.fixture
def run_changed(
    checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> RunChanged:
    """Runs a copy of it, after a change; where it is large, in a process of its own with little memory."""

    def run(change: Callable[[Path], Any], *, is_large: bool = False) -> Ended:
        change(shutil.copytree(checkpoint, tmp_path / "model"))
        words = ("run", "model", "hello", "--max-new-tokens", "4")
        if is_large:
            return run_command(request.getfixturevalue("imported"), tmp_path, *words)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / ".cache"))
        capfd.readouterr()
        begin_s = time.process_time()
        status, spent_s = main([*words]), time.process_time() - begin_s
        assert spent_s < MAX_CPU_S
        return Ended(status, *capfd.readouterr(), spent_s, 0)

    return run

"""The model that commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says how wide a terminal is, unless a test does: workers of the test runner are told 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)

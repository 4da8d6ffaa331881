"""The model and the trace that commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly.trace.schema import TraceLayer
from tests.engine.conftest import one_thread
from tests.families import make_checkpoint
from tests.sim.drive import make_trace, random_passes

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", tokenizer=True)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Decode alone, sizes unknown: as what is imported."""
    layers = [TraceLayer(8, 2)] * 2
    return make_trace(tmp_path / "bare", random_passes(0, layers, 30), layers).folder


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says how wide a terminal is, unless a test does: workers of the test runner are told 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)

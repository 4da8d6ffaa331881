"""The model and the trace that commands are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly_lab.trace.schema import TraceLayer
from lab.tests.sim.drive import make_trace, random_passes
from tests.cli.conftest import model, no_width

__all__ = ["model", "no_width"]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Decode alone, sizes unknown: as what is imported."""
    layers = [TraceLayer(8, 2)] * 2
    return make_trace(tmp_path / "bare", random_passes(0, layers, 30), layers).folder

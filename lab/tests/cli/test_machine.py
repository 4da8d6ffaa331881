"""`expertly lab machine`."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertly.cli.main import main
from expertly_lab.cli import machine
from expertly_lab.sim.hardware import Hardware
from tests.cli.asking import Captured


def test_a_hardware_file_of_this_machine(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "MODEL_SECONDS", 0.2)
    path = tmp_path / "here.toml"
    assert main(["lab", "machine", "--out", str(path)]) == 0
    assert f"hardware file written to {path}" in capsys.readouterr().err
    hardware = Hardware.read(str(path))
    assert hardware.link.nbytes_per_s > 0 and path.read_text().startswith("# Measured with the demo model")

"""What `doctor` finds missing."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from expertly.core.errors import ConfigError
from expertly.hardware import machine, measure, neighbours
from expertly.hardware.machine import examine
from expertly.hardware.measure import DiskRate
from tests.hardware.readings import QUIET, say

MIB = 1 << 20
quick = partial(examine, effort=1 / 32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    """Little memory, and nobody else."""
    monkeypatch.setattr(machine, "available_host_nbytes", lambda: 1 << 30)
    say(monkeypatch, QUIET)


def test_everything_is_measured_and_in_order(tmp_path: Path):
    parts: list[str] = []
    profile, problems = quick(tmp_path, parts.append)
    assert parts == ["disk", "memory", "devices"]
    assert profile.disk is not None and profile.disk.latency_ns > 0
    assert all(1e7 < rate < 1e13 for rate in (profile.disk.nbytes_per_s, profile.weights_nbytes_per_s))
    assert profile.versions["torch"]
    assert [problem for problem in problems if problem.level == "error"] == []
    assert list(tmp_path.iterdir()) == []


LOADED, UNTOLD = replace(QUIET, load=15.0), replace(QUIET, busy_s=None)
refuse = Mock(side_effect=ConfigError("a test file cannot be written there (Permission denied)"))
fail = Mock(side_effect=RuntimeError("CUDA error: out of memory\nand advice"))


@pytest.mark.parametrize(
    ("place", "name", "value", "subject", "said"),
    [
        (measure, "scratch_file", refuse, "folder", "error: .*: a test file cannot be written there"),
        (shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20), "disk", "error: "),
        (shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 << 30), "disk", "warning: .*: 4 GiB are free"),
        (measure, "measure_disk", lambda *args: DiskRate(1e9, False), "disk", "warning: .*O_DIRECT"),
        (machine, "available_host_nbytes", lambda: 512 * MIB, "memory", "warning: 512 MiB are free"),
        (neighbours, "read_system", lambda: LOADED, "busy machine", "warning: .*15.0 processes were running.*not kept"),
        (neighbours, "read_system", lambda: QUIET, "busy machine", None),
        (neighbours, "read_system", lambda: UNTOLD, "cpu", "note: /proc/stat cannot be read"),
        (measure, "measure_devices", fail, "device", "warning: found but not usable: CUDA error: out of memory$"),
    ],
)
def test_problems_of_the_machine_are_reported(
    place: Any, name: str, value: Any, subject: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Figures are from nowhere."""
    monkeypatch.setattr(measure, "measure_disk", lambda *args: DiskRate(1e6, is_direct=True))
    monkeypatch.setattr(measure, "measure_weights_rate", lambda *args: 1e10)
    monkeypatch.setattr(machine, "allowed_cpus", lambda: 4)
    monkeypatch.setattr(place, name, value)
    profile, problems = quick(tmp_path)
    problem = {problem.subject: problem for problem in problems}.get(subject)
    if said is None:
        assert problem is None
    else:
        assert problem is not None and re.match(said, f"{problem.level}: {problem.text}")
        assert (profile.disk is None) == (problem.level == "error"), "the rest is measured all the same"

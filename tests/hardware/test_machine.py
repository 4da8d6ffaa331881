"""What `doctor` finds missing."""

from __future__ import annotations

import dataclasses
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.hardware import machine, measure, neighbours
from expertly.hardware.machine import Effort, examine, last_level_cache_nbytes, version_problems
from expertly.hardware.profile import DiskRate, MatvecRate, ThreadsRate
from tests.engine.failing import raising
from tests.hardware.readings import QUIET, say
from tests.hardware.test_profile import PROFILE

MIB = 1 << 20
QUICK = Effort(scratch_nbytes=32 * MIB, reads_s=0.4, each_s=0.01, device_s=0.1, wait_s=0.0)


def by_subject(problems: list[machine.Problem]) -> dict[str, machine.Problem]:
    return {problem.subject: problem for problem in problems}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    """Little memory, few depths, and no disk is too slow."""
    monkeypatch.setattr(measure, "DEPTHS", (1, 2))
    monkeypatch.setattr(machine, "available_host_nbytes", lambda: 2 << 30)
    monkeypatch.setattr(machine, "last_level_cache_nbytes", lambda: 0)
    monkeypatch.setattr(machine, "monotonic", lambda: 0.0)
    say(monkeypatch, QUIET)


def rate_of_disk(path: Path, size: int, depth: int, seconds: float) -> DiskRate:
    return DiskRate(size, depth, 1e6, is_direct=True)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch):
    """For tests of what is found missing: figures from nowhere."""
    monkeypatch.setattr(measure, "measure_disk", rate_of_disk)
    monkeypatch.setattr(measure, "measure_copy", lambda threads, nbytes, seconds: ThreadsRate(threads, 1e10))
    monkeypatch.setattr(measure, "measure_matvec", lambda dtype, threads, *rest: MatvecRate(dtype, threads, 1e10))
    monkeypatch.setattr(measure, "measure_decoding", lambda seconds: PROFILE.decoding)


def test_everything_is_measured_and_in_order(tmp_path: Path):
    parts: list[str] = []
    profile, problems = examine(tmp_path, QUICK, parts.append)
    assert parts == ["disk", "memory", "matrix-vector speed", "decompression", "devices"]
    assert profile.disk is not None
    assert {(r.read_nbytes, r.depth) for r in profile.disk.reads} == {
        (s, d) for s in measure.READ_SIZES for d in (1, 2)
    }
    assert {rate.dtype for rate in profile.matvec} == set(measure.DTYPES)
    assert profile.copies and all(1e8 < rate.nbytes_per_s < 1e13 for rate in profile.copies)
    assert profile.versions["torch"]
    assert [problem for problem in problems if problem.level == "error"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unmeasured")
def test_a_disk_too_slow_for_everything_is_measured_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(100))
    monkeypatch.setattr(machine, "monotonic", lambda: float(next(clock)))
    profile, _ = examine(tmp_path, dataclasses.replace(QUICK, reads_s=2.0))
    assert profile.disk is not None
    assert [(r.read_nbytes, r.depth) for r in profile.disk.reads] == [(size, 1) for size in measure.READ_SIZES[:3]]


@pytest.mark.usefixtures("unmeasured")
def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    profile, problems = examine(tmp_path / "file" / "cache", QUICK)
    assert profile.disk is None
    assert by_subject(problems)["folder"].level == "error"
    assert profile.matvec, "the rest is measured all the same"


LOADED, UNTOLD = replace(QUIET, load=15.0), replace(QUIET, busy_s=None)
refuse = raising(ConfigError("folder /cache: a test file cannot be written there (Permission denied)"))
fail = raising(RuntimeError("CUDA error: out of memory\nand advice"))


@pytest.mark.parametrize(
    ("where", "name", "value", "subject", "said"),
    [
        (measure, "scratch_file", refuse, "folder", "error: folder /cache: a test file cannot be written there"),
        (shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20), "disk", "error: "),
        (shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 << 30), "disk", "warning: 4 GiB are free"),
        (measure, "measure_disk", lambda *args: DiskRate(*args[1:3], 1e9, False), "disk", "warning: .*O_DIRECT"),
        (machine, "available_host_nbytes", lambda: 512 * MIB, "memory", "warning: 512 MiB are free"),
        (neighbours, "read_system", lambda: LOADED, "busy machine", "warning: before measuring 15.0 proc.*not kept"),
        (neighbours, "read_system", lambda: UNTOLD, "cpu", "note: /proc/stat cannot be read"),
        (neighbours, "read_system", lambda: QUIET, "busy machine", None),
        (measure, "measure_devices", fail, "device", "warning: found but not usable: CUDA error: out of memory$"),
    ],
)
@pytest.mark.usefixtures("unmeasured")
def test_problems_of_the_machine_are_reported(
    where: Any, name: str, value: Any, subject: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: 4)
    monkeypatch.setattr(where, name, value)
    profile, problems = examine(tmp_path, QUICK)
    found = by_subject(problems).get(subject)
    if said is None:
        assert found is None
    else:
        assert found is not None and re.match(said, f"{found.level}: {found.text}")
        assert (profile.disk is None) == (found.level == "error"), "the rest is measured all the same"


def test_versions_are_held_against_the_requirements():
    installed = {"torch": "2.9.0+cpu", "transformers": "5.23.0", "numpy": "2.0"}
    requirements = ["torch>=2.11", "transformers<6,>=5.17", "numpy>=1.26", "tqdm", 'ruff; extra == "dev"']
    problems = by_subject(version_problems(requirements, installed.get))
    assert problems.keys() == {"torch", "tqdm"}
    assert problems["torch"].text == "2.9.0+cpu is installed; accepted: >=2.11"
    assert "not installed" in problems["tqdm"].text


def test_cache_size_is_that_of_the_last_level(tmp_path: Path):
    for index, size in enumerate(("32K", "1024K", "32M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache_nbytes(tmp_path) == 32 * MIB
    assert last_level_cache_nbytes(tmp_path / "nowhere") == 0

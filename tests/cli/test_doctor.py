"""`expertly doctor`, quick and small: what it prints, writes and returns."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from expertly.cli.main import main
from expertly.hardware import forecast, machine, measure
from expertly.hardware.profile import MachineProfile
from expertly.native.kernels import choose_kernels
from tests.cli.asking import Captured, answer, refusal, told
from tests.hardware.readings import QUIET, after, say

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    say(monkeypatch, QUIET)
    monkeypatch.setattr(machine, "examine", partial(machine.examine, effort=1 / 32))
    monkeypatch.setattr(machine, "available_host_nbytes", lambda: 3 << 30)
    monkeypatch.setattr(measure, "_LEAST_NBYTES", MIB)
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))


def test_prints_tables_and_writes_the_profile_into_the_cache_folder(tmp_path: Path, capsys: Captured):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    kernels, path = choose_kernels(), tmp_path / "cache" / "machine.json"
    for row in (
        "disk ",
        "one of 64 KiB",
        "memory: matrix x vector, bfloat16",
        f"kernels {kernels.name}: {kernels.reason}",
    ):
        assert any(line.startswith(row) for line in out.splitlines()), out
    disk = MachineProfile.read(path).storage
    assert str(path) in err and disk.folder == str(tmp_path / "cache") and disk.nbytes_per_s > 0
    assert [child.name for child in path.parent.iterdir()] == ["machine.json"]


def test_figures_of_a_busy_machine_are_said_to_be_so_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    profile = tmp_path / "cache" / "machine.json"
    kept = []
    for reading in (after(QUIET, 1, load=15.0), QUIET, after(QUIET, 1, load=15.0)):
        say(monkeypatch, reading)
        lines = told(capsys, "doctor").splitlines()
        busy = [line for line in lines if "15.0 processes were running" in line]
        assert bool(busy) == (reading != QUIET) and all(line.startswith("warning: busy machine: ") for line in busy)
        kept.append(profile.read_bytes() if profile.exists() else None)
    assert kept[0] is None and kept[1] == kept[2] is not None, "what was measured on the quiet machine stays"


def test_json_is_the_profile_and_the_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    """And kernels may be chosen."""
    monkeypatch.setenv("EXPERTLY_KERNELS", "torch")
    (tmp_path / "disk").mkdir()
    path = tmp_path / "profile.json"
    printed = answer(capsys, "doctor", "--dir", tmp_path / "disk", "--out", path)
    assert printed.items() >= json.loads(path.read_text()).items() and printed["profile_path"] == str(path)
    assert printed["kernels"] == {"name": "torch", "why": "EXPERTLY_KERNELS=torch"}
    assert all(problem.keys() == {"level", "subject", "text"} for problem in printed["problems"])
    assert not (tmp_path / "cache").exists(), "nothing but the folders named is touched"
    monkeypatch.setenv("EXPERTLY_KERNELS", "fast")
    assert "EXPERTLY_KERNELS='fast': unknown; accepted: auto, torch" in refusal(capsys, "doctor")


def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "file"))
    printed = answer(capsys, "doctor", code=2)
    errors = {problem["subject"] for problem in printed["problems"] if problem["level"] == "error"}
    assert errors == {"folder", "profile"} and printed["weights_nbytes_per_s"], "the rest is measured all the same"


def test_a_model_is_sized_and_its_speed_expected(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forecast, "_CALIBRATION_TOKENS", 4)
    printed = answer(capsys, "doctor", "demo")
    assert printed["experts_nbytes"] == 37_748_736 and printed["command"] == "expertly run demo"
    assert all(0 < low < high for low, high in (each["tokens_per_s"] for each in printed["speeds"]))
    profile = tmp_path / "cache" / "machine.json"
    measured = profile.read_text()
    out = told(capsys, "doctor", "demo")
    for words in ("32 experts, 4 a token, in 12 layers", "36 MiB in bfloat16", "25.0%", "Next: expertly run demo"):
        assert words in out, out
    assert "as in recorded routing of gpt-oss-20b; DeepSeek-V2-Lite, law" in " ".join(out.split()), out
    assert profile.read_text() == measured, "a machine is measured once"

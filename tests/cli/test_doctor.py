"""`expertly doctor`, quick and small: what it prints, writes and returns."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from expertly.cli import doctor
from expertly.cli.main import main
from expertly.core.costs import CodecCosts, Link
from expertly.core.geometry import Geometry
from expertly.hardware import machine, measure, simulated
from expertly.hardware.profile import MachineProfile
from expertly.lab import forecast
from expertly.model.packing import pack
from expertly.native.kernels import choose_kernels
from expertly.sim.compute import compute_model
from expertly.sim.hardware import Hardware
from tests.cli.asking import Captured, answer, refusal, told
from tests.hardware.readings import QUIET, after, say

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    effort = machine.Effort(scratch_nbytes=32 * MIB, reads_s=0.2, each_s=0.01, device_s=0.1, wait_s=0.0)
    say(monkeypatch, QUIET)
    monkeypatch.setattr(machine, "Effort", lambda: effort)
    monkeypatch.setattr(machine, "available_host_nbytes", lambda: 2 << 30)
    monkeypatch.setattr(machine, "last_level_cache_nbytes", lambda: 0)
    monkeypatch.setattr(machine, "monotonic", lambda: 0.0)  # no disk is too slow
    monkeypatch.setattr(measure, "DEPTHS", (1, 4))
    monkeypatch.setattr(measure, "_LEAST_NBYTES", MIB)
    monkeypatch.setattr(doctor, "MODEL_SECONDS", 0.1)
    monkeypatch.setattr(simulated, "_EACH_S", 0.01)
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))


def test_prints_tables_and_writes_the_profile_into_the_cache_folder(tmp_path: Path, capsys: Captured):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    for row in ("64 KiB", "16 MiB", "matrix x vector, float16, 1 threads", "decode planes, 4 threads, of weights"):
        assert any(line.startswith(row) for line in out.splitlines()), out
    path = tmp_path / "cache" / "machine.json"
    assert str(path) in err
    profile = MachineProfile.read(path)
    assert profile.disk is not None and profile.disk.folder == str(tmp_path / "cache")
    assert profile.disk_nbytes_per_s(MIB, depth=4) > 0
    assert 0.6 < profile.decoding.ratio < 0.75 and all(rate.nbytes_per_s > 0 for rate in profile.decoding.rates)
    (choice,) = (line for line in out.splitlines() if line.startswith("codec auto"))
    assert "weights take 0.6" in choice and (": none: " in choice or ": planes: " in choice)
    assert [child.name for child in path.parent.iterdir()] == ["machine.json"]
    kernels = choose_kernels()
    assert f"kernels {kernels.name}: {kernels.why}" in out.splitlines()
    assert kernels.name.startswith("native ") or kernels.why.startswith("not compiled")


def test_figures_of_a_busy_machine_are_said_to_be_so_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    say(monkeypatch, after(QUIET, 1, load=15.0))
    profile, hardware = tmp_path / "cache" / "machine.json", tmp_path / "machine.toml"
    assert main(["doctor"]) == 0
    out, _ = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if "15.0 processes were running" in line)
    assert line.startswith("warning: busy machine: ") and not profile.exists()
    assert "15.0 processes were running" in refusal(capsys, "doctor", "--hardware-out", str(hardware))
    assert not profile.exists() and not hardware.exists()

    say(monkeypatch, QUIET)
    assert main(["doctor"]) == 0
    kept = profile.read_bytes()
    say(monkeypatch, after(QUIET, 1, load=15.0))
    assert main(["doctor"]) == 0
    assert profile.read_bytes() == kept, "what was measured on the quiet machine stays"


def test_json_is_the_profile_and_the_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    """And kernels may be chosen."""
    monkeypatch.setenv("EXPERTLY_KERNELS", "torch")
    (tmp_path / "disk").mkdir()
    out_path = tmp_path / "profile.json"
    start = time.monotonic()
    assert main(["doctor", "--json", "--dir", str(tmp_path / "disk"), "--out", str(out_path)]) == 0
    elapsed = time.monotonic() - start
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(out_path.read_text())
    assert {key: printed[key] for key in written} == written
    assert printed["profile_path"] == str(out_path)
    assert 0 < printed["seconds"] <= elapsed
    assert printed["kernels"] == {"name": "torch", "why": "EXPERTLY_KERNELS=torch"}
    assert printed["codec_auto"]["codec"] in ("none", "planes") and "the disk reads" in printed["codec_auto"]["why"]
    assert all(problem.keys() == {"level", "subject", "text"} for problem in printed["problems"])
    assert not (tmp_path / "cache").exists(), "nothing but the folders named is touched"


def test_a_hardware_file_of_this_machine(tmp_path: Path, capsys: Captured):
    path = tmp_path / "here.toml"
    printed = answer(capsys, "doctor", "--hardware-out", path)
    hardware = Hardware.read(str(path))
    assert printed["hardware"] == hardware.as_dict() and printed["hardware_path"] == str(path)
    assert hardware.compute is None and hardware.memory_nbytes_per_s > 0 and hardware.flops_per_s > 0
    assert path.read_text().startswith("# Measured by `expertly doctor` on ")


def test_a_hardware_file_of_a_model_on_this_machine(model: Path, tmp_path: Path, capsys: Captured):
    path = tmp_path / "here.toml"
    assert main(["doctor", str(model), "--hardware-out", str(path), "--memory", "60%", "--segments", "2"]) == 0
    assert f"hardware file written to {path}" in capsys.readouterr().err
    hardware = Hardware.read(str(path))
    assert hardware.compute is not None and hardware.predictor.inline_ns is not None, "measured"
    geometry = Geometry((hardware.compute.layer,) * 3, 2)
    assert compute_model(hardware, geometry, None).dense_ns(0, 1) == hardware.compute.dense_ns[0]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the host decodes for an accelerator beside nothing")
def test_the_rate_of_decoding_is_taken_from_passes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, alone, path = Link(3e9, 7, 0), CodecCosts(0.7, 1e12, 2), tmp_path / "here.toml"
    monkeypatch.setattr("expertly.lab.model_profile.store_costs", lambda store: (disk, alone))
    store = pack(model, tmp_path / "store", codec="planes").folder
    assert main(["doctor", "--hardware-out", str(path), str(store), "--memory", "60%"]) == 0
    hardware = Hardware.read(str(path))
    assert hardware.link == disk and hardware.codec is not None and hardware.codec.ratio == 0.7
    assert 0 < hardware.codec.decode_nbytes_per_s < 0.9e12
    assert hardware.predictor.inline_ns is not None, "measured, as that of other stores"


def test_a_cache_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "file"))
    assert main(["doctor", "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert {problem["subject"] for problem in printed["problems"] if problem["level"] == "error"} == {
        "folder",
        "profile",
    }
    assert printed["matvec"], "the rest is measured all the same"


def test_a_model_is_sized_and_its_speed_expected(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forecast, "_REQUEST_TOKENS", 8)
    monkeypatch.setattr(forecast, "_CALIBRATION_TOKENS", 4)
    printed = answer(capsys, "doctor", "demo")
    assert printed["experts_nbytes"] == 37_748_736 and printed["command"] == "expertly run demo"
    assert all(0 < low < high for low, high in (one["tokens_per_s"] for one in printed["speeds"]))
    profile = tmp_path / "cache" / "machine.json"
    measured = profile.read_text()
    assert printed["with_workers"] == []
    out = told(capsys, "doctor", "demo", "--workers", "3,1", "--network", "1GbE")
    for words in ("32 experts, 4 a token, in 12 layers", "36 MiB in bfloat16", "25.0%", "Next: expertly run demo"):
        assert words in out, out
    text = " ".join(out.split())
    assert "over 1GbE (0.12 GB/s; latency 50.0 us; a call 320 us, of which 70.0 us until the next" in text, out
    assert "18 MiB + 1 x 18 MiB (100.0%)" in text and "9 MiB + 3 x 9 MiB (100.0%)" in text, out
    assert profile.read_text() == measured, "a machine is measured once"


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: Captured):
    monkeypatch.setenv("EXPERTLY_KERNELS", "fast")
    assert "EXPERTLY_KERNELS='fast': unknown; accepted: auto, native, torch" in refusal(capsys, "doctor")

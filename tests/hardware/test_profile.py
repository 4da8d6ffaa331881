from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from expertly.core.costs import HostCompute
from expertly.core.errors import ConfigError
from expertly.hardware.profile import (
    DecodeProfile,
    DeviceProfile,
    DiskProfile,
    DiskRate,
    LinkRate,
    MachineProfile,
    MatvecRate,
    ThreadsRate,
)

READS = ((65536, 1, 1e8), (65536, 4, 3e8), (1 << 20, 1, 4e8), (1 << 20, 4, 1.1e9))
PROFILE = MachineProfile(
    created="2026-01-01T00:00:00+00:00",
    platform="Linux",
    cpu="a CPU",
    num_cpus=2,
    cache_nbytes=1 << 20,
    memory_nbytes=8 << 30,
    available_nbytes=4 << 30,
    versions={"python": "3.12.1"},
    disk=DiskProfile("/tmp", 1 << 40, 1 << 30, 5e8, tuple(DiskRate(*read, is_direct=True) for read in READS)),
    copies=(ThreadsRate(1, 1e10),),
    matvec=(MatvecRate("bfloat16", 2, 2e10),),
    decoding=DecodeProfile(0.68, (ThreadsRate(1, 1e9), ThreadsRate(2, 1.9e9), ThreadsRate(4, 2e9))),
    devices=(
        DeviceProfile(
            "cuda:0",
            "a GPU",
            80 << 30,
            (LinkRate(1 << 20, 2e10, 2e10, 50_000),),
            HostCompute(3.5e10, 5e11, 50_000, 1.05),
        ),
    ),
)


def test_reads_back_what_was_written(tmp_path: Path):
    path = tmp_path / "new folder" / "machine.json"
    PROFILE.write(path)
    assert MachineProfile.read(path) == PROFILE
    assert [child.name for child in path.parent.iterdir()] == ["machine.json"]


def test_a_file_of_a_device_whose_host_was_not_measured_is_read(tmp_path: Path):
    path = tmp_path / "machine.json"
    raw = PROFILE.as_dict()
    del raw["devices"][0]["host"]
    path.write_text(json.dumps(raw))
    (device,) = MachineProfile.read(path).devices
    assert device == dataclasses.replace(PROFILE.devices[0], host=None)


def test_a_machine_without_disk_and_devices(tmp_path: Path):
    bare = dataclasses.replace(PROFILE, disk=None, devices=())
    bare.write(tmp_path / "machine.json")
    assert MachineProfile.read(tmp_path / "machine.json") == bare
    with pytest.raises(ConfigError, match="doctor"):
        bare.disk_nbytes_per_s(1 << 20)


def test_disk_rate_is_interpolated_between_sizes_and_held_outside():
    assert PROFILE.disk_nbytes_per_s(1 << 20) == 1.1e9
    assert PROFILE.disk_nbytes_per_s(1 << 30) == 1.1e9
    assert PROFILE.disk_nbytes_per_s(1) == 3e8
    assert PROFILE.disk_nbytes_per_s(1 << 18, depth=1) == pytest.approx(2.5e8)  # half way in the exponent
    with pytest.raises(ConfigError, match="depth=3"):
        PROFILE.disk_nbytes_per_s(1 << 20, depth=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version=99, accepted: 2"),
        ({"num_cpus": "two"}, "num_cpus='two': must be a whole number"),
        ({"disk": 3}, "disk=3: must be an object of folder"),
        ({"copies": [{}]}, r"copies\[0\]={}: must be an object of num_threads, nbytes_per_s"),
        (
            {"matvec": [{"dtype": "f", "num_threads": True, "nbytes_per_s": 1}]},
            "num_threads=True: must be a whole number",
        ),
    ],
)
def test_a_damaged_profile_is_refused_by_field(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(PROFILE.as_dict() | change))
    with pytest.raises(ConfigError, match=message):
        MachineProfile.read(path)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_profile(tmp_path: Path, content: str | None):
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"machine\.json.*run `expertly doctor`"):
        MachineProfile.read(path)


def test_a_profile_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        PROFILE.write(tmp_path / "file" / "machine.json")

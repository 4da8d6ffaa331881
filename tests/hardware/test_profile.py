from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.hardware.profile import DeviceProfile, DiskProfile, MachineProfile

PROFILE = MachineProfile(
    created="2026-01-01T00:00:00+00:00",
    cpu="a CPU",
    num_cpus=2,
    memory_nbytes=8 << 30,
    available_nbytes=4 << 30,
    versions={"python": "3.12.1"},
    disk=DiskProfile("/tmp", 1 << 40, 1.1e9, 650_000, 5e8, is_direct=True),
    weights_nbytes_per_s=2e10,
    devices=(DeviceProfile("cuda:0", "a GPU", 80 << 30, 2e10, 50_000, 1e12),),
)


def test_reads_back_what_was_written(tmp_path: Path):
    path, bare = tmp_path / "new folder" / "machine.json", dataclasses.replace(PROFILE, disk=None, devices=())
    for profile in (PROFILE, bare):
        profile.write(path)
        assert MachineProfile.read(path) == profile
        assert [child.name for child in path.parent.iterdir()] == ["machine.json"]
    with pytest.raises(ConfigError, match="doctor"):
        _ = bare.storage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version=99: must be 4"),
        ({"num_cpus": "two"}, "num_cpus='two': must be a valid integer"),
        ({"devices": [{}]}, r"devices\[0\]\.device: Field required"),
    ],
)
def test_a_damaged_profile_is_refused_by_field(tmp_path: Path, change: dict, message: str):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(dataclasses.asdict(PROFILE) | change))
    with pytest.raises(ConfigError, match=message):
        MachineProfile.read(path)


def test_no_profile_and_no_folder_for_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"machine\.json.*run `expertly doctor`"):
        MachineProfile.read(tmp_path / "machine.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        PROFILE.write(tmp_path / "file" / "machine.json")

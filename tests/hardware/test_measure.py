"""The measurements give figures of the right order and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from expertly.core.errors import ConfigError, TransferError
from expertly.hardware import measure

pytestmark = pytest.mark.alone

MIB = 1 << 20


@pytest.fixture
def scratch(tmp_path: Path):
    with measure.scratch_file(tmp_path, 32 * MIB, seconds=30) as file:
        yield file


def test_scratch_file_is_real_and_removed(tmp_path: Path):
    abandoned = tmp_path / ".doctor-999999999.scratch"
    abandoned.write_bytes(b"of a process that was killed")
    with measure.scratch_file(tmp_path, 32 * MIB, seconds=30) as file:
        assert file.path.stat().st_size == file.nbytes == 32 * MIB
        assert file.path.stat().st_blocks * 512 >= file.nbytes, "a hole would be read at the speed of memory"
        assert not abandoned.exists()
    assert list(tmp_path.iterdir()) == []


def test_scratch_file_is_removed_after_an_error(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), measure.scratch_file(tmp_path, MIB, seconds=30):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_scratch_file_stops_when_time_is_up(tmp_path: Path):
    with measure.scratch_file(tmp_path, 1 << 40, seconds=0) as file:
        assert file.nbytes == 16 * MIB


def test_a_folder_that_takes_no_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"), measure.scratch_file(tmp_path / "nowhere", MIB, seconds=1):
        pass


@pytest.mark.parametrize(("read_nbytes", "depth"), [(65536, 1), (65536, 4), (MIB, 2), (4 * MIB, 3), (16 * MIB, 8)])
def test_disk_rate_is_bytes_over_time(scratch: measure.ScratchFile, read_nbytes: int, depth: int):
    rate = measure.measure_disk(scratch.path, read_nbytes, depth, seconds=0.05)
    assert (rate.read_nbytes, rate.depth) == (read_nbytes, depth)
    assert 1e5 < rate.nbytes_per_s < 1e12


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the kernel's I/O counters")
def test_disk_rate_counts_what_the_kernel_counts(scratch: measure.ScratchFile):
    def read_nbytes() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    before, start = read_nbytes(), os.times().elapsed
    rate = measure.measure_disk(scratch.path, MIB, 2, seconds=0.3)
    moved, elapsed = read_nbytes() - before, os.times().elapsed - start
    assert rate.nbytes_per_s * 0.3 <= moved  # what was in flight at either end is moved too, but not counted
    assert rate.nbytes_per_s >= moved / (elapsed + 0.05) * 0.5


@pytest.mark.parametrize("read_nbytes", [4095, 64 * MIB])
def test_a_read_size_that_cannot_be_measured(scratch: measure.ScratchFile, read_nbytes: int):
    with pytest.raises(ConfigError, match=f"read_nbytes={read_nbytes}"):
        measure.measure_disk(scratch.path, read_nbytes, 1, seconds=0.01)


def test_a_disk_that_fails_is_an_error_of_ours(scratch: measure.ScratchFile, monkeypatch: pytest.MonkeyPatch):
    def fail(*args, **kwargs):
        raise TransferError("a bad block")

    monkeypatch.setattr("expertly.engine.reading.ExpertFile.read_into", fail)
    with pytest.raises(TransferError, match="a bad block"):
        measure.measure_disk(scratch.path, MIB, 2, seconds=0.05)


@pytest.mark.parametrize("dtype", measure.DTYPES)
def test_matvec_rate(dtype: str):
    threads = torch.get_num_threads()
    rate = measure.measure_matvec(dtype, 1, nbytes=16 * MIB, seconds=0.02)
    assert (rate.dtype, rate.num_threads) == (dtype, 1)
    assert 1e7 < rate.nbytes_per_s < 1e13
    assert torch.get_num_threads() == threads


def test_copy_rate():
    rate = measure.measure_copy(2, nbytes=16 * MIB, seconds=0.02)
    assert rate.num_threads == 2
    assert 1e8 < rate.nbytes_per_s < 1e13


@pytest.mark.gpu
def test_link_rates_grow_with_size():
    from expertly.hardware.measure_cuda import COPY_SIZES, measure_devices

    for device in measure_devices(seconds=1.0):
        assert [link.nbytes for link in device.link] == list(COPY_SIZES)
        first, last = device.link[0], device.link[-1]
        assert last.to_device_nbytes_per_s > 1e9
        assert first.to_device_ns < last.to_device_ns
        assert device.memory_nbytes > 1 << 30

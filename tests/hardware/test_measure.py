"""What `doctor` measures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.formats import expert_format
from expertly.hardware import measure
from expertly.native.kernels import VARIABLE

MIB = 1 << 20


@pytest.fixture
def scratch(tmp_path: Path):
    with measure.scratch_file(tmp_path, 32 * MIB, seconds=30) as (path, _):
        yield path


def test_scratch_file_is_real_and_removed(tmp_path: Path):
    (tmp_path / ".doctor.scratch").write_bytes(b"of a process that was killed")
    with measure.scratch_file(tmp_path, 32 * MIB, seconds=30) as (path, nbytes_per_s):
        assert path.stat().st_size == 32 * MIB and 1e5 < nbytes_per_s < 1e12
        assert path.stat().st_blocks * 512 >= 32 * MIB, "a hole would be read at the speed of memory"
    assert list(tmp_path.iterdir()) == []


def test_scratch_file_stops_when_time_is_up_and_is_removed_after_an_error(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), measure.scratch_file(tmp_path, 1 << 40, seconds=0) as (path, _):
        assert path.stat().st_size == 16 * MIB
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="No such file"), measure.scratch_file(tmp_path / "nowhere", MIB, seconds=1):
        pass


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the kernel's I/O counters")
def test_disk_rate_counts_what_the_kernel_counts(scratch: Path):
    def read_nbytes() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])  # rchar leaves out reads that were queued

    before, start = read_nbytes(), os.times().elapsed
    rate = measure.measure_disk(scratch, MIB, 2, seconds=0.3)
    moved, elapsed = read_nbytes() - before, os.times().elapsed - start
    assert rate.nbytes_per_s * 0.3 <= moved  # what was in flight at either end is moved too, but not counted
    assert rate.nbytes_per_s >= moved / (elapsed + 0.05) * 0.5


def test_a_rate_of_products():
    assert 1e7 < measure.measure_weights_rate(torch.device("cpu"), torch.bfloat16, 0.02, 16 * MIB) < 1e13


def test_a_rate_of_experts_in_a_format(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_EXPERTS_NBYTES", 4 * MIB)
    plain = LayerGeometry(8, 2, 256, 512, 3, 4)
    for name in ("mxfp4", "int4_g32_zeros", "q4_k+q6_k"):
        layer = expert_format(name).geometry(plain)
        rate = measure.measure_experts_rate(layer, torch.float32, seconds=0.02)
        monkeypatch.setenv(VARIABLE, "torch")
        assert measure.measure_experts_rate(layer, torch.float32, seconds=0.02) is None
        monkeypatch.delenv(VARIABLE)
        assert rate is not None and 1e7 < rate < 1e13
    assert measure.measure_experts_rate(plain, torch.float32, seconds=0.02) is None


@pytest.mark.gpu
def test_a_device_and_its_link():
    for device in measure.measure_devices(seconds=1.0):
        assert device.link_nbytes_per_s > 1e9 and device.weights_nbytes_per_s > device.link_nbytes_per_s
        assert device.link_latency_ns > 0 and device.memory_nbytes > 1 << 30

"""What `doctor` measures, and what it says of compressed experts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expertly.core.errors import ConfigError, TransferError
from expertly.core.geometry import LayerGeometry
from expertly.formats import expert_format
from expertly.hardware import measure
from expertly.hardware.measure import machine_choice, machine_costs, measure_decoding, store_costs
from expertly.hardware.profile import DecodeProfile, ThreadsRate
from expertly.native.kernels import VARIABLE, choose_kernels
from tests.engine.failing import raising, replace_reads
from tests.engine.frames import write_store
from tests.hardware.test_profile import PROFILE

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


def test_scratch_file_stops_when_time_is_up_and_is_removed_after_an_error(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), measure.scratch_file(tmp_path, 1 << 40, seconds=0) as file:
        assert file.nbytes == 16 * MIB
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="nowhere"), measure.scratch_file(tmp_path / "nowhere", MIB, seconds=1):
        pass


@pytest.mark.parametrize(("read_nbytes", "depth"), [(65536, 4), (4 * MIB, 3), (16 * MIB, 1)])
def test_disk_rate_is_bytes_over_time(scratch: measure.ScratchFile, read_nbytes: int, depth: int):
    rate = measure.measure_disk(scratch.path, read_nbytes, depth, seconds=0.05)
    assert (rate.read_nbytes, rate.depth) == (read_nbytes, depth)
    assert 1e5 < rate.nbytes_per_s < 1e12


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the kernel's I/O counters")
def test_disk_rate_counts_what_the_kernel_counts(scratch: measure.ScratchFile):
    def read_nbytes() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"])  # rchar leaves out reads that were queued

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
    replace_reads(monkeypatch, raising(TransferError("a bad block")))
    with pytest.raises(TransferError, match="a bad block"):
        measure.measure_disk(scratch.path, 4 * MIB, 2, seconds=0.05)


@pytest.mark.parametrize("dtype", measure.DTYPES)
def test_matvec_rate(dtype: str):
    threads = torch.get_num_threads()
    rate = measure.measure_matvec(dtype, 1, nbytes=16 * MIB, seconds=0.02)
    assert (rate.dtype, rate.num_threads) == (dtype, 1)
    assert 1e7 < rate.nbytes_per_s < 1e13
    assert torch.get_num_threads() == threads


def test_a_rate_of_experts_in_a_format(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "_EXPERTS_NBYTES", 4 * MIB)
    plain = LayerGeometry(8, 2, 256, 512, 3, 4)
    for name in ("mxfp4", "int4_g32_zeros", "q4_k+q6_k"):
        layer = expert_format(name).geometry(plain)
        rate = measure.measure_experts_rate(layer, torch.float32, seconds=0.02)
        monkeypatch.setenv(VARIABLE, "torch")
        assert measure.measure_experts_rate(layer, torch.float32, seconds=0.02) is None
        monkeypatch.delenv(VARIABLE)
        assert (rate is None) == (not choose_kernels().dtypes) and (rate is None or 1e7 < rate < 1e13)
    assert measure.measure_experts_rate(plain, torch.float32, seconds=0.02) is None


@pytest.mark.gpu
def test_link_rates_grow_with_size():
    for device in measure.measure_devices(seconds=1.0):
        assert [link.nbytes for link in device.link] == list(measure.COPY_SIZES)
        first, last = device.link[0], device.link[-1]
        assert last.to_device_nbytes_per_s > 1e9
        assert first.to_device_ns < last.to_device_ns
        assert device.memory_nbytes > 1 << 30


def test_decoding_is_measured_by_one_thread_and_by_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "allowed_cpus", lambda: 2)
    found = measure_decoding(0.02)
    assert [rate.num_threads for rate in found.rates] == [1, 2, 4]
    assert all(rate.nbytes_per_s > 1e6 for rate in found.rates)
    assert 0.6 < found.ratio < 0.72, "10.6 of 16 bits, and what no codec finds"


@pytest.mark.parametrize(("decode_nbytes_per_s", "codec"), [(4e9, "planes"), (2e9, "none")])
def test_the_faster_codec_on_this_disk(decode_nbytes_per_s: float, codec: str) -> None:
    """The disk brings 1.1 GB/s; where one of two threads does not decode faster by a tenth, nothing is gained."""
    decoding = DecodeProfile(0.68, (ThreadsRate(1, 1e9), ThreadsRate(2, decode_nbytes_per_s)))
    profile = dataclasses.replace(PROFILE, decoding=decoding)
    costs = machine_costs(profile)
    assert (costs.ratio, costs.threads, costs.decode_nbytes_per_s) == (0.68, 2, decode_nbytes_per_s / 2)
    choice = machine_choice(profile)
    assert choice.codec == codec and "the disk reads 1.10 GB/s" in choice.why
    with pytest.raises(ConfigError, match="doctor"):
        machine_choice(dataclasses.replace(profile, disk=None))


def test_a_store_is_measured(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    disk, costs = store_costs(store)
    assert disk.nbytes_per_s > 1e6 and 0 < disk.latency_ns < 1e9 and costs.decode_nbytes_per_s > 1e6
    assert costs.ratio == store.ratio
    assert 0 <= costs.threads_beside <= costs.threads and 0 <= costs.read_processors <= costs.threads


def test_what_computing_leaves_to_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = SimpleNamespace(decode_nbytes_per_s=lambda *args, **kwargs: 1e9, read_processors=lambda *args: 0.0)
    monkeypatch.setattr(measure, "read_sample", lambda *args: sample)
    store = write_store(tmp_path / "store")
    for num_cpus, num_threads, beside in ((2, 2, 1), (8, 8, 4), (8, 6, 4), (8, 2, 4), (1, 1, 0)):
        for name in ("allowed_cpus", "granted_cpus"):
            monkeypatch.setattr(measure, name, lambda num=num_cpus: num)
        monkeypatch.setattr(torch, "get_num_threads", lambda num=num_threads: num)
        _, costs = store_costs(store)
        assert (costs.threads, costs.threads_beside) == (min(num_cpus, 4), beside)

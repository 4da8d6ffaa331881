"""What `doctor` says of compressed experts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from expertly.core.errors import ConfigError
from expertly.hardware import measure as measure_codec
from expertly.hardware.measure import machine_choice, machine_costs, measure_decoding, store_costs
from expertly.hardware.profile import DecodeProfile, DecodeRate
from tests.engine.frames import write_store
from tests.hardware.test_profile import PROFILE


def test_decoding_is_measured_by_one_thread_and_by_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_codec, "allowed_cpus", lambda: 2)
    found = measure_decoding(0.02)
    assert [rate.num_threads for rate in found.rates] == [1, 2, 4]
    assert all(rate.nbytes_per_s > 1e6 for rate in found.rates)
    assert 0.6 < found.ratio < 0.72, "10.6 of 16 bits, and what no codec finds"


@pytest.mark.parametrize(("decode_nbytes_per_s", "codec"), [(4e9, "planes"), (2e9, "none")])
def test_the_faster_codec_on_this_disk(decode_nbytes_per_s: float, codec: str) -> None:
    """The disk brings 1.1 GB/s; where one of two threads does not decode faster by a tenth, nothing is gained."""
    decoding = DecodeProfile(0.68, (DecodeRate(1, 1e9), DecodeRate(2, decode_nbytes_per_s)))
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


@pytest.mark.parametrize(("num_cpus", "num_threads", "beside"), [(2, 2, 1), (8, 8, 4), (8, 6, 4), (8, 2, 4), (1, 1, 0)])
def test_what_computing_leaves_to_readers(
    num_cpus: int, num_threads: int, beside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("allowed_cpus", "granted_cpus"):
        monkeypatch.setattr(measure_codec, name, lambda: num_cpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    _, costs = store_costs(write_store(tmp_path / "store"))
    assert (costs.threads, costs.threads_beside) == (min(num_cpus, 4), beside)

"""Choosing a codec: from rates alone, and from what is measured of this disk and these weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.core.costs import CodecCosts
from expertly.core.errors import StoreError
from expertly.core.geometry import LayerGeometry
from expertly.core.units import format_nbytes
from expertly.store import codec_choice
from expertly.store.codec_choice import (
    MIN_MEASURED_NBYTES,
    Sample,
    choose_codec,
    choose_for,
    disk_latency_ns_of,
    disk_rate_at,
    disk_rate_of,
    expected_gain,
    read_sample,
    sampled,
)
from tests.store.builders import FRAMED, PLANES, weights, write_store
from tests.store.mounts import tiny_disk

COSTS, SLOW_DISK = CodecCosts(ratio=0.7, decode_nbytes_per_s=2e9, threads=2), 1e9
SAYS = (
    "weights take 0.70 of their size in planes, the disk reads 1.00 GB/s, 2 threads decode 4.00 GB/s of weights: "
    "loads take 0.70 of the time"
)
BUSY: dict[str, Any] = {"decode_nbytes_per_s": 1.6e9}
MANY: dict[str, Any] = {"threads": 64}


@pytest.mark.parametrize(
    ("changed", "disk", "codec", "gain", "says"),
    [
        ({}, SLOW_DISK, "planes", 1 / 0.7, SAYS),
        # The slower of disk and decoding counts; with 8 threads, which decode 14 GB/s, it is the disk again.
        ({}, 4e9, "none", 2 / 4, "must take 0.91 at the most"),
        ({"threads": 8}, 4e9, "planes", 1 / 0.7, ""),
        # Of a gigabyte 0.3 s of reading are saved; two threads that decode 3.2 GB/s take 0.31 s of both of them.
        (BUSY, SLOW_DISK, "none", 1 / 0.7, "take 0.70 of the time, but more of the processors than reading saves"),
        (BUSY, 0.9e9, "planes", 1 / 0.7, ""),
        (BUSY | {"threads": 4}, SLOW_DISK, "planes", 1 / 0.7, ""),
        # A gain must be a tenth.
        (MANY | {"ratio": 0.90}, SLOW_DISK, "planes", 1 / 0.9, ""),
        (MANY | {"ratio": 0.92}, SLOW_DISK, "none", 1 / 0.92, "must take 0.91 at the most"),
        (MANY | {"ratio": 1.01}, SLOW_DISK, "none", 1 / 1.01, "must take 0.91 at the most"),
    ],
)
def test_a_codec_is_chosen_by_what_loads_and_processors_gain(
    changed: dict[str, Any], disk: float, codec: str, gain: float, says: str
) -> None:
    costs = replace(COSTS, **changed)
    choice = choose_codec(costs, disk)
    assert choice.codec == codec and choice.why.endswith(says)
    assert expected_gain(costs, disk) == pytest.approx(gain)


LARGE = LayerGeometry(128, 2, hidden_size=512, intermediate_size=176, num_matrices=3, itemsize=2)  # of 528 KiB


def sample(kind: str = "normal", layer: LayerGeometry = FRAMED) -> Sample:
    return Sample(layer, ([weights(kind, "bfloat16", layer.expert_nbytes // 2, seed)] for seed in range(4)))


def test_a_sample_has_the_ratio_of_what_it_is_of() -> None:
    assert 0.65 < sample().ratio < 0.75
    assert sample("random bits").ratio == 1
    assert sample("constant").ratio < 0.02


def test_a_sample_takes_no_more_than_it_needs() -> None:
    layer = replace(FRAMED, hidden_size=4096)  # an expert of 4.1 MiB
    taken = []

    def chunks() -> object:
        raw = weights("normal", "bfloat16", layer.expert_nbytes // 2)
        for begin in range(0, len(raw), 1 << 20):
            taken.append(begin)
            yield raw[begin : begin + (1 << 20)]

    assert 0.65 < Sample(layer, [chunks()]).ratio < 0.75
    assert taken == [0, 1 << 20]


def test_a_sample_is_of_the_whole_model() -> None:
    layers = [FRAMED, replace(FRAMED, num_experts=9, hidden_size=8), *[FRAMED] * 3]
    assert sampled(layers) == [(0, 0), (2, 0), (3, 0), (4, 0)]
    assert sampled([replace(FRAMED, num_experts=8)]) == [(0, 0), (0, 2), (0, 4), (0, 6)]
    assert sampled([replace(FRAMED, num_experts=1, top_k=1)] * 2) == [(0, 0), (1, 0)]


def test_a_store_s_sample_is_its_own(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", PLANES)
    index = store.frames[0]
    found = read_sample(PLANES.layers, store.frames)
    assert found.ratio == pytest.approx(index.stored_nbytes / PLANES.layers[0].nbytes, abs=1e-9)  # all four of layer 0
    content = bytearray(index.path.read_bytes())
    content[0] ^= 1
    index.path.write_bytes(content)
    with pytest.raises(StoreError, match="frame 0 of expert 0: checksum"):
        read_sample(PLANES.layers, store.frames)


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    assert 1e6 < disk_rate_at(tmp_path / "not" / "there" / "yet") < 1e12
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "file"
    path.write_bytes(bytes((3 << 20) + 4096 + 5))
    assert 1e5 < disk_rate_of([path, path]) < 1e12
    with pytest.raises(StoreError, match="cannot be opened"):
        disk_rate_of([tmp_path / "absent"])


def test_files_are_closed_whatever_comes_of_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    before = os.listdir("/proc/self/fd")
    for measure in (disk_rate_of, disk_latency_ns_of, lambda paths: sample().read_processors(1, paths)):
        with pytest.raises(StoreError, match="cannot be opened"):
            measure([path, tmp_path / "absent"])
        measure([path])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_latency_of_a_disk_is_that_of_its_smallest_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 << 20))
    assert 0 < disk_latency_ns_of([path]) < 1e9
    path.write_bytes(b"less than a page")
    assert disk_latency_ns_of([path]) == 0


def test_what_decoding_loses_beside_reads_is_what_reading_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that decode, and four that read beside them: three quarters of the rate are left."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(
        codec_choice, "_rates", lambda work, num, seconds: [4.0, 4.0] if num == 2 else [3.0, 3.0, *[9.0] * (num - 2)]
    )
    assert sample().read_processors(2, [path]) == 0.5


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        with pytest.raises(StoreError, match="the disk is full"):
            disk_rate_at(disk / "store")
        assert list(disk.iterdir()) == []


def test_random_bits_are_stored_as_they_are() -> None:
    assert LARGE.nbytes >= MIN_MEASURED_NBYTES
    choice = choose_for([LARGE], lambda: sample("random bits", LARGE), lambda: 1e6)
    assert choice.codec == "none" and "weights take 1.00 of their size" in choice.why


def test_a_small_model_is_not_measured() -> None:
    choice = choose_for(PLANES.layers, lambda: pytest.fail("sampled"), lambda: pytest.fail("measured"))
    nbytes = sum(layer.nbytes for layer in PLANES.layers)
    assert choice.codec == "none" and f"{format_nbytes(nbytes)} of experts are too few" in choice.why


def test_a_damaged_frame_ends_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in a thread reaches the caller."""

    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(codec_choice.FrameDecoder, "decode", broken)
    with pytest.raises(RuntimeError, match="broken"):
        sample().decode_nbytes_per_s(2, 0.01)
    assert np.isfinite(sample().ratio)

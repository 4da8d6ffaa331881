"""Which codec is chosen, from rates alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from expertly.core.codecs import (
    CODECS,
    MIN_MEASURED_NBYTES,
    CodecRates,
    check_codec,
    choose_codec,
    computing_threads,
    decoding_threads,
    expected_gain,
    too_small,
)
from expertly.core.errors import ConfigError

SLOW_DISK = CodecRates(ratio=0.7, disk_nbytes_per_s=1e9, decode_nbytes_per_s=2e9, num_threads=2)


def test_a_slow_disk_is_worth_decoding_for() -> None:
    assert expected_gain(SLOW_DISK) == pytest.approx(1 / 0.7)
    choice = choose_codec(SLOW_DISK)
    assert choice.codec == "planes"
    assert choice.why == (
        "weights take 0.70 of their size in planes, the disk reads 1.00 GB/s, 2 threads decode 4.00 GB/s of weights: "
        "loads take 0.70 of the time"
    )


def test_the_slower_of_disk_and_decoding_counts() -> None:
    fast_disk = replace(SLOW_DISK, disk_nbytes_per_s=4e9)
    assert expected_gain(fast_disk) == pytest.approx(2 / 4)
    assert choose_codec(fast_disk).codec == "none"
    assert choose_codec(replace(fast_disk, num_threads=8)).codec == "planes"  # 14 GB/s: the disk is the slower again


def test_decoding_may_not_take_more_of_the_processors_than_reading_saves() -> None:
    """Of a gigabyte 0.3 s of reading are saved; two threads that decode 3.2 GB/s take 0.31 s of both of them."""
    busy = replace(SLOW_DISK, decode_nbytes_per_s=1.6e9)
    choice = choose_codec(busy)
    assert expected_gain(busy) == pytest.approx(1 / 0.7) and choice.codec == "none"
    assert choice.why.endswith("loads with planes take 0.70 of the time, but more of the processors than reading saves")
    assert choose_codec(replace(busy, disk_nbytes_per_s=0.9e9)).codec == "planes"
    assert choose_codec(replace(busy, num_threads=4)).codec == "planes"


@pytest.mark.parametrize(("ratio", "codec"), [(0.90, "planes"), (0.92, "none"), (1.0, "none"), (1.01, "none")])
def test_a_gain_must_be_a_tenth(ratio: float, codec: str) -> None:
    choice = choose_codec(replace(SLOW_DISK, ratio=ratio, num_threads=64))
    assert choice.codec == codec
    assert ("must take 0.91 at the most" in choice.why) == (codec == "none")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["ratio", "disk_nbytes_per_s", "decode_nbytes_per_s"])
def test_what_is_no_rate_is_named(field: str, value: float) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"{field}={value}: must be a number above 0"):
        choose_codec(replace(SLOW_DISK, **changed))


@pytest.mark.parametrize("name", ["", "zstd", "Planes", None, 3, ["none"]])
def test_an_unknown_codec_is_named(name: object) -> None:
    with pytest.raises(ConfigError, match=r"codec=.*: unknown; accepted: none, planes, auto"):
        check_codec(name)
    assert [check_codec(known) for known in (*CODECS, "auto")] == ["none", "planes", "auto"]


def test_few_bytes_are_not_measured_for() -> None:
    small = too_small(MIN_MEASURED_NBYTES - 1)
    assert small is not None and small.codec == "none" and "64.0 MiB of experts are too few" in small.why
    assert too_small(MIN_MEASURED_NBYTES) is None


def test_as_many_threads_decode_as_there_are_readers_and_processors_for() -> None:
    assert [decoding_threads(cpus, 4) for cpus in (1, 2, 4, 64)] == [1, 2, 4, 4]
    assert decoding_threads(0, 4) == 1


@pytest.mark.parametrize(
    ("num_cpus", "computing"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (12, 8), (16, 12), (64, 60)]
)
def test_computing_leaves_readers_half_of_the_processors_or_one_each(num_cpus: int, computing: int) -> None:
    assert computing_threads(num_cpus, num_readers=4) == computing

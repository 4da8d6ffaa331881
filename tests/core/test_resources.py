"""Codecs by name, and how processors are divided between decoding and computing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expertly.core.costs import CODECS, check_codec
from expertly.core.errors import ConfigError
from expertly.core.resources import computing_threads, decoding_threads, granted_cpus


@pytest.mark.parametrize("name", ["", "zstd", "Planes", None, 3, ["none"]])
def test_an_unknown_codec_is_named(name: object) -> None:
    with pytest.raises(ConfigError, match=r"codec=.*: unknown; accepted: none, planes, auto"):
        check_codec(name)
    assert [check_codec(known) for known in (*CODECS, "auto")] == ["none", "planes", "auto"]


def test_as_many_threads_decode_as_there_are_readers_and_processors_for() -> None:
    assert [decoding_threads(cpus, 4) for cpus in (1, 2, 4, 64)] == [1, 2, 4, 4]
    assert decoding_threads(0, 4) == 1


@pytest.mark.parametrize(
    ("num_cpus", "computing"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (12, 8), (16, 12), (64, 60)]
)
def test_computing_leaves_readers_half_of_the_processors_or_one_each(num_cpus: int, computing: int) -> None:
    assert computing_threads(num_cpus, num_readers=4) == computing


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "rubbish\n"}, None),
        ({}, None),
    ],
)
def test_a_cgroups_quota(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert granted_cpus(tmp_path) == (len(os.sched_getaffinity(0)) if expected is None else expected)

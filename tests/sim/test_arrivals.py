"""Arrivals: the Azure trace's format, and files that are damaged."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.sim.schedule import read_arrivals

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44\n"
SECOND = "2023-11-16 18:15:50.9951690,396,109\n"
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "arrivals"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "arrivals.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_times_are_counted_from_the_first(tmp_path: Path):
    arrivals = read_arrivals(write(tmp_path, HEADER + FIRST + SECOND))
    assert len(arrivals) == 2
    assert arrivals.times_ns.tolist() == [0, 4_314_579_000]
    assert arrivals.prompt_tokens.tolist() == [374, 396]
    assert arrivals.output_tokens.tolist() == [44, 109]


@pytest.mark.parametrize(
    ("first", "second", "gap_ns"),
    [
        ("2023-12-31 23:59:59.9", "2024-01-01 00:00:00", 100_000_000),
        ("2024-02-28T23:59:59Z", "2024-03-01T00:00:00Z", 86_401 * 10**9),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.009931+00:00", 1000),
        ("2023-11-16 18:15:46", "2023-11-16 18:15:46", 0),
    ],
)
def test_spellings_of_times(tmp_path: Path, first: str, second: str, gap_ns: int):
    arrivals = read_arrivals(write(tmp_path, f"{HEADER}{first},1,1\n{second},1,1\n"))
    assert arrivals.times_ns.tolist() == [0, gap_ns]


def test_columns_are_found_by_name(tmp_path: Path):
    text = f"\ufeffGeneratedTokens,model,TIMESTAMP,ContextTokens\r\n44,x,{FIRST.split(',')[0]},374\r\n\r\n"
    arrivals = read_arrivals(write(tmp_path, text))
    assert (arrivals.prompt_tokens.tolist(), arrivals.output_tokens.tolist()) == ([374], [44])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: must name the column TIMESTAMP once"),
        (HEADER, "no requests in it"),
        ("TIMESTAMP,ContextTokens\n", "line 1: must name the column GeneratedTokens once, has: TIMESTAMP, ContextTok"),
        ("TIMESTAMP,TIMESTAMP,ContextTokens,GeneratedTokens\n", "must name the column TIMESTAMP once"),
        (
            HEADER + SECOND + FIRST,
            "line 3, TIMESTAMP='2023-11-16 18:15:46.*earlier than the line before; sort",
        ),
        (HEADER + FIRST + "2023-11-16 18:15:50,396\n", "line 3: 2 fields, but line 1 names 3"),
        (HEADER + FIRST.replace("374", "-1"), "line 2, ContextTokens='-1': must be a whole number from 0"),
        (HEADER + FIRST.replace("374", "3.5"), "line 2, ContextTokens='3.5'"),
        (HEADER + FIRST.replace("374", "٣"), "line 2, ContextTokens='٣'"),
        (HEADER + FIRST.replace(",44", ","), "line 2, GeneratedTokens=''"),
        (HEADER + FIRST.replace(",44", ",9999999999"), "line 2, GeneratedTokens='9999999999'"),
        (HEADER + FIRST.replace("11-16", "11-31"), "line 2, TIMESTAMP='2023-11-31 .*': no time; accepted: 2023-11-16"),
        (HEADER + FIRST.replace("2023", "0001"), "line 2, TIMESTAMP="),
        (HEADER + FIRST.replace("2023", "9999"), "line 2, TIMESTAMP="),
        (HEADER + "nan,1,1\n", "line 2, TIMESTAMP='nan'"),
        (HEADER + FIRST + '"2023-11-16', "not CSV"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        read_arrivals(path)
    assert str(path) in str(error.value)


def test_files_that_are_no_text(tmp_path: Path):
    path = tmp_path / "arrivals.csv"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arrivals(path)
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_arrivals(path)


def test_damaged_files_are_read_or_refused_and_never_crash(tmp_path: Path):
    good = (HEADER + FIRST + SECOND).encode()
    dice = random.Random(0)
    path = tmp_path / "arrivals.csv"
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(dice.randrange(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged[: dice.randrange(len(damaged) + 1)])
        try:
            read_arrivals(path)
        except ConfigError as error:
            assert str(path) in str(error)


@pytest.mark.skipif(not list(DATA.glob("*.csv")), reason="no recorded arrivals here")
def test_recorded_arrivals():
    for path in DATA.glob("*.csv"):
        arrivals = read_arrivals(path)
        assert len(arrivals) > 1000
        assert arrivals.times_ns[0] == 0 and (arrivals.times_ns[1:] >= arrivals.times_ns[:-1]).all()
        assert arrivals.prompt_tokens.min() > 0

"""`expertly lab simulate --codec` as a user sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from expertly.core.costs import CodecCosts, Link
from tests.cli.asking import Captured, answer, told
from tests.sim.drive import make_trace, random_passes, sized, toy

LAYERS = sized(3, 8, 2)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    make_trace(tmp_path / "trace", random_passes(3, LAYERS, 60, prompt=3), LAYERS)
    return tmp_path / "trace"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Reading an expert takes 50 times as long as decoding it."""
    toy(link=Link(0.01e9, 7, 3), codec=CodecCosts(0.5, 0.5e9, 2)).write(tmp_path / "slow.toml")
    return tmp_path / "slow.toml"


def simulate(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "simulate", *words)


def table(capsys: Captured, *words: object) -> str:
    return told(capsys, "lab", "simulate", *words)


def test_planes_read_fewer_bytes_in_less_time(trace: Path, slow: Path, capsys: Captured) -> None:
    rows = {}
    for codec in ("none", "planes"):
        found = simulate(capsys, trace, "--memory", "40%", "--hardware", slow, "--codec", codec)
        assert found["codec"] == codec
        rows[codec] = {row["system"]: row for row in found["results"]}
    for system in ("lru", "belady", "oracle"):
        plain, coded = rows["none"][system], rows["planes"][system]
        assert plain["bytes_read"] is None and coded["bytes_read"] * 2 == coded["bytes_loaded"]
        assert 0.5 < coded["tpot_s"] / plain["tpot_s"] < 0.65, "reading half, and decoding"
    assert rows["none"]["resident"]["tpot_s"] == rows["planes"]["resident"]["tpot_s"]


def test_what_the_codec_is_taken_to_cost_is_said(trace: Path, slow: Path, capsys: Captured) -> None:
    told = table(capsys, trace, "--memory", "40%", "--hardware", slow, "--codec", "planes")
    assert "read" in told
    costs = "experts take 0.50 of their size on disk, 2 threads decode 1.00 GB/s of weights (toy's [codec])"
    assert f"codec planes: {costs}" in told


def test_a_profile_without_a_codec_is_assumed_to_have_one_and_that_is_said(
    trace: Path, tmp_path: Path, capsys: Captured
) -> None:
    toy().write(tmp_path / "toy.toml")
    told = table(capsys, trace, "--memory", "40%", "--hardware", tmp_path / "toy.toml", "--codec", "planes")
    assert "codec planes: experts take 0.68 of their size on disk" in told and "(assumed: toy has no [codec])" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "zip"], "codec='zip': unknown; accepted: none, planes"),
        (["--codec", "planes"], "codec='planes': on hardware 'rtx3090' all experts lie decoded in host memory"),
    ],
)
def test_what_cannot_be_is_an_error(arguments: list[str], message: str, trace: Path, capsys: Captured) -> None:
    assert main(["lab", "simulate", str(trace), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"expertly: error: {message}") and err.count("\n") == 1

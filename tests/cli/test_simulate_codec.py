"""`expertly simulate --codec --compressed` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from expertly.core.costs import CodecCosts, Link
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


def simulate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def table(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_planes_read_fewer_bytes_in_less_time(trace: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for codec in ("none", "planes"):
        found = simulate(capsys, trace, "--memory", "40%", "--hardware", slow, "--codec", codec)
        assert found["codec"] == codec and found["compressed"] == "0"
        rows[codec] = {row["system"]: row for row in found["results"]}
    for system in ("lru", "belady", "oracle"):
        plain, coded = rows["none"][system], rows["planes"][system]
        assert plain["bytes_read"] is None and coded["bytes_read"] * 2 == coded["bytes_loaded"]
        assert 0.5 < coded["tpot_s"] / plain["tpot_s"] < 0.65, "reading half, and decoding"
    assert rows["none"]["resident"]["tpot_s"] == rows["planes"]["resident"]["tpot_s"]


def test_copies_in_memory_pay_on_a_slow_disk_and_auto_says_why(
    trace: Path, slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (trace, "--memory", "40%", "--hardware", slow, "--codec", "planes")
    without = simulate(capsys, *common)["results"][0]
    chosen = simulate(capsys, *common, "--compressed", "auto")["results"][0]
    assert chosen["compressed"]["share"] > 0.3 and chosen["compressed"]["hit_rate"] > 0.2
    assert chosen["bytes_read"] < without["bytes_read"] and chosen["tpot_s"] < without["tpot_s"]
    told = table(capsys, *common, "--compressed", "auto")
    assert "read" in told and "from copies" in told
    assert (
        "codec planes: experts take 0.50 of their size on disk, 2 threads decode 1.00 GB/s of weights (toy's [codec])"
        in told
    )
    assert (
        f"memory 40%: {chosen['compressed']['share']:.1%} of it for compressed experts; reading brings 0.02 GB/s"
        in told
    )


def test_a_share_that_is_asked_for_is_taken(trace: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, trace, "--memory", "50%", "--hardware", slow, "--codec", "planes", "--compressed", "0.25")
    assert found["results"][0]["compressed"]["share"] == 0.25
    assert found["results"][0]["compressed"]["why"] == "it was asked for"


def test_a_profile_without_a_codec_is_assumed_to_have_one_and_that_is_said(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy().write(tmp_path / "toy.toml")
    told = table(capsys, trace, "--memory", "40%", "--hardware", tmp_path / "toy.toml", "--codec", "planes")
    assert "codec planes: experts take 0.68 of their size on disk" in told and "(assumed: toy has no [codec])" in told
    assert "from copies" not in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "zip"], "codec='zip': unknown; accepted: none, planes"),
        (["--compressed", "30%"], "compressed='30%': only with codec='planes'; accepted: 0"),
        (["--codec", "planes", "--compressed", "150%"], "compressed='150%': accepted are a share of the memory"),
        (["--codec", "planes"], "codec='planes': on hardware 'rtx3090' all experts lie decoded in host memory"),
        (
            ["--codec", "planes", "--compressed", "30%", "--experts-per-layer", "2"],
            "compressed='30%': a share of what memory? experts_per_layer=2 says what is kept; give --memory",
        ),
        (
            ["--codec", "planes", "--compressed", "90%", "--hardware", "laptop-nvme", "--memory", "40%"],
            "compressed='90%': 414 of 460 bytes stay compressed; memory=46 bytes: below the ring",
        ),
    ],
)
def test_what_cannot_be_is_an_error(
    arguments: list[str], message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"expertly: error: {message}") and err.count("\n") == 1

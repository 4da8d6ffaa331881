"""`expertly lab compare` with a trace: the simulator alone, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from expertly.core.geometry import Geometry
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, save_plan
from tests.cli.asking import Captured, answer
from tests.lab.compare.html import read
from tests.sim.drive import make_trace, random_passes, sized

LAYERS = sized(2, 8, 2)
BOUNDS = ["belady", "belady-global", "oracle", "resident"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four requests of a prompt of 4 tokens and 10 steps, sizes known."""
    passes = random_passes(0, LAYERS, 10, prompt=4, num_requests=4)
    return make_trace(tmp_path / "given", passes, LAYERS, num_requests=4, is_full=True).folder


def compare(capsys: Captured, *words: object, code: int = 0) -> dict[str, Any]:
    return answer(capsys, "lab", "compare", *words, code=code)


def error_of(capsys: Captured, *arguments: object) -> str:
    assert main(["lab", "compare", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1].removeprefix("expertly: error: ")


def test_systems_beside_the_bounds(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    found = compare(capsys, trace, "--system", "lru,lfu,adapmoe", "--memory", "40%,70%", "--out", out)
    assert found == json.loads((out / "results.json").read_text())
    assert found["hardware_from"] == "profile rtx3090" and found["engine"] is None
    assert [(row["memory"], row["system"]) for row in found["rows"]] == [
        (memory, system) for memory in ("40%", "70%") for system in ("lru", "lfu", "adapmoe", *BOUNDS)
    ]
    for memory in ("40%", "70%"):
        loaded = {row["system"]: row["simulated"]["bytes_loaded"] for row in found["rows"] if row["memory"] == memory}
        assert loaded.pop("resident") == 0
        assert min(loaded.values()) == loaded["belady-global"] < loaded["lru"]
    for row in found["rows"]:
        assert row["engine"] is None and len(row["simulated"]["latencies_s"]) == 4
    assert {one["system"] for one in found["timelines"]} == {"lru", "lfu", "adapmoe", "oracle"}
    page = read((out / "report.html").read_text())
    assert page.tables[0][0][1:] == ["simulator"] and "Loading ahead" in page.headings
    assert not (out / "trace").exists(), "the trace is where it was"


def test_rates_alone_where_sizes_are_unknown(bare: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert main(["lab", "compare", str(bare), "--system", "lru,lfu", "--memory", "40%", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "has the most hits" in printed and "rates only" in printed
    found = json.loads((out / "results.json").read_text())
    assert all(row["simulated"]["tpot_s"] is None for row in found["rows"]) and found["timelines"] == []
    page = read((out / "report.html").read_text())
    assert "hit rate, simulator" in page.tooltips and "One token in time" not in page.headings


def test_a_system_that_the_trace_cannot_serve_is_named(bare: Path, tmp_path: Path, capsys: Captured) -> None:
    found = compare(capsys, bare, "--system", "lru,adapmoe", "--memory", "40%", "--out", tmp_path / "out")
    (failure,) = found["failures"]
    assert failure["system"] == "adapmoe" and "needs lookahead, which this trace lacks" in failure["cause"]
    assert failure["is_skipped"], "it is no fault of the comparison: the exit code is 0"
    assert "lru" in {row["system"] for row in found["rows"]}
    compare(capsys, bare, "--system", "adapmoe", "--memory", "40%", "--out", tmp_path / "alone", code=2)


def test_a_system_that_cannot_be_simulated_so_is_named(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    """A plan of other experts stops moepic alone."""
    plan = SplitPlan(Geometry(sized(3, 8, 2), 4), (LayerSplit(1, 4, 4),) * 3)
    save_plan(tmp_path / "plan.json", plan, {})
    arguments = ("--system", "lru,moepic,lfu", "--plan", tmp_path / "plan.json", "--memory", "60%")
    found = compare(capsys, trace, *arguments, "--out", tmp_path / "out", code=2)
    assert [row["system"] for row in found["rows"]] == ["lru", "lfu", *BOUNDS]
    (failure,) = found["failures"]
    assert failure["system"] == "moepic" and "plan" in failure["cause"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--system", "nosuch"], "system='nosuch': unknown"),
        (["--system", "lru,"], "system='lru,': must be one or more"),
        (["--system", "oracle"], "system='oracle': needs to know the demands to come"),
        (["--memory", "a lot"], "memory='a lot': accepted are"),
        (["--memory", "auto"], "memory='auto': budgets are compared"),
        (["--memory", "1%"], "memory='1%': below the staging slots"),
        (["--rounds", "2"], "rounds=2: of no use with a trace"),
        (["--prompts", "x.jsonl"], "prompts='x.jsonl': of no use with a trace"),
        (["--requests", "0"], "'--requests': '0': must be a whole number from 1"),
        (["--hardware", "abacus"], "hardware='abacus': no such profile"),
        (["--codec", "zip"], "codec='zip': unknown"),
        (["--split", "9"], "'9': must be two whole numbers"),
        (["--predictor", "nowhere"], "predictor='nowhere': no system of"),
        (["--system", "promoe", "--predictor", "nowhere"], "nowhere"),
        (["--system", "moepic", "--plan", "nowhere"], "nowhere: no such file"),
        (["--plan", "nowhere", "--system", "lru"], "plan='nowhere': no system of lru"),
    ],
)
def test_refused(trace: Path, tmp_path: Path, capsys: Captured, arguments: list[str], problem: str) -> None:
    assert problem in error_of(capsys, trace, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_model_takes_no_geometry(tmp_path: Path, capsys: Captured) -> None:
    said = error_of(capsys, "--geometry", "gpt-oss-20b", "--out", tmp_path / "out")
    assert said == "geometry='gpt-oss-20b': of no use with a model; accepted with a trace"

"""`expertly lab simulate` for a predictor that looks several layers ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.cli.main import main
from tests.sim.drive import make_trace, random_passes, sized


def test_a_predictor_of_several_distances_has_a_line_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = sized(4, 8, 2)
    folder = make_trace(tmp_path / "deep", random_passes(0, layers, 30), layers).folder
    arguments = ("lab", "simulate", str(folder), "--memory", "40%", "--predict", "inline", "--system")
    assert main([*arguments, "lru:prediction=counts,lru:prediction=counts:distance=3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(printed) if "layers ahead" in line) + 2
    lines = [line.split() for line in printed[first : first + 3]]
    assert [line[:3] for line in lines] == [["40%", "lru:prediction=counts:distance=3", k] for k in "123"]
    assert printed[first + 3] == "", "where there is one distance the table above says it"
    assert main([*arguments, "lru:prediction=counts:distance=3", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["results"][0]
    for line in lines:
        rates = [row[f"{name}_by_distance"][line[2]] for name in ("accuracy", "fetch_rate", "goodpred")]
        assert line[3:] == [f"{100 * rate:.1f}%" for rate in rates]

"""`expertly lab trace synth --lookahead`: what systems do that look ahead by it, and the label of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from tests.cli.asking import Captured, answer

SYNTH = ["--layers", "6", "--experts", "8", "--top-k", "2"]
SYNTH += ["--tokens", "240", "--requests", "4", "--prefill-tokens", "5"]
GEOMETRY = """name = "small"
num_layers = 6
[layer]
num_experts = 8
top_k = 2
hidden_size = 64
intermediate_size = 64
num_matrices = 3
itemsize = 2
"""


@pytest.fixture
def geometry(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(GEOMETRY)
    return path


def simulated(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "simulate", *words, "--hardware", "rtx3090", "--memory", "50%")


def test_a_system_that_looks_ahead_is_right_as_often_as_stated(tmp_path, geometry, capsys):
    trace = tmp_path / "trace"
    assert main(["lab", "trace", "synth", str(trace), *SYNTH, "--lookahead", "0.8"]) == 0
    capsys.readouterr()
    half = "moepic:allocation=split"
    systems = f"lru:prediction=lookahead,adapmoe,moepic,{half},lru"
    facts = simulated(capsys, trace, "--geometry", geometry, "--system", systems)
    rows = {row["system"]: row for row in facts["results"]}
    assert all(row["skipped"] is None for row in rows.values())
    assert rows["lru:prediction=lookahead"]["prediction_accuracy"] == pytest.approx(0.8, abs=0.03)
    assert all(rows[name]["prefetched_bytes"] > 0 for name in ("adapmoe", "moepic", half))
    assert rows[half]["partial_hit_rate"] > 0
    note = "lookahead: modelled: 0.8 of the K best of the next layer are needed; nothing of the next token"
    assert note in facts["notes"]
    alone = simulated(capsys, trace, "--geometry", geometry, "--system", "lru")
    assert not any("modelled" in note for note in alone["notes"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lookahead", "1.5"], "'1.5': must be from 0 to 1"),
        (["--lookahead", "0.9", "--top-k", "5"], "lookahead=0.9: of 8 experts, top-5, too few are not needed"),
    ],
)
def test_refusals(tmp_path, capsys, flags, message):
    assert main(["lab", "trace", "synth", str(tmp_path / "trace"), *SYNTH, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "trace").exists()

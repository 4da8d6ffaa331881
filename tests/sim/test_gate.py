"""Gates in the simulator: they keep what pays on a machine, and lose little where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Link
from expertly.sim.study import Memory, Study
from tests.sim.drive import make_study, make_trace, random_passes, sized, toy

LAYERS = sized(4, 8, 2)
ON = "lru:prediction=lookahead"
WRONG = "lru:prediction=random:width=4"
NUM_PASSES = 400


def study(folder: Path, nbytes_per_s: float) -> Study:
    passes = random_passes(3, LAYERS, NUM_PASSES, prompt=3)
    trace = make_trace(folder / "trace", passes, LAYERS, is_full=True)
    machine = toy(link=Link(nbytes_per_s, 0, 0), layer_ns=200, iteration_ns=100)
    return make_study(trace, machine, matcher="inline")


def run(study: Study, system: str) -> dict[str, Any]:
    return study.row(get_system(system), Memory("50%"))


@pytest.mark.parametrize("nbytes_per_s", [0.05e9, 0.2e9, 2e9])
@pytest.mark.parametrize("on", [ON, WRONG])
def test_a_gate_is_about_as_fast_as_the_better_of_all_and_nothing(on: str, nbytes_per_s: float, tmp_path: Path) -> None:
    machine = study(tmp_path, nbytes_per_s)
    none, every, gated = (run(machine, one) for one in ("lru", on, f"{on}:gate=confidence"))
    assert gated["tpot_s"] < 1.03 * min(none["tpot_s"], every["tpot_s"])
    assert gated["gate"]["let"] and gated["gate"]["kind"] == "confidence"
    assert none["gate"] is every["gate"] is None


def test_what_is_right_is_let_in_and_what_is_not_is_refused(tmp_path: Path) -> None:
    machine = study(tmp_path, 0.2e9)
    right, wrong = (run(machine, f"{one}:gate=confidence")["gate"] for one in (ON, WRONG))
    assert right["let"] and right["accuracy"] == 1
    assert wrong["refused"] > 10 * wrong["let"]


def test_the_same_run_decides_the_same(tmp_path: Path) -> None:
    first, second = (run(study(tmp_path / name, 0.2e9), f"{ON}:gate=confidence") for name in "ab")
    assert first == second

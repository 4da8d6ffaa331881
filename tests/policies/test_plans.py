"""The file of a split plan: what comes back, what is refused, for which system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, read_plan, save_plan, uniform_plan
from expertly.scheduler.budget import split_budget
from expertly.scheduler.decisions import header_of
from expertly.scheduler.presets import get_system
from tests.policies.moepic.builders import shape_of

GEOMETRY = shape_of(3)
PLAN = SplitPlan(GEOMETRY, (LayerSplit(2, 2, 5), LayerSplit(0, 0, 0), LayerSplit(3, 4, 12)))


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    return str(caught.value)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, PLAN, {"model": "toy", "exposed_ms": 1.5, "memory": None})
    assert read_plan(path) == PLAN and read_plan(str(path)) == PLAN
    read = json.loads(path.read_text())
    assert read["about"] == {"model": "toy", "exposed_ms": 1.5, "memory": None}
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"


def test_a_file_from_before_is_replaced_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, PLAN, {})
    other = uniform_plan(GEOMETRY, [12])
    save_plan(path, other, {})
    assert read_plan(path) == other
    with pytest.raises(ConfigError, match="writing the plan failed"):
        save_plan(tmp_path / "missing" / "plan.json", PLAN, {})
    assert read_plan(path) == other


def test_what_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert error_of(path) == f"{path}: no such file"
    assert "cannot be read" in error_of(tmp_path)
    path.write_text("[1, 2]")
    assert error_of(path) == f"{path}: holds a JSON list; must be an object"
    path.write_text('{"format": ')
    assert error_of(path).startswith(f"{path}: not JSON")
    path.write_text(json.dumps({**PLAN.to_dict(), "layers": []}))
    assert error_of(path) == f"{path}: plan field layers=[]: must be a list of one object for each MoE layer"


@pytest.mark.parametrize("system", ["lru", "fmoe", "resident"])
def test_a_system_without_splits_takes_none(system: str) -> None:
    assert not get_system(system).takes_plan
    with pytest.raises(ConfigError, match=f"plan: system '{system}' takes none"):
        get_system(system).check_plan(PLAN, GEOMETRY, split_budget(GEOMETRY, GEOMETRY.nbytes))


def test_it_must_fit_the_model_and_its_segments() -> None:
    system = get_system("moepic")
    budget = split_budget(GEOMETRY, GEOMETRY.nbytes)
    system.check_plan(PLAN, GEOMETRY, budget)
    with pytest.raises(ConfigError, match="segments_per_expert=4: must be 2, as it runs"):
        system.check_plan(PLAN, Geometry(GEOMETRY.layers, 2), budget)
    other = shape_of(3, width=32)
    with pytest.raises(ConfigError, match=r"layers\[0\].intermediate_size=16: must be 32, as the model has it"):
        system.check_plan(PLAN, other, budget)


def test_it_must_fit_the_memory() -> None:
    """17 segments in budgets; half of 72 less a ring of 8 keeps 28, a third 16."""
    system = get_system("moepic")
    system.check_plan(PLAN, GEOMETRY, split_budget(GEOMETRY, GEOMETRY.nbytes // 2))
    small = split_budget(GEOMETRY, GEOMETRY.nbytes // 3)
    with pytest.raises(ConfigError, match=r"budgets of 17 segments together; must be at most the 16 "):
        system.check_plan(PLAN, GEOMETRY, small)


def test_recorded_decisions_say_by_which_plan() -> None:
    """A replay makes its scheduler from it."""
    budget = split_budget(GEOMETRY, GEOMETRY.nbytes // 2)
    header = header_of(get_system("moepic"), GEOMETRY, budget, "resident", PLAN)
    assert SplitPlan.from_dict(header["plan"]) == PLAN
    assert "plan" not in header_of(get_system("lru"), GEOMETRY, budget, "resident")

"""A plan survives JSON and its file, and nothing else does; which systems take one, and what they make of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, Timing, read_plan, save_plan
from expertly.policies.known import Known
from expertly.scheduler.budget import split_budget
from expertly.scheduler.presets import get_system
from tests.policies.moepic.builders import shape_of

SHAPE = Geometry((LayerGeometry(6, 2, 4, 16, 3, 2), LayerGeometry(8, 3, 4, 32, 2, 4)), 4)


PLAN = SplitPlan(SHAPE, (LayerSplit(5, 3, 17), LayerSplit(0, 0, 1)))


def test_json_and_back() -> None:
    text = json.dumps(PLAN.to_dict())
    assert SplitPlan.from_dict(json.loads(text)) == PLAN
    assert json.loads(text)["layers"][0]["kept_experts"] == 5
    assert PLAN.free_segments == (2, 1), "by size class"


@pytest.mark.parametrize(
    "split, message",
    [
        (LayerSplit(7, 1, 24), r"layers\[0\].kept_experts=7: must be a whole number from 0 to 6"),
        (LayerSplit(-1, 1, 24), r"layers\[0\].kept_experts=-1"),
        (LayerSplit(5, 5, 24), r"layers\[0\].kept_segments=5: must be a whole number from 1 to 4"),
        (LayerSplit(5, 0, 24), r"layers\[0\].kept_segments=0: must be a whole number from 1 to 4"),
        (LayerSplit(0, 1, 24), r"layers\[0\].kept_segments=1: must be 0"),
        (LayerSplit(5, 3, 14), r"layers\[0\].budget_segments=14: must be a whole number from 15 to 24"),
        (LayerSplit(5, 3, 25), r"layers\[0\].budget_segments=25: must be a whole number from 15 to 24"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(split: LayerSplit, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^plan field {message}"):
        SplitPlan(SHAPE, (split, PLAN.layers[1]))
    read = PLAN.to_dict()
    read["layers"][0] |= asdict(split)
    with pytest.raises(ConfigError, match="plan field "):
        SplitPlan.from_dict(read)


def changed(**changes: object) -> dict[str, object]:
    return PLAN.to_dict() | changes


def with_layer(**changes: object) -> dict[str, object]:
    read = PLAN.to_dict()
    read["layers"][1] |= changes
    return read


def without(key: str, layer: bool = False) -> dict[str, object]:
    read = PLAN.to_dict()
    del (read["layers"][1] if layer else read)[key]
    return read


@pytest.mark.parametrize(
    "read, message",
    [
        ([], r"file=\[\]: must be an object of format, version"),
        (None, "file=None"),
        (changed(format="other"), "format=other: must be 'expertly-split-plan'"),
        (changed(version=2), "version=2: must be 1"),
        (changed(version=True), "version=True: must be 1"),
        (changed(extra=1), "file='extra': must be no key but format"),
        (without("version"), "file=no 'version': must be all of format"),
        (changed(segments_per_expert=0), "segments_per_expert=0: must be a whole number from 1"),
        (changed(segments_per_expert="4"), "segments_per_expert=4: must be a whole number"),
        (changed(layers={}), r"layers=\{\}: must be a list"),
        (changed(layers=[]), r"layers=\[\]: must be a list"),
        (changed(layers=[3]), r"layers\[0\]=3: must be an object"),
        (without("kept_experts", layer=True), r"layers\[1\]=no 'kept_experts'"),
        (with_layer(other=1), r"layers\[1\]='other': must be no key but"),
        (with_layer(kept_experts=1.0), r"layers\[1\].kept_experts=1.0: must be a whole number"),
        (with_layer(kept_experts=None), r"layers\[1\].kept_experts=None"),
        (with_layer(top_k=0), r"layers\[1\]: geometry field top_k=0: must be at least 1"),
        (with_layer(budget_segments=10**30), r"layers\[1\].budget_segments=1000"),
    ],
)
def test_a_file_is_read_as_hostile_input(read: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^plan field {message}"):
        SplitPlan.from_dict(read)


def test_a_plan_fits_its_own_model_only() -> None:
    PLAN.check_fits(SHAPE)
    for other, message in (
        (Geometry(SHAPE.layers, 2), "segments_per_expert=4: must be 2, as it runs"),
        (Geometry(SHAPE.layers[:1], 4), "layers=2 of them: must be the 1 MoE layers of the model"),
        (
            Geometry((SHAPE.layers[0], replace(SHAPE.layers[1], hidden_size=8)), 4),
            r"layers\[1\].hidden_size=4: must be 8, as the model has it",
        ),
        (shape_of(2), r"layers\[1\].num_experts=8: must be 6"),
    ):
        with pytest.raises(ConfigError, match=f"^plan field {message}"):
            PLAN.check_fits(other)


# -- its file -------------------------------------------------------------------------------------------------------

GEOMETRY = shape_of(3)
OF_SYSTEMS = SplitPlan(GEOMETRY, (LayerSplit(2, 3, 7), LayerSplit(0, 0, 0), LayerSplit(3, 4, 12)))
KNOWN = Known(given=(OF_SYSTEMS,))
PLANNED = ("split", "moepic")


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(path, OF_SYSTEMS, {"model": "toy", "exposed_ms": 1.5, "memory": None})
    assert read_plan(path) == OF_SYSTEMS and read_plan(str(path)) == OF_SYSTEMS
    read = json.loads(path.read_text())
    assert read["about"] == {"model": "toy", "exposed_ms": 1.5, "memory": None}
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("[1, 2]", "holds a JSON list; must be an object"),
        ('{"format": ', "not JSON"),
        (json.dumps({**PLAN.to_dict(), "layers": []}), "plan field layers="),
    ],
)
def test_files_that_are_no_plans_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


# -- systems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["lru", "resident"])
def test_a_system_without_splits_takes_none(system: str) -> None:
    assert not get_system(system).takes_plan
    with pytest.raises(ConfigError, match=f"plan: system '{system}' takes none"):
        get_system(system).check_plan(OF_SYSTEMS, GEOMETRY, split_budget(GEOMETRY, GEOMETRY.nbytes))


def test_it_must_fit_the_memory() -> None:
    """19 segments in budgets; half of 72 less 8 staging slots keeps 28, a third 16."""
    system = get_system("moepic")
    system.check_plan(OF_SYSTEMS, GEOMETRY, split_budget(GEOMETRY, GEOMETRY.nbytes // 2))
    small = split_budget(GEOMETRY, GEOMETRY.nbytes // 3)
    with pytest.raises(ConfigError, match=r"budgets of 19 segments together; must be at most the 16 "):
        system.check_plan(OF_SYSTEMS, GEOMETRY, small)


@pytest.mark.parametrize("name", PLANNED)
def test_layers_keep_what_it_says(name: str) -> None:
    assert get_system(f"lru:allocation={name}").takes_plan
    allocation = ALLOCATIONS[name].make(GEOMETRY, KNOWN)
    shares = allocation.quotas([40])
    assert shares == [7, 0, 12]
    assert allocation.tops(shares) == [3, 4, 4], "of an expert that a layer without any would keep, all"


@pytest.mark.parametrize("name", PLANNED)
def test_the_rest_of_a_budget_is_staging_slots_until_a_plan_keeps_it(name: str) -> None:
    budget = split_budget(GEOMETRY, GEOMETRY.nbytes // 2)
    system = get_system(f"lru:allocation={name}")
    given = system.budget(GEOMETRY, budget, KNOWN)
    assert (given.kept_slots, given.staging_slots) == (budget.kept_slots, budget.staging_slots) == ((28,), (8,))
    scheduler = system.scheduler(GEOMETRY, given, KNOWN)
    assert scheduler.cache.quotas == [6, 0, 12] and scheduler.cache.staging == [36 - 18]
    if name == "split":
        return  # it keeps to its plan
    scheduler.configure(SplitPlan(GEOMETRY, (LayerSplit(4, 2, 8), LayerSplit(2, 4, 8), LayerSplit(3, 4, 12))))
    assert scheduler.cache.quotas == [8, 8, 12] and scheduler.cache.staging == [8], "all 28 that the memory keeps"


def test_it_is_configured_anew_after_tau_tokens_within_the_plans_memory() -> None:
    allocation = ALLOCATIONS["moepic"].make(GEOMETRY, KNOWN, {"tau": "5"})
    allocation.begin(allocation.quotas([40]))
    dice = np.random.default_rng(0)
    for token in range(5):
        assert allocation.due() is None, token
        for layer in range(3):
            experts = dice.choice(6, 2, replace=False).tolist()
            allocation.ran(RouterRan(layer, experts, [1, 1], [True, True], 1), lambda layer: 0.0)
    job = allocation.due()
    assert job is not None
    plan = job(Timing.of(GEOMETRY, 100, 100, 1000, 100)).plan
    assert sum(layer.budget_segments for layer in plan.layers) == 7 + 12, "what its splits left, too"

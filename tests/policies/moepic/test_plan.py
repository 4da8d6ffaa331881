"""A plan survives JSON, and nothing else does."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan
from tests.policies.moepic.builders import shape_of

SHAPE = Geometry((LayerGeometry(6, 2, 4, 16, 3, 2), LayerGeometry(8, 3, 4, 32, 2, 4)), 4)
PLAN = SplitPlan(SHAPE, (LayerSplit(5, 3, 17), LayerSplit(0, 0, 1)))


def test_json_and_back() -> None:
    text = json.dumps(PLAN.to_dict())
    assert SplitPlan.from_dict(json.loads(text)) == PLAN
    assert json.loads(text)["layers"][0]["kept_experts"] == 5


def test_what_a_plan_leaves_is_said_by_size_class() -> None:
    assert PLAN.free_segments == (2, 1)


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
    read["layers"][0] |= {
        "kept_experts": split.kept_experts,
        "kept_segments": split.kept_segments,
        "budget_segments": split.budget_segments,
    }
    with pytest.raises(ConfigError, match="plan field "):
        SplitPlan.from_dict(read)


def test_every_layer_has_its_split() -> None:
    with pytest.raises(ConfigError, match="plan field layers=1 of them: must be one for each of 2 MoE layers"):
        SplitPlan(SHAPE, PLAN.layers[:1])


def changed(**changes: object) -> dict[str, object]:
    return PLAN.to_dict() | changes


def with_layer(**changes: object) -> dict[str, object]:
    read = copy.deepcopy(PLAN.to_dict())
    read["layers"][1] |= changes
    return read


def without(key: str, layer: bool = False) -> dict[str, object]:
    read = copy.deepcopy(PLAN.to_dict())
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


def test_segments_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="plan: segments=3: must divide"):
        SplitPlan.from_dict(changed(segments_per_expert=3))


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

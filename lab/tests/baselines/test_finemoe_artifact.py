"""fMoE and its rivals as its authors' artifact runs them: what each queues after a layer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, History, Routed
from expertly.policies.prediction import Predictor
from expertly.policies.registry import PREDICTORS
from expertly.scheduler.systems import get_system
from expertly.testing.made_up import some_demands
from expertly_lab.baselines.finemoe_artifact import LEAST
from lab.tests.baselines.futures import known
from tests.scheduler.drive import geometry

LAYERS, EXPERTS = 12, 8
SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)


def predictor(system: str) -> Predictor:
    """As the system of this name has it."""
    made = get_system(system).predictor(SHAPE)
    assert made is not None
    return made


def began(is_prompt: bool = False) -> Began:
    return Began(np.zeros(1, np.int64), np.full(1, is_prompt))


def routed(layer: int, experts: list[int] | None = None, **fields: np.ndarray) -> Routed:
    chosen = None if experts is None else np.array([experts], np.int16)
    return Routed(RouterRan(layer, [0, 1], [1, 1], [True, True], 1), chosen, **fields)


def layers(predictions: Iterable[Prediction]) -> list[int]:
    return [prediction.layer for prediction in predictions]


@pytest.mark.parametrize(("layer", "last"), [(0, 9), (1, 10), (7, 11), (11, 11)])
def test_mixtral_offloading_queues_what_one_layer_chose_for_nine_layers(layer: int, last: int) -> None:
    offloading = predictor("mixtral-offloading-artifact")
    list(offloading.begin_iteration(began()))
    made = list(offloading.router_ran(routed(layer, [5, 2])))
    assert layers(made) == list(range(layer + 1, last + 1))
    assert all(each.experts == [5, 2] for each in made)
    assert [each.scores[0] for each in made] == sorted((each.scores[0] for each in made), reverse=True), "nearer first"


@pytest.mark.parametrize(("layer", "ahead"), [(0, [2, 4, 6]), (4, [2, 4, 6]), (7, [2, 4]), (9, [2]), (10, [])])
def test_promoe_asks_every_second_router_up_to_six_layers_ahead(layer: int, ahead: list[int]) -> None:
    """The router of the layer k ahead names expert k, then the one after it."""
    stride, shown = predictor("promoe-artifact"), np.zeros((1, 8, EXPERTS), np.float32)
    for k in range(1, 9):
        shown[0, k - 1, [k % EXPERTS, (k + 1) % EXPERTS]] = 0.6, 0.4
    list(stride.begin_iteration(began()))
    made = list(stride.router_ran(routed(layer, lookahead=shown)))
    assert [(each.layer, each.experts) for each in made] == [(layer + k, [k, (k + 1) % EXPERTS]) for k in ahead]


def test_where_later_routers_were_not_asked_the_stride_is_modelled() -> None:
    shape, demands = geometry(layers=LAYERS, experts=EXPERTS, top_k=2), some_demands(SHAPE, 1)
    system = get_system("promoe-artifact:prediction=modelled:distance=6:stride=2:accuracy=1.0")
    modelled = PREDICTORS["modelled"].make(shape, known(shape, demands), 6, system.options_of("prediction"))
    for step, expected in ((0, [2, 4, 6]), (7, [9, 11]), (10, [])):
        demands.step = step
        made = list(modelled.router_ran(routed(step)))
        assert layers(made) == expected
        assert all(each.experts == demands.steps[each.layer][1] for each in made)


def test_moe_infinity_queues_every_expert_of_half_the_layers() -> None:
    """One request chose experts 6 and 7 everywhere. d is 3, and L/2 is 6: layers up to l + 11. A quarter of eight
    experts is two: in the next six layers those of the request; every other expert has 1e-6.
    """
    eam = predictor("moe-infinity-artifact")
    experts = np.full((1, LAYERS, 2), [6, 7])
    scores = np.zeros((1, LAYERS, EXPERTS), np.float32)
    eam.learn(History(np.array([9]), np.zeros(1, np.bool_), experts, scores))
    first = list(eam.begin_iteration(began()))
    assert layers(first) == list(range(11))
    made = list(eam.router_ran(routed(0, [6, 7])))
    assert layers(made) == list(range(1, 12))
    for each in made:
        assert sorted(each.experts) == list(range(EXPERTS))
        named = dict(zip(each.experts, each.scores, strict=True))
        near = 1 - each.layer / LAYERS
        assert named[0] == pytest.approx(near * LEAST)
        assert named[6] == pytest.approx(near * (LEAST + 0.5 * (each.layer <= 6)))
    assert layers(eam.router_ran(routed(1, [6, 7]))) == [2, 7], "what has come near; the rest holds"
    assert dict(get_system("moe-infinity-artifact").options) == {"capacity": "1000", "matches": "1"}


def test_fmoe_queues_all_layers_from_d_on_in_decode_only() -> None:
    scores = np.random.default_rng(0).dirichlet(np.ones(EXPERTS), (1, LAYERS)).astype(np.float32)
    embedding = np.ones((1, 4), np.float32)
    for is_prompt, expected in ((False, list(range(3, LAYERS))), (True, [])):
        fmoe = predictor("fmoe-artifact")
        fmoe.learn(History(np.zeros(1, np.int64), np.zeros(1, np.bool_), np.zeros((1, LAYERS, 2)), scores, embedding))
        beginning = Began(np.ones(1, np.int64), np.full(1, is_prompt), embedding)
        assert layers(fmoe.begin_iteration(beginning)) == [0, 1, 2]
        assert layers(fmoe.router_ran(routed(0, scores=scores[:, 0]))) == expected
        for layer in range(1, LAYERS):
            list(fmoe.router_ran(routed(layer, scores=scores[:, layer])))
        fmoe.end_iteration(True)
        assert fmoe.facts()["maps"] == 2, "a prompt's maps are stored, too"

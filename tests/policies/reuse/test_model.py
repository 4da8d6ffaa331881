"""What a ReuseModel learns from routing, and what it does not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import RouterRan
from expertly.policies.eviction.reuse import ReuseModel
from tests.policies.reuse.reference import Reference
from tests.scheduler.drive import geometry, one_token

LAYERS, EXPERTS = 3, 16
SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)


def prompt(layer: int, dice: random.Random, tokens: int = 40) -> RouterRan:
    counts = [dice.randint(1, 9) for _ in range(EXPERTS)]
    return RouterRan(layer, list(range(EXPERTS)), counts, [False] * EXPERTS, tokens)


def values(model: ReuseModel, layer: int, shape: Geometry = SHAPE) -> np.ndarray:
    """What the experts of the layer that ran last are worth, a step from now."""
    first = shape.first_expert_id(layer)
    return model.worth()[first : first + shape.layers[layer].num_experts]


def told_by_another(num_steps: int, seed: int) -> list[list[list[int]]]:
    """[step][layer][2 experts]. Layer 0 chooses at random and layer 1 at random, too; but what layer 1 needs in the
    next step is what layer 0 chose in this: nothing that layer 1 did says it.
    """
    dice = random.Random(seed)
    chosen, steps = [0, 1], []
    for _ in range(num_steps):
        last, chosen = chosen, dice.sample(range(EXPERTS), 2)
        steps.append([chosen, last, dice.sample(range(EXPERTS), 2)])
    return steps


def ranks(model: ReuseModel, steps: list[list[list[int]]]) -> list[float]:
    """Of what layer 1 needs in the next step: its rank among the values of layer 1 now, 1 the highest, 0 the lowest."""
    found = []
    for now, step in enumerate(steps[:-1]):
        for layer, experts in enumerate(step):
            model.observe(one_token(layer, experts))
            if layer == 1:
                rank = values(model, layer).argsort().argsort() / (EXPERTS - 1)
                found += [rank[expert] for expert in steps[now + 1][1]]
    return found


def test_what_an_earlier_layer_chose_says_what_a_layer_needs_next() -> None:
    model = ReuseModel(SHAPE)
    found = ranks(model, told_by_another(1500, 0))
    assert np.mean(found[:100]) < 0.6, "nobody knows it at the start"
    assert np.mean(found[-600:]) > 0.9


def test_it_learns_anew_when_the_rule_changes() -> None:
    model = ReuseModel(SHAPE)
    ranks(model, told_by_another(1000, 1))
    other = [[step[0], [(e + 5) % EXPERTS for e in step[1]], step[2]] for step in told_by_another(2500, 2)]
    found = ranks(model, other)
    assert np.mean(found[:60]) < 0.6
    assert np.mean(found[-600:]) > 0.9


def test_values_are_those_of_the_formulas() -> None:
    """In lock-step with the reference over decode and prompts, with an expert that several tokens chose."""
    dice, model, reference = random.Random(3), ReuseModel(SHAPE), Reference(LAYERS, EXPERTS)
    for step in range(400):
        for layer in range(LAYERS):
            if step % 90 == 0:
                router = prompt(layer, dice)
            elif step % 7:
                router = one_token(layer, dice.sample(range(4 + step % 3), 2))
            else:
                router = RouterRan(layer, [3, 9, 4], [2, 1, 0], [True, True, False], 2)
            model.observe(router)
            expected = reference.observe(router)
            first = SHAPE.first_expert_id(layer)
            np.testing.assert_allclose(model._values[first : first + EXPERTS], expected, atol=2e-3)


def test_prompts_teach_nothing_but_what_was_used_lately() -> None:
    dice, model = random.Random(4), ReuseModel(SHAPE)
    ranks(model, told_by_another(100, 5))
    before = [layer.weights.copy() for layer in model._layers]
    for _ in range(60):
        for layer in range(LAYERS):
            model.observe(prompt(layer, dice))
    assert all(np.array_equal(layer.weights, old) for layer, old in zip(model._layers, before, strict=True))
    router = RouterRan(1, [6, 2], [39, 1], [False, False], 40)
    model.observe(router)
    assert values(model, 1).argmax() == 6


def test_pads_alone_move_nothing() -> None:
    model = ReuseModel(SHAPE)
    ranks(model, told_by_another(50, 6))
    model.observe(one_token(1, [2, 3]))
    before = values(model, 1).copy()
    model.observe(RouterRan(1, [7, 8], [0, 0], [True, True], 0))
    np.testing.assert_array_equal(values(model, 1), before)


def test_a_layer_that_is_yet_to_run_is_nearer() -> None:
    model = ReuseModel(SHAPE)
    for layer in (0, 1, 2, 0, 1):  # layer 1 runs
        model.observe(one_token(layer, [5]))
    ran, runs, to_run = (model.worth()[SHAPE.expert_id(layer, 5)] for layer in (0, 1, 2))
    said = [model._values[SHAPE.expert_id(layer, 5)] for layer in (0, 1, 2)]
    assert to_run / said[2] > ran / said[0] > runs / said[1] > 0
    model.observe(RouterRan(1, [5], [8], [False], 8))
    assert min(model.worth()[SHAPE.expert_id(2, 0) :]) > max(model.worth()[: SHAPE.expert_id(2, 0)]), "of a prompt"


def test_a_copy_goes_on_by_itself_and_alike() -> None:
    model = ReuseModel(SHAPE)
    ranks(model, told_by_another(200, 7))
    learned = ranks(model.copy(), told_by_another(1400, 9))
    assert np.mean(learned[-400:]) > np.mean(learned[:100]) + 0.1, "a copy learns on"
    one, other = model.copy(), model.copy()
    assert ranks(one, told_by_another(100, 8)) == ranks(other, told_by_another(100, 8))
    np.testing.assert_array_equal(one.worth(), other.worth())
    assert not np.array_equal(one.worth(), model.worth())


def test_layers_may_have_other_numbers_of_experts() -> None:
    layers = tuple(LayerGeometry(num, 2, 4, 16, 3, 2) for num in (4, 16, 8))
    shape, dice = Geometry(layers), random.Random(9)
    model = ReuseModel(shape)
    for _ in range(100):
        for layer, one in enumerate(layers):
            model.observe(one_token(layer, dice.sample(range(min(3, one.num_experts)), 2)))
    for layer, one in enumerate(layers):
        assert values(model, layer, shape)[:3].min() > values(model, layer, shape)[3:].max(), one
    assert model.fits(shape) and not model.fits(SHAPE)


@pytest.mark.parametrize(("experts", "looked_at"), [(32, 9), (128, 9), (256, 3), (512, 1), (1024, 1)])
def test_with_many_experts_a_layer_looks_at_fewer_others(experts: int, looked_at: int) -> None:
    model = ReuseModel(geometry(layers=20, experts=experts))
    assert model._layers[10].weights.shape == (experts, looked_at * experts)
    model.observe(one_token(10, [1, 2]))
    assert model.worth()[10 * experts + 1] > model.worth()[10 * experts + 3]

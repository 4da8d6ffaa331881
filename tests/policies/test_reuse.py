"""What a ReuseModel learns from routing, what of it is kept, and the eviction `reuse` that goes by it."""

from __future__ import annotations

import random
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from expertly.core import compiled as core_compiled
from expertly.core.geometry import Geometry, ModelShape
from expertly.core.messages import RouterRan
from expertly.policies import reuse
from expertly.policies.registry import EVICTIONS
from expertly.policies.reuse import NEAR_DISCOUNT, ReuseModel, compiled_reuse
from tests.scheduler.drive import geometry, one_token, run_layer, scheduler

LAYERS, EXPERTS = 3, 16
SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)
MODEL = ModelShape.of(SHAPE)


def prompt(layer: int, dice: random.Random, tokens: int = 40) -> RouterRan:
    counts = [dice.randint(1, 9) for _ in range(EXPERTS)]
    return RouterRan(layer, list(range(EXPERTS)), counts, [False] * EXPERTS, tokens)


def values(model: ReuseModel, layer: int, shape: Geometry = SHAPE) -> np.ndarray:
    """What the experts of the layer that ran last are worth, a step from now."""
    first = shape.first_ids[layer]
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
    result = []
    for now, step in enumerate(steps[:-1]):
        for layer, experts in enumerate(step):
            model.observe(one_token(layer, experts))
            if layer == 1:
                rank = values(model, layer).argsort().argsort() / (EXPERTS - 1)
                result += [rank[expert] for expert in steps[now + 1][1]]
    return result


@cache
def _taught() -> tuple[ReuseModel, list[float]]:
    model = ReuseModel(MODEL)
    return model, ranks(model, told_by_another(1500, 0))


def taught() -> ReuseModel:
    """One that goes on from what 1499 tokens taught of what layer 1 needs."""
    model = ReuseModel(MODEL)
    model.begin_with(_taught()[0])
    return model


def test_it_learns_from_the_choices_of_an_earlier_layer() -> None:
    result = _taught()[1]
    assert np.mean(result[:100]) < 0.6, "nobody knows it at the start"
    assert np.mean(result[-600:]) > 0.88


def test_every_instruction_set_computes_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of several sizes decode batches with pads among them; there are prompts and layers that a step leaves out,
    and in the middle both go on from what one of them learned.
    """
    sizes, dice = (16, 5, 70, 130, 24, 64), random.Random(0)
    shape = ModelShape(sizes, (1,) * len(sizes))
    fastest = ReuseModel(shape)
    (tmp_path / "policies").mkdir()
    arguments = ("gcc", "-O1", "-DFASTEST=", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC")  # what all have
    source = Path(reuse.__file__).with_name("reuse.c")
    subprocess.run([*arguments, "-o", tmp_path / "policies" / "_reuse.so", source], check=True)
    monkeypatch.setattr(core_compiled, "PACKAGE", tmp_path)
    monkeypatch.setattr(reuse, "compiled_reuse", compiled_reuse.__wrapped__)
    plain = ReuseModel(shape)
    for step in range(150):
        is_prompt, batch = step % 70 == 35, dice.choice([1, 1, 5])
        for layer, num in enumerate(sizes):
            experts = dice.sample(range(num), min(num, dice.randint(1, num) if is_prompt else 3 * batch))
            tokens = [1 if batch == 1 else dice.choice([0, 1, 1, 2]) for _ in experts]
            router = RouterRan(layer, experts, tokens, [not is_prompt] * len(experts), 40 if is_prompt else batch)
            if dice.random() < 0.98:
                fastest.observe(router)
                plain.observe(router)
        np.testing.assert_array_equal(plain.worth(), fastest.worth())
        if step == 75:
            fastest.begin_with(plain)
            plain.begin_with(plain)


def test_prompts_teach_nothing_but_what_was_used_lately() -> None:
    dice, model = random.Random(4), ReuseModel(MODEL)
    ranks(model, told_by_another(100, 5))
    before = [weights.copy() for weights in model.weights]
    for _ in range(60):
        for layer in range(LAYERS):
            model.observe(prompt(layer, dice))
    np.testing.assert_equal(model.weights, before)
    new = ReuseModel(MODEL)
    new.observe(RouterRan(1, [2, 6], [1, 39], [False, False], 40))
    assert values(new, 1).argsort()[-2:].tolist() == [2, 6]


def test_a_layer_that_is_yet_to_run_is_nearer() -> None:
    model = ReuseModel(MODEL)
    for layer in (0, 1, 2, 0, 1):  # layer 1 runs
        model.observe(one_token(layer, [5]))
    experts = [SHAPE.expert_id(layer, 5) for layer in (2, 0, 1)]
    nearness = model.worth()[experts] / model._values[experts]
    assert nearness == pytest.approx([NEAR_DISCOUNT ** (num / LAYERS) for num in (1, 2, 3)])
    model.observe(RouterRan(1, [5], [8], [False], 8))
    assert min(model.worth()[SHAPE.expert_id(2, 0) :]) > max(model.worth()[: SHAPE.expert_id(2, 0)]), "of a prompt"


@pytest.mark.parametrize(("experts", "looked_at"), [(32, 9), (128, 9), (256, 3), (512, 1), (600, 1)])
def test_with_many_experts_a_layer_looks_at_fewer_others(experts: int, looked_at: int) -> None:
    model = ReuseModel(ModelShape((experts,) * 9, (2,) * 9))
    assert model.weights[4].shape == (experts, looked_at * experts)
    model.observe(one_token(4, [1, 2]))
    assert model.worth()[4 * experts + 1] > model.worth()[4 * experts + 3]


# -- what is kept of it ---------------------------------------------------------------------------------------------


def test_a_new_model_goes_on_with_what_another_learned() -> None:
    """From copies, which nobody changes."""
    model, other = taught(), ReuseModel(MODEL)
    assert model.num_tokens == [1499] * 3
    other.begin_with(model)
    before = [weights.copy() for weights in model.weights]
    of_other, of_new = (np.mean(ranks(reuse, told_by_another(200, 1))) for reuse in (other, ReuseModel(MODEL)))
    assert of_other > 0.88 > 0.7 > of_new
    assert max(other.num_tokens) == 1499 + 199
    np.testing.assert_equal(model.weights, before)


# -- the eviction policy --------------------------------------------------------------------------------------------


def steps(num: int, seed: int) -> list[list[list[int]]]:
    """[step][layer][2 experts]: a topic of 5 steps on average decides from which four experts each layer takes most."""
    dice = random.Random(seed)
    of_topic = [[dice.sample(range(EXPERTS), 4) for _ in range(LAYERS)] for _ in range(6)]
    result, topic = [], 0
    for _ in range(num):
        if dice.random() < 0.2:
            topic = dice.randrange(6)
        layers = []
        for layer in range(LAYERS):
            chosen = dice.sample(of_topic[topic][layer], 2)
            if dice.random() < 0.3:
                chosen[1] = dice.choice([e for e in range(EXPERTS) if e != chosen[0]])
            layers.append(chosen)
        result.append(layers)
    return result


def loads(system: str, routing: list[list[list[int]]], count_from: int, share: float = 0.35) -> int:
    """Experts loaded from that step on."""
    control, num = scheduler(SHAPE, share, system), 0
    for step, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            ran = run_layer(control, layer, experts, check=step % 40 == 0)
            num += len(ran.loads) if step >= count_from else 0
    return num


def test_it_loads_less_than_recency_and_frequency_once_it_has_learned() -> None:
    routing = steps(900, 0)
    plain = min(loads(name, routing, 600) for name in ("lru", "lfu"))
    for scope in ("global", "layer"):
        assert loads(f"expertly:scope={scope}", routing, 600) < 0.95 * plain


def test_the_caches_of_a_model_learn_together_and_those_of_two_do_not() -> None:
    make = EVICTIONS["reuse"].of_model(SHAPE)
    first, second, other = make(4, [0]), make(4, [1]), EVICTIONS["reuse"].make(SHAPE, 4)
    first.needed([3], one_token(0, [3]))
    assert second.score(3) == first.score(3) > 0.0 == other.score(3)


def test_where_all_are_kept_nothing_is_learned() -> None:
    make = EVICTIONS["reuse"].of_model(SHAPE)
    policy, other = (make(LAYERS * EXPERTS - num, range(LAYERS)) for num in (0, 1))
    policy.needed([3], one_token(0, [3]))
    assert other.score(3) == 0.0
    other.needed([3], one_token(0, [3]))
    assert other.score(3) > 0.0


def test_a_prompt_takes_nothing_from_the_layers_that_it_has_yet_to_reach() -> None:
    control = scheduler(SHAPE, 0.5, "expertly")
    for layers in steps(60, 1):
        for layer, experts in enumerate(layers):
            run_layer(control, layer, experts)
    last = {eid for eid in np.flatnonzero(control.cache.residency()) if SHAPE.layer_of[eid] == LAYERS - 1}
    for layer in range(LAYERS - 1):
        run_layer(control, layer, list(range(EXPERTS)), tokens=[5] * EXPERTS, decode=False)
    assert last and last <= set(np.flatnonzero(control.cache.residency()))


def test_experts_of_pads_alone_count_as_unused() -> None:
    """As where the other devices have a layer's tokens."""
    model = ReuseModel(MODEL)
    for _ in range(40):
        model.observe(one_token(0, [5]))
        model.observe(RouterRan(1, [3], [0], [False], 1, is_part_of_decode=True))
    first = SHAPE.first_ids[1]
    assert np.isfinite(model.worth()).all() and np.ptp(model.worth()[first : first + EXPERTS]) == 0

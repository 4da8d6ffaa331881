"""The eviction `reuse`, and the preset `expertly` that is made of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.eviction import EVICTIONS
from expertly.policies.eviction.reuse import Reuse, ReuseModel
from expertly.policies.known import Known
from expertly.scheduler.presets import SYSTEMS, get_system
from tests.scheduler.drive import geometry, one_token, run_layer, scheduler

LAYERS, EXPERTS = 3, 16
SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=2)


def steps(num: int, seed: int) -> list[list[list[int]]]:
    """[step][layer][2 experts]: a topic of 5 steps on average decides from which four experts each layer takes most."""
    dice = random.Random(seed)
    of_topic = [[dice.sample(range(EXPERTS), 4) for _ in range(LAYERS)] for _ in range(6)]
    found, topic = [], 0
    for _ in range(num):
        if dice.random() < 0.2:
            topic = dice.randrange(6)
        layers = []
        for layer in range(LAYERS):
            chosen = dice.sample(of_topic[topic][layer], 2)
            if dice.random() < 0.3:
                chosen[1] = dice.choice([e for e in range(EXPERTS) if e != chosen[0]])
            layers.append(chosen)
        found.append(layers)
    return found


def loads(system: str, routing: list[list[list[int]]], count_from: int, share: float = 0.35) -> int:
    """Experts loaded from that step on."""
    control, num = scheduler(SHAPE, share, system), 0
    for step, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            ran = run_layer(control, layer, experts, check=step % 40 == 0)
            num += len(ran.loads) if step >= count_from else 0
    return num


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_it_loads_less_than_recency_and_frequency_once_it_has_learned(scope: str) -> None:
    routing = steps(1200, 0)
    ours = loads(f"expertly:scope={scope}", routing, 800)
    plain = min(loads(name, routing, 800) for name in ("lru", "lfu"))
    assert ours < 0.95 * plain


def test_a_model_that_was_taught_needs_no_time_to_learn() -> None:
    taught, routing = ReuseModel(SHAPE), steps(300, 0)
    for layers in steps(900, 0):
        for layer, experts in enumerate(layers):
            taught.observe(one_token(layer, experts))
    budget = scheduler(SHAPE, 0.35, "expertly").budget
    num = []
    for known in (Known(), Known(reuse=taught)):
        control = SYSTEMS["expertly"].scheduler(SHAPE, budget, known)
        num.append(sum(len(run_layer(control, layer, e).loads) for one in routing for layer, e in enumerate(one)))
    assert num[1] < 0.95 * num[0]
    control = SYSTEMS["expertly"].scheduler(SHAPE, budget, Known(reuse=taught))
    again = sum(len(run_layer(control, layer, e).loads) for one in routing for layer, e in enumerate(one))
    assert again == num[1], "what is given is not changed"


def test_what_was_taught_of_another_model_is_not_taken() -> None:
    other = ReuseModel(geometry(layers=2, experts=8))
    policy = EVICTIONS["reuse"].make(SHAPE, 4, Known(reuse=other))
    policy.needed([1, 2], one_token(0, [1, 2]))
    assert policy.score(1) == policy.score(2) > policy.score(3) == 0.0


def test_the_caches_of_a_model_learn_together_and_those_of_two_do_not() -> None:
    make = EVICTIONS["reuse"].of_model(SHAPE)
    first, second, other = make(4), make(4), EVICTIONS["reuse"].of_model(SHAPE)(4)
    first.needed([3], one_token(0, [3]))
    assert second.score(3) == first.score(3) > 0.0 == other.score(3)


def test_where_all_are_kept_nothing_is_learned() -> None:
    make = EVICTIONS["reuse"].of_model(SHAPE)
    policy, other = make(LAYERS * EXPERTS), make(LAYERS * EXPERTS - 1)
    policy.needed([3], one_token(0, [3]))
    assert other.score(3) == 0.0
    other.needed([3], one_token(0, [3]))
    assert other.score(3) > 0.0


@pytest.mark.parametrize("seed", range(6))
def test_victims_are_those_of_sorting(seed: int) -> None:
    """Of hundreds that are kept, with equal scores among them, read to any depth."""
    dice = random.Random(seed)
    shape = geometry(layers=12, experts=64, top_k=4)
    policy, kept = Reuse.of_model(shape)(300), set[int]()
    for _ in range(60):
        layer = dice.randrange(12)
        experts = dice.sample(range(64), 4)
        policy.needed([layer * 64 + expert for expert in experts], one_token(layer, experts))
        for expert in dice.sample(range(12 * 64), 40):
            if expert in kept:
                kept.remove(expert)
                policy.removed(expert)
            else:
                kept.add(expert)
                policy.admitted(expert)
        protected = set(dice.sample(sorted(kept), min(len(kept), dice.choice([0, 3, 30]))))
        worth = policy.model.worth()
        expected = sorted((float(worth[e]), e) for e in kept if e not in protected)
        depth = dice.choice([1, 5, 40, len(expected)])
        asked = policy.scored_victims(protected)
        assert [one for one, _ in zip(asked, range(depth), strict=False)] == expected[:depth]
        assert policy.score(7) == float(worth[7])


def test_a_prompt_takes_nothing_from_the_layers_that_it_has_yet_to_reach() -> None:
    control = scheduler(SHAPE, 0.5, "expertly")
    for layers in steps(60, 1):
        for layer, experts in enumerate(layers):
            run_layer(control, layer, experts)
    last = {eid for eid in np.flatnonzero(control.residency.resident) if SHAPE.layer_of_expert(eid) == LAYERS - 1}
    for layer in range(LAYERS - 1):
        run_layer(control, layer, list(range(EXPERTS)), tokens=[5] * EXPERTS, decode=False)
    assert last and last <= set(np.flatnonzero(control.residency.resident))


def test_it_must_be_told_what_is_needed_before_it_is_kept() -> None:
    with pytest.raises(
        ConfigError, match=r"eviction='reuse' needs to be told what is needed.*accepted: admission=best"
    ):
        get_system("lru:eviction=reuse")
    assert get_system("lru:eviction=reuse:admission=best").eviction == "reuse"

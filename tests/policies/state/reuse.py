"""What was learned of reuse, from known routing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.eviction.reuse import ReuseModel
from tests.policies.state.builders import SHAPE
from tests.scheduler.drive import one_token

LAYERS = tuple(LayerGeometry(*sizes, 1, 1, 2, 1) for sizes in zip(SHAPE.num_experts, SHAPE.top_k, strict=True))


def taught(num_tokens: int = 60, seed: int = 0) -> ReuseModel:
    """By so many tokens, each of which needs what the one before needed, but for one expert of each layer."""
    dice, model = random.Random(seed), ReuseModel(Geometry(LAYERS))
    chosen = [dice.sample(range(layer.num_experts), layer.top_k) for layer in LAYERS]
    for _ in range(num_tokens):
        for number, layer in enumerate(LAYERS):
            others = [expert for expert in range(layer.num_experts) if expert not in chosen[number]]
            chosen[number] = [*chosen[number][1:], dice.choice(others)]
            model.observe(one_token(number, chosen[number]))
    return model


def learned(num_tokens: int = 60, seed: int = 0) -> dict[str, Any]:
    state = taught(num_tokens, seed).state()
    assert state is not None
    return state


def assert_same_state(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)

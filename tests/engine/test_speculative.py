"""Predictions that go past the last layer and past the K experts that a router chooses (MoEpic, section 3.2)."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly.api import handle
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import generate

pytestmark = pytest.mark.timeout(120)

SPECULATIVE = "lru:prediction=speculative"
NEXT_TOKEN = "lru:prediction=lookahead:next_token=yes"


def test_the_first_layer_of_a_token_is_predicted_from_the_last_layer_of_the_one_before(cases: Cases) -> None:
    """Once for each token but a prompt's first layer: that comes after another request, or after nothing."""
    case = cases["qwen3_moe"]
    with loaded(case.store, system=NEXT_TOKEN, memory="50%", predict="inline") as model:
        (tokens,) = generate(model, case.prompts[:1], 9)
        assert tokens == case.tokens[0][:9]
        stats = expertly.stats(model).as_dict()
        assert stats["prediction"]["predictions_late"] == stats["prediction"]["contexts_dropped"] == 0
        first, second = stats["layers"][0], stats["layers"][1]
        assert first["prefill"]["predicted"] == 0 < second["prefill"]["predicted"]
        assert first["decode"]["predicted"] == second["decode"]["predicted"] == 8 * 3, "top 3, of each token but one"
        assert set(first["decode"]["accuracy_by_distance"]) == set(second["decode"]["accuracy_by_distance"]) == {"1"}
        generate(model, case.prompts[1:], 2)
        again = expertly.stats(model).as_dict()["layers"][0]
        assert again["prefill"]["predicted"] == 3, "a prompt came instead of the next token: it was for that layer"


def test_what_was_loaded_for_the_next_token_waits_for_it(cases: Cases) -> None:
    """Between two passes it is there or comes; it is in time, or for nothing, when the first layer has run."""
    case = cases["qwen3_moe"]
    with loaded(case.store, system=NEXT_TOKEN, memory="60%", predict="inline") as model:
        scheduler = handle(model).engine.scheduler
        first_layer = range(scheduler.geometry.layers[0].num_experts)
        waited = []

        def between(*args: Any) -> None:
            waiting = scheduler.queue.waiting
            assert set(waiting) <= set(first_layer), "every other layer has run"
            waited.append(len(waiting))
            scheduler.check()

        hook = model.register_forward_hook(between)
        generate(model, case.prompts[:1], 12)
        hook.remove()
        assert sum(waited) > 0
        decode = expertly.stats(model).as_dict()["layers"][0]["decode"]
        assert 0 < decode["prefetched"] <= sum(waited) and decode["prefetched_needed"] <= decode["prefetched"]

"""Predictions that go past the last layer and past the K experts that a router chooses (MoEpic, section 3.2)."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly.api import handle
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, reader_threads
from tests.engine.test_prediction import assert_prefetched
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


def test_a_decoder_goes_round_and_an_encoder_does_not(cases: Cases) -> None:
    case = cases["switch_transformers"]
    with loaded(case.store, system=NEXT_TOKEN, memory="50%", predict="inline") as model:
        passes: list[None] = []
        hook = model.register_forward_hook(lambda *args: passes.append(None))  # an encoder's is not the model's
        generate(model, case.prompts[:1], 9)
        hook.remove()
        stats = expertly.stats(model).as_dict()
        assert stats["prediction"]["predictions_late"] == 0
        layers = [layer["prefill"]["predicted"] + layer["decode"]["predicted"] for layer in stats["layers"]]
        assert layers[0] == 0 < layers[1], "the encoder's first layer, never"
        top_k = handle(model).engine.scheduler.geometry.layers[2].top_k
        expected = [top_k * (len(passes) - 1), top_k * len(passes)]
        assert len(passes) > 4 and layers[2:] == expected, "of each token but the first, of each"


def test_all_experts_of_a_layer_are_named(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, system=SPECULATIVE, memory="50%", predict="inline") as model:
        generate(model, case.prompts[:1], 6)
        decode = expertly.stats(model).as_dict()["phases"]["decode"]
        assert decode["recall"] == 1.0 and decode["prediction_accuracy"] == pytest.approx(3 / 8, abs=1e-3)


def test_a_request_that_fails_after_its_last_layer_leaves_nothing_behind(cases: Cases) -> None:
    """What was being loaded for a token that never comes: the next request finds the slots, and its tokens."""
    case = cases["qwen3_moe"]

    def stop(*args: Any) -> None:
        raise RuntimeError("stop")

    with loaded(case.store, system=SPECULATIVE, memory="40%", predict="inline", segments=2) as model:
        for _ in range(2):
            hook = model.lm_head.register_forward_hook(stop)
            with pytest.raises(RuntimeError, match="stop"):
                generate(model, case.prompts)
            hook.remove()
            handle(model).engine.scheduler.check()
            assert generate(model, case.prompts) == case.tokens
        assert_prefetched(model)
    assert not reader_threads()

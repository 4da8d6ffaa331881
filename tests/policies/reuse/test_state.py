"""What a ReuseModel has learned, taken out of it and given to another."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from expertly.policies.eviction.reuse import LayerReuse, ReuseModel, num_weights
from tests.policies.reuse.test_model import SHAPE, ranks, told_by_another
from tests.scheduler.drive import geometry, one_token


def taught() -> ReuseModel:
    model = ReuseModel(SHAPE)
    ranks(model, told_by_another(1500, 0))
    return model


def test_a_new_model_goes_on_with_what_another_learned() -> None:
    model, other = taught(), ReuseModel(SHAPE)
    state = model.state()
    assert state is not None and state["tokens"].tolist() == [1499] * 3
    other.restore(state)
    assert (
        np.mean(ranks(other, told_by_another(200, 1)))
        > 0.9
        > np.mean(ranks(ReuseModel(SHAPE), told_by_another(200, 1)))
    )
    assert other.num_tokens == 1499 + 199


def test_what_was_taken_out_does_not_change() -> None:
    model = taught()
    state = model.state()
    assert state is not None
    before = {name: array.copy() for name, array in state.items()}
    ranks(model, told_by_another(50, 2))
    for name, array in before.items():
        np.testing.assert_array_equal(state[name], array)
    other = ReuseModel(SHAPE)
    other.restore(state)
    ranks(other, told_by_another(50, 2))
    np.testing.assert_array_equal(state["weights"], before["weights"])


def test_what_was_used_lately_is_no_part_of_it() -> None:
    """Of two that learned the same, and of which one has just run something else."""
    model, other = taught(), ReuseModel(SHAPE)
    state = model.state()
    assert state is not None
    other.restore(state)
    other.observe(one_token(0, [3]))
    first, second = ReuseModel(SHAPE), ReuseModel(SHAPE)
    first.restore(state)
    for one in (other, first):
        again = one.state()
        assert again is not None
        np.testing.assert_array_equal(again["weights"], state["weights"])
    second.restore(again)
    assert not second.worth().any(), "nothing has run"


def test_one_that_was_interrupted_while_it_learned_has_nothing_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model, learn = taught(), LayerReuse._follow
    assert model.state() is not None

    def interrupted(layer: LayerReuse, *args: Any) -> None:
        learn(layer, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LayerReuse, "_follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks(model, told_by_another(50, 3))
    assert model.state() is None
    ranks(model, told_by_another(50, 4))
    assert model.state() is None, "what was half done is never known to be whole again"


def test_another_thread_never_sees_it_half_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks while a layer learns gets nothing; one that looks between two layers gets it whole."""
    model, follow, seen = taught(), LayerReuse._follow, []

    def looked_at(layer: LayerReuse, *args: Any) -> None:
        looker = threading.Thread(target=lambda: seen.append(model.state()))
        looker.start()
        looker.join()
        follow(layer, *args)

    monkeypatch.setattr(LayerReuse, "_follow", looked_at)
    ranks(model, told_by_another(40, 5))
    assert len(seen) >= 3 and seen == [None] * len(seen)
    assert model.state() is not None


@pytest.mark.parametrize("experts", [16, 128, 200, 600])
def test_the_number_of_weights_is_known_from_the_layers(experts: int) -> None:
    shape = geometry(layers=12, experts=experts)
    state = ReuseModel(shape).state()
    assert state is not None
    assert len(state["weights"]) == num_weights([experts] * 12)

"""Nothing in the control plane grows with the tokens generated."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest

from expertly.core.messages import Prediction
from tests.scheduler.drive import geometry, run_layer, scheduler


def grown(run_token: Callable[[], None], before: int, then: int) -> int:
    """Bytes allocated by `then` tokens and held at their end, after `before` other ones."""

    def run(num_tokens: int) -> int:
        for _ in range(num_tokens):
            run_token()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = run(before)
        return run(then) - early
    finally:
        tracemalloc.stop()


def test_memory_is_the_same_after_many_more_predictions() -> None:
    """Everything is kept: no victim is ever asked for, while scores rise and fall."""
    control = scheduler(geometry(2, 16, 4), 1.0, "fmoe")
    dice = random.Random(0)

    def run_token() -> None:
        for layer in range(2):
            said = [dice.random() for _ in range(16)]
            control.predict(Prediction(1 - layer, list(range(16)), sorted(said, reverse=True), 1, 0.5, said))
            for span in control.prefetch():
                control.loaded(span)
            run_layer(control, layer, dice.sample(range(16), 4))

    assert grown(run_token, 60, 300) < 4096, "five times the tokens, not a page more"


@pytest.mark.parametrize("system", ["lru", "lcp", "static"])
def test_memory_is_the_same_after_many_more_tokens(system: str) -> None:
    control = scheduler(geometry(2, 16, 4, segments=2), 0.4, system)
    dice = random.Random(0)

    def run_token() -> None:
        for layer in range(2):
            run_layer(control, layer, dice.sample(range(16), 4))

    assert grown(run_token, 40, 240) < 4096, "six times the tokens, not a page more"

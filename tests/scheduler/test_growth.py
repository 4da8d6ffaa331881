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


@pytest.mark.parametrize(
    ("system", "share", "window"), [("fmoe", 1.0, 8), ("fmoe", 0.4, 1), ("lru", 0.4, 0), ("static", 0.4, 0)]
)
def test_memory_is_the_same_after_many_more_tokens(system: str, share: float, window: int) -> None:
    """Everything is kept: no victim is ever asked for, while scores rise and fall. Or most of the queue is never
    reached. Or nothing is predicted.
    """
    control = scheduler(geometry(2, 16, 4, segments=2), share, system)
    control.queue.window = window
    dice = random.Random(0)

    def run_token() -> None:
        for layer in range(2):
            if window:
                scores = sorted([dice.random() for _ in range(16)], reverse=True)
                control.predict(Prediction(1 - layer, list(range(16)), scores, 1, scores))
                for span in control.prefetch():
                    control.loaded(span)
            run_layer(control, layer, dice.sample(range(16), 4))

    assert grown(run_token, 60, 300) < 4096, "five times the tokens, not a page more"

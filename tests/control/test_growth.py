"""Nothing in the control plane grows with the tokens generated."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from tests.control.drive import controller, geometry, run_layer


@pytest.mark.parametrize("system", ["on-demand", "lru", "lfu", "lcp", "random", "static"])
def test_memory_is_the_same_after_many_more_tokens(system: str) -> None:
    control = controller(geometry(2, 16, 4, segments=2), 0.4, system)
    dice = random.Random(0)

    def run(tokens: int) -> int:
        for _ in range(tokens):
            for layer in range(2):
                run_layer(control, layer, dice.sample(range(16), 4))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = run(300)
        late = run(3000)
    finally:
        tracemalloc.stop()
    assert late - early < 4096, "ten times the tokens, not a page more"

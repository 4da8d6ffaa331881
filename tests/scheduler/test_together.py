"""Spans that are here may be computed in one call: each once, and with the decisions of one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from expertly.core.messages import Span
from expertly.scheduler.loop import run_layer
from tests.scheduler.drive import geometry, one_token, scheduler


class AtOnce:
    """Brings everything when it is waited for."""

    def __init__(self) -> None:
        self.coming: list[Span] = []
        self.submitted: list[Span] = []

    def submit(self, spans: Sequence[Span]) -> None:
        self.coming += spans
        self.submitted += spans

    def poll(self) -> Span | None:
        return None

    def wait(self) -> Span:
        return self.coming.pop(0)


def run(together: bool, segments: int) -> tuple[list[list[Span]], list[Span], int]:
    """What was computed, layer by layer; what was loaded; how many calls were for several."""
    control = scheduler(geometry(segments=segments, top_k=3), 0.85)
    transport, dice = AtOnce(), random.Random(0)
    layers: list[list[Span]] = []
    num_calls = 0

    def several(spans: Sequence[Span]) -> None:
        nonlocal num_calls
        assert len(spans) > 1 and not transport.coming, "only when nothing is to come"
        num_calls += 1
        layers[-1].extend(spans)

    for number in range(200):
        experts = dice.sample(range(6), 3)
        layers.append([])
        router = one_token(number % control.geometry.num_layers, experts)
        run_layer(control, transport, router, layers[-1].append, together=several if together else None)
        control.check()
    return layers, transport.submitted, num_calls


@pytest.mark.parametrize("segments", [1, 4])
def test_the_same_is_loaded_and_computed(segments: int) -> None:
    one_by_one, loaded, none = run(False, segments)
    at_once, loaded_too, num_calls = run(True, segments)
    assert none == 0 and num_calls > 20
    assert loaded == loaded_too
    assert at_once == one_by_one, "in the same order, too"

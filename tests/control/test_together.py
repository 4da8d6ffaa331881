"""Pieces that are here may be computed in one call: each once, and with the decisions of one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from expertly.control.loop import run_layer
from expertly.core.messages import Piece
from tests.control.drive import controller, geometry, one_token


class AtOnce:
    """Brings everything when it is waited for."""

    def __init__(self) -> None:
        self.coming: list[Piece] = []
        self.submitted: list[Piece] = []

    def submit(self, pieces: Sequence[Piece]) -> None:
        self.coming += pieces
        self.submitted += pieces

    def poll(self) -> Piece | None:
        return None

    def wait(self) -> Piece:
        return self.coming.pop(0)


def run(together: bool, segments: int) -> tuple[list[list[Piece]], list[Piece], int]:
    """What was computed, layer by layer; what was loaded; how many calls were for several."""
    control = controller(geometry(segments=segments, top_k=3), 0.85)
    transport, dice = AtOnce(), random.Random(0)
    layers: list[list[Piece]] = []
    num_calls = 0

    def several(pieces: Sequence[Piece]) -> None:
        nonlocal num_calls
        assert len(pieces) > 1 and not transport.coming, "only when nothing is to come"
        num_calls += 1
        layers[-1].extend(pieces)

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

"""What is no part of the running pass does not pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from expertly.scheduler.stack import StackChannel

from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import InlineChannel

BEGAN = Began(np.zeros(1, np.int64), np.zeros(1, np.bool_))


class All(Predictor):
    """Predicts all four layers whenever it is told something."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[bool] = []

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        return [Prediction(layer, [0], [1.0], 1) for layer in range(4)]

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        return self.begin_iteration(BEGAN)

    def end_iteration(self, ok: bool) -> None:
        self.ends.append(ok)


def taken(stack: StackChannel) -> list[int]:
    return [seen.prediction.layer for seen in iter(stack.take, None)]


def test_predictions_of_the_other_stack_and_routers_of_other_rows_are_left_out() -> None:
    predictor = All()
    stack = StackChannel(InlineChannel(predictor), 4)
    for layers, expected in ((None, [0, 1, 2, 3]), (range(2), [0, 1]), (range(2, 4), [2, 3]), (None, [0, 1, 2, 3])):
        stack.run(layers)
        stack.begin_iteration(-1, lambda: BEGAN)
        assert taken(stack) == expected
        for is_listening in (False, True):
            stack.is_listening = is_listening
            stack.router_ran(0, partial(Routed, RouterRan(0, [0], [1], [True], 1)))
            assert taken(stack) == (expected if is_listening else [])
        stack.end_iteration(layers is None)
    assert predictor.ends == [True, False, False, True]

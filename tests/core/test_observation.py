"""Which layer comes so far ahead of another; routing scores from what a trace or a model knows of them."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.observation import layer_ahead, scores_of_choices


@pytest.mark.parametrize("stack", [range(5), range(2, 7), range(1), range(3, 4)])
def test_a_stack_that_decodes_is_gone_round_once(stack: range) -> None:
    for layer in stack:
        ahead = [layer_ahead(layer, distance, stack, True) for distance in range(1, len(stack))]
        assert ahead == [*range(layer + 1, stack.stop), *range(stack.start, layer)], "the next token's come last"
        assert [layer_ahead(layer, distance, stack, True) for distance in (len(stack), len(stack) + 3)] == [None, None]
        alone = [layer_ahead(layer, distance, stack, False) for distance in range(1, len(stack) + 3)]
        assert [other for other in alone if other is not None] == [*range(layer + 1, stack.stop)], "an encoder's ends"


def test_weights_of_the_chosen_are_scattered_and_normalised() -> None:
    experts = np.array([[3, 0], [1, 0xFFFF], [0xFFFF, 0xFFFF], [2, 1]], np.uint16)
    weights = np.array([[0.5, 1.5], [0.25, 7.0], [3.0, 3.0], [0.0, 0.0]], np.float16)
    scores = scores_of_choices(experts, weights, 4)
    expected = [[0.75, 0, 0, 0.25], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0.5, 0.5, 0]]
    np.testing.assert_array_equal(scores, np.array(expected, np.float32))
    assert scores.dtype == np.float32 and scores.flags.c_contiguous
    scores = scores_of_choices(np.array([[-1, 2, 9]]), np.array([[1.0, 0.5, 1.0]]), 3)
    np.testing.assert_array_equal(scores, [[0, 0, 1]], "signed ids below zero choose nothing")
    np.testing.assert_array_equal(scores_of_choices(np.array([[0, 1]]), np.array([[-1.0, 2.0]]), 2), [[0, 1]])

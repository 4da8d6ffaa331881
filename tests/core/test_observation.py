"""Routing scores from what a trace or a model knows of them."""

from __future__ import annotations

import numpy as np

from expertly.core.observation import scores_of_choices


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

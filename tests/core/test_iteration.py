"""Which layer lies so far ahead of another, in a stack that decodes and in one that does not."""

from __future__ import annotations

import pytest

from expertly.core.iteration import layer_ahead


@pytest.mark.parametrize("stack", [range(5), range(2, 7), range(1), range(3, 4)])
def test_a_stack_that_decodes_is_gone_round_once(stack: range) -> None:
    for layer in stack:
        ahead = [layer_ahead(layer, distance, stack, True) for distance in range(1, len(stack))]
        assert ahead == [*range(layer + 1, stack.stop), *range(stack.start, layer)], "the next token's come last"
        assert [layer_ahead(layer, distance, stack, True) for distance in (len(stack), len(stack) + 3)] == [None, None]


def test_one_that_does_not_ends_with_its_last_layer() -> None:
    assert [layer_ahead(1, distance, range(4), False) for distance in (1, 2, 3, 9)] == [2, 3, None, None]
    assert layer_ahead(3, 1, range(4), False) is None

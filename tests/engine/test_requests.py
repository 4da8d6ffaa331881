"""Rows of forward passes get the numbers of their requests, as far as a model shows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.core.observation import IterationInfo
from expertly.engine.observe import RequestNumbers


def batch(num_sequences: int, length: int, is_prefill: bool) -> IterationInfo:
    """A batch of sequences of one length."""
    return IterationInfo(
        np.full(num_sequences * length, is_prefill),
        None,
        num_sequences,
        "prefill" if is_prefill else "decode",
        sequences=np.repeat(np.arange(num_sequences, dtype=np.int32), length),
    )


def side_by_side(*parts: tuple[int, int], num_pads: int = 0, knows_positions: bool = True) -> IterationInfo:
    """Sequences side by side, (position of the first row, rows) each, then pads."""
    sequences = [i for i, (_, length) in enumerate(parts) for _ in range(length)]
    is_prefill = [length > 1 or not start for start, length in parts for _ in range(length)]
    num_rows = len(sequences) + num_pads
    return IterationInfo(
        np.array(is_prefill + [False] * num_pads),
        np.arange(num_rows) >= len(sequences) if num_pads else None,
        len(parts),
        "prefill" if any(is_prefill) else "decode",
        sequences=np.array(sequences + [len(parts) - 1] * num_pads, np.int32),
        starts=np.array([start for start, _ in parts]) if knows_positions else None,
    )


def numbers(*infos: IterationInfo) -> Sequence[list[int]]:
    of_rows = RequestNumbers()
    return [of_rows.of_rows(info).tolist() for info in infos]


def test_a_sequence_keeps_its_number_until_the_next_prefill() -> None:
    found = numbers(batch(2, 3, True), batch(2, 1, False), batch(2, 1, False), batch(1, 4, True), batch(1, 1, False))
    assert found == [[0, 0, 0, 1, 1, 1], [0, 1], [0, 1], [2, 2, 2, 2], [2]]


def test_several_tokens_of_a_sequence_that_decodes_are_one_request() -> None:
    assert numbers(batch(1, 5, True), batch(1, 4, False), batch(1, 1, False)) == [[0] * 5, [0] * 4, [0]]


def test_a_batch_of_another_size_has_new_numbers() -> None:
    assert numbers(batch(2, 1, True), batch(6, 1, False), batch(6, 1, False)) == [
        [0, 1],
        [*range(2, 8)],
        [*range(2, 8)],
    ]


def test_decoding_that_nobody_began_has_a_number() -> None:
    assert numbers(batch(1, 1, False), batch(1, 1, False)) == [[0], [0]]


def test_side_by_side_sequences_are_known_by_their_positions() -> None:
    found = numbers(
        side_by_side((0, 3), (0, 2)),
        side_by_side((3, 1), (2, 1), (0, 2)),
        side_by_side((3, 1), (2, 1), num_pads=2),  # the first has ended
        side_by_side((4, 1), (3, 1), (0, 1)),
    )
    assert found == [[0, 0, 0, 1, 1], [0, 1, 2, 2], [1, 2, 2, 2], [1, 2, 3]]


def test_the_parts_of_a_prompt_are_one_request() -> None:
    found = numbers(side_by_side((0, 4)), side_by_side((4, 4), (0, 1)), side_by_side((8, 2), (1, 1)))
    assert found == [[0] * 4, [0] * 4 + [1], [0, 0, 1]]


def test_equal_positions_go_on_in_order() -> None:
    assert numbers(side_by_side((0, 2), (0, 2)), side_by_side((2, 1), (2, 1))) == [[0, 0, 1, 1], [0, 1]]


def test_sequences_without_rows_have_no_number() -> None:
    empty = side_by_side((0, 2), (0, 0), (0, 1))
    assert numbers(empty, side_by_side((2, 1), (1, 1))) == [[0, 0, 1], [0, 1]]


def test_without_positions_side_by_side_is_a_batch() -> None:
    found = numbers(
        side_by_side((0, 2), (0, 1), knows_positions=False), side_by_side((2, 1), (1, 1), knows_positions=False)
    )
    assert found == [[0, 0, 1], [0, 1]]


def test_without_positions_empty_sequences_have_a_place() -> None:
    assert numbers(side_by_side((0, 2), (0, 0), (0, 1), knows_positions=False)) == [[0, 0, 2]]

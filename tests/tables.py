"""Tables of cases: all pairs of values instead of all combinations. With EXPERTLY_TEST_FULL=1, all combinations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

IS_FULL = os.environ.get("EXPERTLY_TEST_FULL", "0") == "1"


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows, one value of each axis, in which every two values of two axes come together at least once."""
    left = list(product(*(range(len(axis)) for axis in axes)))  # numbers: values need not be hashable
    open_pairs = {each for row in left for each in combinations(enumerate(row), 2)}
    rows = []
    while left and (open_pairs or IS_FULL):
        best = max(left, key=lambda row: len(open_pairs.intersection(combinations(enumerate(row), 2))))
        left.remove(best)
        open_pairs.difference_update(combinations(enumerate(best), 2))
        rows.append(tuple(axis[number] for axis, number in zip(axes, best, strict=True)))
    return rows


def seeds(few: int, many: int) -> range:
    """Of random tests."""
    return range(many if IS_FULL else few)


def crossed(rows: Sequence[Any], rest: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each row with one of the others, in turn; with each of them where all combinations are asked for."""
    every = len(rest)
    return [(row, rest[(i + j) % every]) for i, row in enumerate(rows) for j in range(every if IS_FULL else 1)]

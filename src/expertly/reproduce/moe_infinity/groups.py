"""K-means of points, the number of groups at the elbow, and transitions between groups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_ROUNDS = 25
_STARTS = 4


def grouped(points: Floats, num: int, seed: int) -> tuple[Ints, float]:
    """The group of each of `points` [N, D], and the sum of squared distances to the groups' means: the best of several
    starts, each by k-means++.
    """
    dice = np.random.default_rng(seed)
    return min((_grouped(points, num, dice) for _ in range(_STARTS)), key=lambda found: found[1])


def _grouped(points: Floats, num: int, dice: np.random.Generator) -> tuple[Ints, float]:
    centres = points[[dice.integers(len(points))]]  # a copy: it will be moved
    while len(centres) < num:
        far = _distances(points, centres).min(axis=1)
        total = far.sum()
        at = dice.choice(len(points), p=far / total) if total > 0 else dice.integers(len(points))
        centres = np.concatenate([centres, points[at][None]])
    members = np.full(len(points), -1, np.int64)
    for _ in range(_ROUNDS):
        nearest = _distances(points, centres).argmin(axis=1)
        if (nearest == members).all():
            break
        members = nearest
        for group in range(num):
            if (members == group).any():
                centres[group] = points[members == group].mean(axis=0)
    return members, float(_distances(points, centres).min(axis=1).sum())


def elbow(spread: Mapping[int, float]) -> int:
    """The number of groups whose spread lies farthest below the line from the first number's to the last's."""
    nums = np.array(list(spread), np.float64)
    values = np.array(list(spread.values()))
    across = (nums - nums[0]) / max(nums[-1] - nums[0], 1)
    down = (values - values[-1]) / max(values[0] - values[-1], 1e-12)
    return int(nums[np.argmax(1 - across - down)])


def transitions(members: Ints, num: int) -> Floats:
    """[groups, groups]: how often the second follows the first, of all that follows the first."""
    counts = np.zeros((num, num))
    np.add.at(counts, (members[:-1], members[1:]), 1)
    total = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)


def _distances(points: Floats, centres: Floats) -> Floats:
    squares = (points**2).sum(1)[:, None] + (centres**2).sum(1)[None] - 2 * points @ centres.T
    found: Floats = np.maximum(squares, 0)
    return found

"""Groups that are there are found."""

from __future__ import annotations

import numpy as np

from expertly.reproduce.moe_infinity.groups import elbow, grouped, transitions


def test_planted_groups_are_found_and_their_number_is_the_elbow() -> None:
    dice = np.random.default_rng(0)
    centres = 10 * dice.standard_normal((5, 8))
    truth = np.repeat(np.arange(5), 20)
    points = centres[truth] + dice.standard_normal((100, 8)) / 10
    spread = {num: grouped(points, num, 0)[1] for num in (1, 2, 3, 4, 5, 6, 8, 12, 20)}
    assert elbow(spread) in (4, 5, 6)
    members, _ = grouped(points, 5, 0)
    assert all(len(set(members[truth == group].tolist())) == 1 for group in range(5))


def test_transitions_are_shares_of_what_follows() -> None:
    found = transitions(np.array([0, 1, 0, 1, 1, 2]), 3)
    assert found.tolist() == [[0, 1, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 0]]

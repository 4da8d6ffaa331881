"""Two ways in turns: the better one is found, whatever hides it, and trying the other costs little."""

from __future__ import annotations

from random import Random

import pytest
from expertly.scheduler.trial import Trial


class Steps:
    """Decode steps whose time grows with how hard they are, with noise; `ratio`: way 1's to way 0's."""

    def __init__(self, ratio: float, seed: int, noise: float = 0.2) -> None:
        self.ratio, self.noise, self.dice = ratio, noise, Random(seed)
        self.trial = Trial()
        self.slow = 1.0
        self.taken = [0, 0]
        self.spent_ns = self.first_ns = self.second_ns = 0

    def run(self, num: int) -> Steps:
        for _ in range(num):
            difficulty = self.dice.random() * 20
            first = self.slow * 1e6 * (1 + difficulty / 10) * self.dice.lognormvariate(0, self.noise)
            way, took = self.trial.way, (first, first * self.ratio)
            self.taken[way] += 1
            self.spent_ns += int(took[way])
            self.first_ns, self.second_ns = self.first_ns + int(took[0]), self.second_ns + int(took[1])
            self.trial.ran(way, int(took[way]), difficulty)
        return self

    @property
    def cost(self) -> float:
        """All time, as a multiple of the better way's."""
        return self.spent_ns / min(self.first_ns, self.second_ns)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.9, 1.1, 1.3, 2.0])
def test_the_better_way_is_found_and_trying_the_other_costs_little(ratio: float, seed: int) -> None:
    steps = Steps(ratio, seed).run(3000)
    assert steps.trial.best == (1 if ratio < 1 else 0)
    assert steps.cost < 1.03
    found = steps.trial.ratio
    assert found is not None and found == pytest.approx(max(ratio, 1 / ratio), rel=0.15)
    assert min(steps.taken) > 3 * 4, "it was tried again and again"


@pytest.mark.parametrize("ratio", [0.99, 1.0, 1.01])
def test_ways_that_cost_the_same_may_take_turns(ratio: float) -> None:
    assert Steps(ratio, 1).run(2000).cost < 1.01


def test_what_is_four_times_as_slow_is_left_after_a_few_steps() -> None:
    steps = Steps(4.0, 3, noise=0.05).run(64)
    assert steps.trial.best == 0 and steps.taken[1] <= 8
    assert Steps(4.0, 3).run(6000).cost < 1.03


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("before", "after"), [(0.7, 1.4), (1.4, 0.7)])
def test_a_way_that_becomes_the_worse_one_is_left_within_a_few_hundred_steps(
    before: float, after: float, seed: int
) -> None:
    steps = Steps(before, seed).run(2000)
    steps.ratio = after
    steps.run(800)
    assert steps.trial.best == (0 if after > 1 else 1)
    assert steps.trial.num_changes >= 1


def test_a_change_of_the_best_way_brings_an_early_try() -> None:
    steps = Steps(1.05, 2, noise=0.05).run(1500)
    steps.ratio, steps.slow = 0.5, 3.0  # a slow link now: the other way is of use
    steps.run(300)
    assert steps.trial.best == 1


def test_what_slows_both_ways_down_for_a_while_changes_nothing() -> None:
    steps = Steps(1.3, 5)
    dice = Random(1)
    for _ in range(100):
        steps.slow = dice.choice([1.0, 1.0, 1.5, 2.0])
        steps.run(40)
    assert steps.trial.best == 0
    assert steps.cost < 1.05


def test_an_accident_now_and_then_changes_nothing() -> None:
    steps = Steps(1.2, 4, noise=0.05)
    for _ in range(60):
        steps.slow = 30.0
        steps.run(1)
        steps.slow = 1.0
        steps.run(30)
    assert steps.trial.best == 0


def test_passes_in_a_way_that_others_chose_are_not_compared() -> None:
    trial = Trial()
    for number in range(400):
        trial.ran(1 - trial.way, 1000 * (1 + number % 3), 1.0)
    assert trial.ratio is None and trial.num_measured == 0

"""A claim's verdict follows from the numbers: another number is another verdict, and noise decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import FAILS, HOLDS, UNTOLD, Check, Finding, MeanOfRequests, Result
from expertly.lab.papers.moe_infinity import elbow, grouped, transitions
from expertly.lab.papers.runner import EXPERIMENTS, PAPERS, select

POINTS = {"a": 1.0, "b": 2.0, "c": 3.0}

Rule = Callable[[Mapping[str, float]], Check]

CASES: dict[str, tuple[Rule, dict[str, float]]] = {
    "best, lowest": (lambda x: rules.best("", x, "a", "", lowest=True), {"a": 2.5}),
    "best, highest": (lambda x: rules.best("", x, "c", "", lowest=False), {"c": 1.5}),
    "best, with slack": (lambda x: rules.best("", x, "b", "", lowest=True, slack=1.0), {"b": 2.1}),
    "ranked, lowest": (lambda x: rules.ranked("", x, "", lowest=True), {"b": 3.5}),
    "ranked, highest": (lambda x: rules.ranked("", dict(reversed(x.items())), "", lowest=False), {"b": 0.5}),
    "rises": (lambda x: rules.monotonic("", x, "", rises=True), {"b": 0.5}),
    "rises in all": (lambda x: rules.monotonic("", x, "", rises=True, slack=9.0), {"c": 1.0}),
    "falls": (lambda x: rules.monotonic("", dict(reversed(x.items())), "", rises=False), {"b": 4.0}),
    "above": (lambda x: rules.above("", {"b": x["b"], "a": x["a"]}, ""), {"a": 2.0}),
    "above by one": (lambda x: rules.above("", {"b": x["b"], "a": x["a"]}, "", by=1.0), {"b": 1.9}),
    "one away": (lambda x: rules.above("", {"a": x["a"], "b": x["b"]}, "", by=-1.0), {"a": 0.9}),
    "below": (lambda x: rules.below("", {"a": x["a"], "b": x["b"]}, ""), {"a": 2.0}),
    "between": (lambda x: rules.between("", {"0": 1.5, **x}, ""), {"a": 1.5}),
    "within": (lambda x: rules.within("", "b", x["b"], 1.5, 2.5, ""), {"b": 2.6}),
    "everywhere": (lambda x: rules.everywhere("", {key: value < 4 for key, value in x.items()}, "", ""), {"c": 4.0}),
}


@pytest.mark.parametrize(("rule", "doctored"), CASES.values(), ids=CASES)
def test_another_number_is_another_verdict(rule: Rule, doctored: dict[str, float]) -> None:
    assert rule(POINTS).verdict == HOLDS
    assert rule(POINTS | doctored).verdict == FAILS


def test_the_reason_is_asked_for_only_where_it_does_not_hold() -> None:
    asked = []

    def why() -> str:
        asked.append(1)
        return "because"

    assert rules.best("", POINTS, "a", why, lowest=True).why == "" and not asked
    assert rules.best("", POINTS, "b", why, lowest=True).why == "because"


def test_a_check_says_which_numbers_decided() -> None:
    check = rules.ranked("order", {"x": 0.5, "y": 0.2, "z": 0.4}, "", lowest=False, unit="share")
    assert check.measured == "x 50.0 %, y 20.0 %, z 40.0 %; against it: y and z"
    assert check.rule == "x >= y >= z"
    named = rules.everywhere("all", {"k=1": True, "k=2": False}, "learned above skip", "")
    assert named.measured == "1 of 2; not: k=2"


def mean(each: Sequence[float]) -> MeanOfRequests:
    """Of requests with one pass each."""
    return MeanOfRequests.of(float(np.mean(each)), np.array(each), np.ones(len(each)))


def test_what_is_within_the_noise_of_requests_cannot_be_told() -> None:
    slow, fast = mean([3.0, 1.0, 2.0, 4.0, 2.0, 3.0]), mean([2.9, 0.9, 1.9, 3.9, 1.9, 2.9])
    noisy = mean([1.0, 5.0, 0.5, 4.9, 0.5, 2.4])  # as fast as `fast` in the mean, by other requests
    check = rules.best("", {"fast": fast, "slow": slow}, "fast", "", lowest=True)
    assert check.verdict == HOLDS and "difference -0.1 to -0.1" in check.measured, "each request is 0.1 faster"
    assert rules.best("", {"fast": fast, "slow": slow}, "slow", "why", lowest=True).verdict == FAILS
    check = rules.best("", {"noisy": noisy, "slow": slow}, "noisy", "why", lowest=True)
    assert check.verdict == UNTOLD and check.why == ""
    check = rules.ranked("", {"fast": fast, "slow": slow, "noisy": noisy}, "", lowest=True)
    assert check.verdict == UNTOLD and "not told apart: slow and noisy" in check.measured
    cases = {"one": rules.compare(("noisy", "slow"), {"noisy": noisy, "slow": slow}, lowest=True), "other": True}
    assert rules.everywhere("", cases, "", "").verdict == UNTOLD
    few = {"a": mean([1.0, 9.0]), "b": mean([9.0, 1.5])}
    assert rules.best("", few, "a", "", lowest=True).verdict == HOLDS, "no interval of two requests"


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, FAILS, UNTOLD], "in part (1 of 3; 1 cannot be told)"),
        ([FAILS, UNTOLD], FAILS),
        ([UNTOLD], UNTOLD),
        ([], "not run"),
    ],
)
def test_the_verdict_of_an_experiment_is_that_of_its_claims(verdicts: list[str], said: str) -> None:
    checks = tuple(Check("claim", "rule", "numbers", verdict) for verdict in verdicts)
    assert Result("fmoe:0", (Finding("trace", "setting", (), checks),), (), 0.0).verdict == said


def names(asked: str) -> list[str]:
    return [one.name for one in select(asked)]


def test_a_figure_a_paper_or_all() -> None:
    assert names("all") == list(EXPERIMENTS)
    assert names("promoe:14") == ["promoe:13"], "a figure of a group is found by its own number"
    assert names("moepic:6,fmoe:4") == ["fmoe:4", "moepic:6"]
    assert all(name.startswith("fmoe:") for name in names("fmoe"))


@pytest.mark.parametrize(
    ("asked", "accepted"),
    [("gmoe", "moe-infinity"), ("fmoe:99", "12a"), ("", "all"), ("fmoe:", "12a"), ("moepic:table-9", "table-3")],
)
def test_unknown_names_are_refused_with_what_is_accepted(asked: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted):
        select(asked)


def test_every_figure_is_said_once_and_has_the_papers_words() -> None:
    for paper in PAPERS:
        figures = [figure for one in EXPERIMENTS.values() if one.paper == paper for figure in one.figures]
        assert len(figures) == len(set(figures)) and figures
    assert all(one.shows and one.title and one.where for one in EXPERIMENTS.values())


FIGURES = {
    "fmoe": "3a 3b 3c 4 8 9 10 11 12a 12b 13 14a 14b 15 16",
    "moe-infinity": "2 4 table-2 7 table-1 8 9 table-3 B.1",
    "promoe": "3 4 5 8 9 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25",
    "moepic": "table-1 2a 2b 2c 2d 4a 4b 6 7 8 table-3 9",
}
"""What must have a result."""


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_that_must_have_a_result_has_an_experiment(paper: str) -> None:
    assert [names(f"{paper}:{figure}")[0].partition(":")[0] for figure in FIGURES[paper].split()]


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

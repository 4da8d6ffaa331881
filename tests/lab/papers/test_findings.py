"""A claim's verdict follows from the numbers: another number is another verdict, and noise decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import FAILS, HOLDS, UNTOLD, Check, Finding, FindingTable, Result, Told
from expertly.lab.papers.measured import Estimate, joined
from expertly.lab.papers.moe_infinity import elbow, grouped, transitions
from expertly.lab.papers.runner import PAPERS, experiments, select

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
    assert check.measured == "x 50.0%, y 20.0%, z 40.0%; against it: y and z"
    assert check.rule == "x >= y >= z"
    named = rules.everywhere("all", {"k=1": True, "k=2": False}, "learned above skip", "")
    assert named.measured == "1 of 2; not: k=2"


def mean(each: Sequence[float]) -> Estimate:
    """Of requests with one pass each."""
    return Estimate.mean(np.array(each))


def test_what_is_within_the_noise_of_requests_cannot_be_told() -> None:
    slow, fast = mean([3.0, 1.0, 2.0, 4.0, 2.0, 3.0]), mean([2.9, 0.9, 1.9, 3.9, 1.9, 2.9])
    noisy = mean([1.0, 5.0, 0.5, 4.9, 0.5, 2.4])  # as fast as `fast` in the mean, by other requests
    check = rules.best("", {"fast": fast, "slow": slow}, "fast", "", lowest=True)
    assert check.verdict == HOLDS and "fast of slow: 0.96x [0.94, 0.97]" in check.measured, "each request is 0.1 faster"
    assert rules.best("", {"fast": fast, "slow": slow}, "slow", "why", lowest=True).verdict == FAILS
    check = rules.best("", {"noisy": noisy, "slow": slow}, "noisy", "why", lowest=True)
    assert check.verdict == UNTOLD and check.why == ""
    check = rules.ranked("", {"fast": fast, "slow": slow, "noisy": noisy}, "", lowest=True)
    assert check.verdict == UNTOLD and "not told apart: slow and noisy" in check.measured
    cases: dict[str, bool | Told] = {
        "one": rules.compare(("noisy", "slow"), {"noisy": noisy, "slow": slow}, lowest=True),
        "other": True,
    }
    assert rules.everywhere("", cases, "", "").verdict == UNTOLD
    few = {"a": mean([1.0, 1.0]), "b": mean([9.0, 9.0])}
    assert rules.best("", few, "a", "", lowest=True).verdict == UNTOLD, "two requests tell nothing"


def test_the_size_of_a_claim_is_that_of_what_decides_it() -> None:
    times = {"a": mean([1.0] * 5), "b": mean([2.0] * 5), "c": mean([4.0] * 5)}
    told = {f"{one} before {other}": rules.compare((one, other), times, lowest=True) for one, other in ("ab", "ac")}
    assert rules.everywhere("", told, "", "").size == "a before b: a of b: 0.50x [0.50, 0.50]", "the least that holds"
    told |= {"c before b": rules.compare(("c", "b"), times, lowest=True)}
    told |= {"c before a": rules.compare(("c", "a"), times, lowest=True)}
    assert rules.everywhere("", told, "", "").size == "c before a: c of a: 4.00x [4.00, 4.00]", "the largest against it"
    assert rules.best("", times, "a", "", lowest=True).size == "a of b: 0.50x [0.50, 0.50]"
    assert rules.best("", times, "c", "", lowest=True).size == "c of a: 4.00x [4.00, 4.00]"
    assert rules.within("", "a", times["a"], 0.5, 2.0, "").size == "a 1 [1, 1]"


def test_a_gain_has_the_size_that_the_rule_asks_for() -> None:
    base, less = mean([2.0, 4.0, 2.0, 4.0, 3.0]), mean([1.96, 3.92, 1.96, 3.92, 2.94])
    values = {"less": less, "base": base}
    assert rules.below("", values, "", slack=-0.01).verdict == HOLDS
    assert rules.below("", values, "", slack=-0.05).verdict == FAILS, "2 % are not 5"


def test_the_same_is_an_interval_within_the_margin() -> None:
    base = mean([2.0, 4.0, 2.0, 4.0, 3.0])
    for times, verdict in ((1.005, HOLDS), (1.1, FAILS), (0.9, FAILS)):
        assert rules.same("", {"one": base * times, "other": base}, "", margin=0.02).verdict == verdict
    noisy = mean([3.0, 3.1, 2.9, 3.0, 3.0])
    assert rules.same("", {"one": noisy, "other": base}, "", margin=0.02).verdict == UNTOLD, "equal in the mean only"


def test_most_cases_are_more_than_half_of_them() -> None:
    cases = {str(number): number < 3 for number in range(5)}
    assert rules.everywhere("", cases, "", "", mostly=True).verdict == HOLDS
    assert rules.everywhere("", cases | {"5": False}, "", "", mostly=True).verdict == FAILS


def test_intervals_are_the_bootstraps_and_go_through_arithmetic() -> None:
    dice = np.random.default_rng(0)
    each = dice.normal(10, 2, 400)
    low, high = Estimate.mean(each).interval or (0.0, 0.0)
    assert 9.6 < low < each.mean() < high < 10.4 and high - low == pytest.approx(4 * 2 / 20, rel=0.2)
    ratio = Estimate.mean(each) / Estimate.mean(each * 2)
    assert ratio.interval == pytest.approx((0.5, 0.5)), "of the same requests: what they have in common cancels"
    weighted = Estimate.mean(np.array([2.0, 30.0, 4.0, 6.0, 8.0]), np.array([1, 10, 1, 2, 2]))
    assert weighted == 50 / 16
    tail = Estimate.percentile(np.arange(100.0), 90, np.arange(100) // 10)
    assert tail == 89 and tail.interval is not None and tail.interval[0] < 89 <= tail.interval[1]
    middle = joined(np.median, [Estimate.mean(each), 3.0, 20.0])
    assert middle == each.mean() and isinstance(middle, Estimate)


def test_three_seeds_are_few() -> None:
    found = Estimate.of_seeds([1.0, 2.0, 3.0])
    assert found == 2 and found.interval == pytest.approx((2 - 4.3 / 3**0.5, 2 + 4.3 / 3**0.5), abs=0.3)
    other = Estimate.of_seeds([1.1, 2.1, 3.1])
    assert (other - found).interval == pytest.approx((0.1, 0.1)), "seeds are compared one by one"
    assert Estimate.of_seeds([1.0]).interval is None


def test_a_table_says_intervals_and_comes_back_from_json() -> None:
    made = FindingTable.of("", {"": "", "TPOT": "ms"}, [("lru", mean([0.01, 0.02, 0.03, 0.02, 0.02])), ("x", 0.5)])
    assert made.shown() == [["lru", "20.0 ms [14.0, 26.0]"], ["x", "500 ms"]]
    rows = json.loads(json.dumps(made.rows))
    assert FindingTable.of("", {"": "", "TPOT": "ms"}, rows) == made


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
    assert names("all") == [one.name for one in experiments()]
    assert names("promoe:14") == ["promoe:13"], "a figure of a group is found by its own number"
    assert names("moepic:6,fmoe:4") == ["fmoe:4", "moepic:6"]
    assert all(name.startswith("fmoe:") for name in names("fmoe"))


@pytest.mark.parametrize(
    ("asked", "accepted"),
    [
        ("gmoe", "moe-infinity"),
        ("fmoe:99", "12a"),
        ("", "all"),
        ("fmoe:", "12a"),
        ("moepic:table-9", "table-3"),
        ("fmoe:4,fmoe:99", "12a"),
        ("fmoe:link", "expertly:assumptions"),
    ],
)
def test_unknown_names_are_refused_with_what_is_accepted(asked: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted):
        select(asked)


def test_every_figure_is_said_once_and_has_the_papers_words() -> None:
    for paper in PAPERS:
        figures = [figure for one in experiments() if one.paper == paper for figure in one.figures]
        assert len(figures) == len(set(figures)) and figures
    assert all(one.shows and one.title and one.where for one in experiments())


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

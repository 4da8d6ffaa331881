"""Directions follow from numbers: another number is another verdict."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from expertly.reproduce import rules
from expertly.reproduce.finding import Check

POINTS = {"a": 1.0, "b": 2.0, "c": 3.0}

Rule = Callable[[Mapping[str, float]], Check]

CASES: dict[str, tuple[Rule, dict[str, float]]] = {
    "best, lowest": (lambda x: rules.best("", x, "a", lowest=True), {"a": 2.5}),
    "best, highest": (lambda x: rules.best("", x, "c", lowest=False), {"c": 1.5}),
    "best, with slack": (lambda x: rules.best("", x, "b", lowest=True, slack=1.0), {"b": 2.1}),
    "ranked, lowest": (lambda x: rules.ranked("", x, lowest=True), {"b": 3.5}),
    "ranked, highest": (lambda x: rules.ranked("", dict(reversed(x.items())), lowest=False), {"b": 0.5}),
    "rises": (lambda x: rules.monotonic("", x, rises=True), {"b": 0.5}),
    "rises in all": (lambda x: rules.monotonic("", x, rises=True, slack=9.0), {"c": 1.0}),
    "falls": (lambda x: rules.monotonic("", dict(reversed(x.items())), rises=False), {"b": 4.0}),
    "above": (lambda x: rules.compared("", ("b", x["b"]), ("a", x["a"]), above=True), {"a": 2.0}),
    "above by one": (lambda x: rules.compared("", ("b", x["b"]), ("a", x["a"]), above=True, by=1.0), {"b": 1.9}),
    "at most one away": (lambda x: rules.compared("", ("a", x["a"]), ("b", x["b"]), above=True, by=-1.0), {"a": 0.9}),
    "below": (lambda x: rules.compared("", ("a", x["a"]), ("b", x["b"]), above=False), {"a": 2.0}),
    "between": (lambda x: rules.between("", {"0": 1.5, **x}, lowest=True), {"a": 1.5}),
    "near the best": (lambda x: rules.near_best("", x, "a", lowest=True, slack=0.1), {"b": 0.5}),
    "within": (lambda x: rules.within("", "b", x["b"], 1.5, 2.5), {"b": 2.6}),
    "everywhere": (lambda x: rules.everywhere("", {key: value < 4 for key, value in x.items()}, ""), {"c": 4.0}),
}


@pytest.mark.parametrize(("rule", "doctored"), CASES.values(), ids=CASES)
def test_another_number_is_another_verdict(rule: Rule, doctored: dict[str, float]) -> None:
    assert rule(POINTS).holds
    assert not rule(POINTS | doctored).holds


def test_the_reason_is_asked_for_only_where_it_does_not_hold() -> None:
    asked = []

    def why() -> str:
        asked.append(1)
        return "because"

    assert rules.best("", POINTS, "a", lowest=True, why=why).why == "" and not asked
    assert rules.best("", POINTS, "b", lowest=True, why=why).why == "because"


def test_a_check_says_which_numbers_decided() -> None:
    check = rules.ranked("order", {"x": 0.5, "y": 0.2, "z": 0.4}, lowest=False, unit="share")
    assert check.measured == "x 50.0 %, y 20.0 %, z 40.0 %; against it: y and z"
    assert check.rule == "x >= y >= z"
    named = rules.everywhere("all", {"k=1": True, "k=2": False}, "learned above skip")
    assert named.measured == "1 of 2; not: k=2"


def test_every_direction_of_every_experiment_has_a_reason_to_give() -> None:
    """Else one that does not hold, on whatever trace, would stand unexplained."""
    without, num_rules = [], 0
    for path in sorted(Path(rules.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="rules"), attr=name)):
                    positional = list(inspect.signature(getattr(rules, name)).parameters)[: len(node.args)]
                    given = {*positional, *(keyword.arg for keyword in node.keywords)}
                    num_rules += 1
                    without += [f"{path.name}:{node.lineno}"] * ("why" not in given)
    assert num_rules > 50 and without == []

"""The engine counts what it counted when the golden file was written (lab/tests/golden/record.py).

Of the memories and P every system has one, all with EXPERTLY_TEST_GOLDEN=all: each case takes about half a second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from tests.golden import engine
from tests.golden.cases import Case, differences, read_cases, system_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECORDED = read_cases(engine.FILE)
ALL = os.environ.get("EXPERTLY_TEST_GOLDEN") == "all"
RUN = ("10% P=4", "50% P=1", "25% P=4", "10% P=1")  # in turn


def cases_to_run(recorded: Mapping[str, Case]) -> dict[str, list[str]]:
    """By system."""
    by_system: dict[str, list[str]] = {}
    for number, system in enumerate(dict.fromkeys(map(system_of, recorded))):
        ending = RUN[number % len(RUN)]
        every = [name for name in recorded if system_of(name) == system]
        by_system[system] = [name for name in every if ALL or system in engine.REFUSED or name.endswith(ending)]
    return by_system


def assert_unchanged(recorded: Mapping[str, Case], names: list[str]) -> None:
    different = differences({name: recorded[name] for name in names}, {name: engine.run(name) for name in names})
    assert not different, "\n".join(["", *different])


@pytest.mark.parametrize(("system", "names"), cases_to_run(RECORDED).items())
def test_every_system_of_the_engine(system: str, names: list[str]) -> None:
    assert_unchanged(RECORDED, names)


def test_every_system_gives_the_same_tokens() -> None:
    """Those of the system that keeps everything."""
    outputs = [case["output"] for case in RECORDED.values() if "output" in case]
    assert outputs == [RECORDED["resident 100% P=1"]["output"]] * len(outputs)
    assert len(outputs) >= 70, "nearly all cases run"

"""The engine counts what it counted when the golden file was written (tests/golden/record.py).

Of the memories and P every system has one (and those that decide by times what is run "as it is"), all with
EXPERTLY_TEST_GOLDEN=all: each case takes about half a second.
"""

from __future__ import annotations

import os

import pytest

from tests.golden import engine
from tests.golden.cases import differences, read_cases, system_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECORDED = read_cases(engine.FILE)
ALL = os.environ.get("EXPERTLY_TEST_GOLDEN") == "all"
RUN = ("10% P=4", "50% P=1", "25% P=4", "10% P=1")  # in turn
OF_SYSTEM = {
    system: (RUN[number % len(RUN)], *([engine.AS_IT_IS] if system in engine.TIMED else []))
    for number, system in enumerate(dict.fromkeys(map(system_of, RECORDED)))
}
TESTED = [
    name for name in RECORDED if ALL or name.endswith(OF_SYSTEM[system_of(name)]) or system_of(name) in engine.REFUSED
]


@pytest.mark.parametrize("system", dict.fromkeys(map(system_of, TESTED)))
def test_every_system_of_the_engine(system: str) -> None:
    names = [name for name in TESTED if system_of(name) == system]
    different = differences({name: RECORDED[name] for name in names}, {name: engine.run(name) for name in names})
    assert not different, "\n".join(["", *different])


def test_every_system_gives_the_same_tokens() -> None:
    """Those of the system that keeps everything."""
    outputs = [case["output"] for case in RECORDED.values() if "output" in case]
    assert outputs == [RECORDED["resident 100% P=1"]["output"]] * len(outputs)
    assert len(outputs) >= 100, "nearly all cases run"

"""The engine counts for the lab's systems what it counted when the golden file was written (golden/record.py)."""

from __future__ import annotations

import pytest

from lab.tests.golden.simulator import FOLDER
from tests.golden import engine
from tests.golden.cases import read_cases
from tests.test_golden_engine import RECORDED as OF_PRODUCT
from tests.test_golden_engine import assert_unchanged, cases_to_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECORDED = read_cases(engine.FILE, FOLDER)


@pytest.mark.parametrize(("system", "names"), cases_to_run(RECORDED).items())
def test_every_system_of_the_engine(system: str, names: list[str]) -> None:
    assert_unchanged(RECORDED, names)


def test_every_system_gives_the_same_tokens() -> None:
    outputs = [case["output"] for case in RECORDED.values() if "output" in case]
    assert outputs == [OF_PRODUCT["resident 100% P=1"]["output"]] * len(outputs)
    assert len(outputs) >= 30, "nearly all cases run"

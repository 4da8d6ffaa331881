"""The lab's systems change no token either, on whatever device; as the tests of expertly show it of its own."""

from __future__ import annotations

import pytest

from expertly.scheduler.systems import SYSTEMS, runnable_systems
from tests.engine.conftest import Cases
from tests.engine.test_cuda import test_no_system_changes_a_token_on_an_accelerator as assert_lossless_on_accelerator
from tests.engine.test_lossless import test_every_way_to_predict_is_lossless as assert_prediction_is_lossless
from tests.engine.test_lossless import test_no_system_changes_a_token_and_each_decides_the_same_again as assert_lossless

OF_LAB = [name for name in runnable_systems() if name not in SYSTEMS.built_in]


@pytest.mark.parametrize(("number", "system"), enumerate(OF_LAB))
def test_no_system_changes_a_token(number: int, system: str, cases: Cases) -> None:
    assert_lossless(number, system, cases)


@pytest.mark.parametrize(("system", "segments"), [("adapmoe", 4), ("pre-gated", 1)])
def test_no_system_changes_a_token_on_an_accelerator(
    system: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_lossless_on_accelerator(system, segments, cases, monkeypatch)


def test_what_is_kept_nowhere_is_prefetched(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    system = "lru:allocation=none:prediction=lookahead:ahead=staging"
    assert_prediction_is_lossless(system, "granitemoe", "60%", 2, cases, monkeypatch)

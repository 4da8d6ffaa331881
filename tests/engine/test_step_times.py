"""What layers keep is worked out from measured times and changes while the model runs, and no token does."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine.step_times import StepTimes
from tests.engine.conftest import Cases
from tests.engine.observe import recorded_decisions
from tests.families import generate

SHAPE = Geometry((LayerGeometry(8, 2, 4, 16, 3, 2),) * 2, 4)


def configurations(model: Any) -> int:
    """How often what is kept was worked out."""
    allocation: dict[str, Any] = expertly.stats(model).as_dict()["devices"][0]["allocation"]
    return int(allocation["configurations"])


@pytest.mark.parametrize("family", ["gpt_oss", "switch_transformers"])
def test_no_token_changes_when_what_is_kept_does_in_the_middle_of_a_generation(family: str, cases: Cases) -> None:
    """Every other token something is worked out, from times of this machine; and all of it is decided again."""
    case = cases[family]
    with recorded_decisions() as decisions:
        model, _ = expertly.load(str(case.store), memory="50%", system="moepic:tau=2:segments=4", device="cpu")
    engine, seen = handle(model).engine, set()
    begin = engine.begin_iteration

    def begin_iteration(info: Any) -> None:
        begin(info)
        engine.scheduler.check()
        seen.add((tuple(engine.scheduler.cache.quotas), tuple(engine.scheduler.cache.tops)))

    engine.begin_iteration = begin_iteration
    for _ in range(60):  # as many as it takes
        assert generate(model, case.prompts) == case.tokens
        if configurations(model) >= 2 and len(seen) > 1:
            break
    assert configurations(model) >= 2 and len(seen) > 1, "it did change"
    expertly.unload(model)
    assert decisions.difference() is None
    assert decisions.num("configure") >= 1


def test_times_of_a_step_are_what_lies_between() -> None:
    """Attention: 7 and 5 ns before layers 0 and 1. Experts: 30 - 10 and 40. The head: 9. A segment: 25 in layer 0."""
    times = StepTimes(SHAPE)
    for begin, is_decode in ((1000, False), (2000, True), (2091, True), (9000, False), (9500, True)):
        times.begin(begin)
        times.ran(0, is_decode, 10, 30, begin + 37)
        assert times.is_known == (begin > 2091)
        times.ran(1, is_decode, 0, 40, begin + 82)
        if begin == 2091:
            times.loaded(0, 2, 50, has_waited=True)
            times.loaded(1, 2, 500, has_waited=False)
    timing = times.timing()
    assert (timing.attention_ns, timing.moe_ns, timing.head_ns) == ((7, 5), (20, 40), 9)
    assert timing.load_ns == (100, 100), "layer 1 never waited: it loads as fast"

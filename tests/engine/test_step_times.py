"""What layers keep is worked out from measured times and changes while the model runs, and no token does."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine.step_times import StepTimes
from expertly.scheduler.budget import split_budget
from expertly.scheduler.systems import get_system
from tests.engine.conftest import Cases
from tests.engine.observe import recorded_decisions
from tests.families import generate

SHAPE = Geometry((LayerGeometry(8, 2, 4, 16, 3, 2),) * 2, 4)


def configurations(model: Any) -> int:
    """How often what is kept was worked out."""
    allocation: dict[str, Any] = expertly.stats(model).as_dict()["devices"][0]["allocation"]
    return int(allocation["configurations"])


@pytest.mark.parametrize("family", ["gpt_oss", "jamba"])
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
    """Two steps of 100 ns, 9 apart: 30 - 10 and 40 in experts, the rest in two dense parts; 20 ns for 40 bytes."""
    scheduler = get_system("lru").scheduler(SHAPE, split_budget(SHAPE, SHAPE.nbytes // 2))
    times = StepTimes(scheduler)
    times.passed(False, 0, 1000)
    for begin_ns in (2000, 2109):
        assert not times.is_known
        for layer, (expert_ns, stall_ns) in zip(scheduler.counters, ((30, 10), (40, 0)), strict=True):
            layer.decode.expert_ns += expert_ns
            layer.decode.stall_ns += stall_ns
            layer.decode.loaded_nbytes += 30
            layer.decode.prefetched_nbytes += 10
        times.passed(True, begin_ns, begin_ns + 100)
    assert times.is_known
    timing = times.timing()
    assert (timing.attention_ns, timing.moe_ns, timing.head_ns) == ([15, 15], [20, 40], 9)
    assert timing.load_ns == [SHAPE.layers[0].expert_nbytes // 4] * 2

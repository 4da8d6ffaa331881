"""What layers keep is worked out from measured times and changes while the model runs, and no token does."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine.compute import LayerCall
from expertly.engine.step_times import StepTimes
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, recorded_decisions
from tests.engine.peers import put_in_threads
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


def test_beside_a_worker_the_device_works_out_what_its_share_keeps(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["qwen3_moe"]
    put_in_threads(monkeypatch)
    settings = {"memory": "30%", "system": "moepic:tau=4", "segments": 4}
    with loaded(case.store, workers=1, worker_memory="30%", **settings) as model:
        for _ in range(40):  # as many as it takes to time a device's parts
            assert generate(model, case.prompts) == case.tokens
            if configurations(model):
                break
        assert configurations(model) >= 1


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
    assert timing.span_ns == timing.ask_ns == (0, 0), "nobody saw any"


def test_a_span_costs_what_does_not_depend_on_its_size() -> None:
    """Layer 0: 30 ns a span and 10 a segment. Layer 1: one size, and too few of another: as much as layer 0."""
    times = StepTimes(SHAPE)
    for begin in (0, 100):
        times.begin(begin)
        for layer in range(2):
            times.loaded(layer, 4, 100, has_waited=True)
            times.ran(layer, True, 10, 20, begin + 30 * (layer + 1))
    for _ in range(9):
        for num in (1, 2, 4):
            times.computed(0, num, 30 + 10 * num)
        times.computed(0, 3, 60)
        times.computed(1, 4, 70)
    times.computed(0, 4, 100_000)
    times.computed(1, 2, 50)
    for elapsed_ns in (5, 7, 600):
        times.asked(1, elapsed_ns)
    timing = times.timing()
    assert timing.span_ns == (30, 30) and timing.ask_ns == (7, 7)


def test_nothing_is_worked_out_before_spans_of_two_sizes_were_timed_or_many_steps() -> None:
    """The cost of a span decides whether experts are split at all: without it, they would be."""
    times = StepTimes(SHAPE)
    for step in range(18):
        times.begin(100 * step)
        for layer in range(2):
            times.loaded(layer, 4, 100, has_waited=True)
            times.ran(layer, True, 10, 20, 100 * step + 30 * (layer + 1))
        assert times.are_enough == (step > 15), "15 times from one step to the next, and one more"
    others = StepTimes(SHAPE)
    for step in range(3):
        others.begin(100 * step)
        others.loaded(0, 4, 100, has_waited=True)
        others.ran(0, True, 10, 20, 100 * step + 30)
    for num in (2, 4):
        assert others.is_known and not others.are_enough
        for _ in range(8):
            others.computed(1, num, 10 * num)
    assert others.are_enough


def test_where_whole_experts_are_kept_again_those_that_are_there_are_computed_together(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where halves are kept, one after the other: what each takes is measured."""
    case, compute, most = cases["mixtral"], LayerCall.compute, 0

    def noted(call: LayerCall, spans: Any) -> None:
        nonlocal most
        if call.takes_several and call.work.router.serves_decode:
            most = max(most, len(spans))
        compute(call, spans)

    with loaded(case.store, memory="80%", system="moepic:tau=900", segments=4) as model:
        monkeypatch.setattr(LayerCall, "compute", noted)
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        if not most:
            pytest.skip("nothing computes several experts in a call here")
        assert most == 1
        scheduler = handle(model).engine.scheduler
        quotas = [4 * max(1, quota // 4) for quota in scheduler.cache.quotas]
        scheduler.cache.resize(quotas, [4] * len(quotas))
        scheduler.cache.rearrange(scheduler.upcoming())
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
    assert most > 1


def test_a_system_that_works_nothing_out_takes_no_times_and_one_that_splits_says_how(cases: Cases) -> None:
    with loaded(cases["qwen3_moe"].store, memory="50%", system="lcp") as model:
        assert handle(model).engine.executor.shard.times is None
    with loaded(cases["qwen3_moe"].store, memory="50%", system="moepic:allocation=split") as model:
        told = expertly.stats(model).as_dict()["allocation"]
        assert told["name"] == "split" and {one["theta"] for one in told["split"]} == {0.5}

"""What layers keep is worked out beside the model and changes while it runs, and no token does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.engine.compute import LayerCall
from expertly.engine.configuring import Configuring, StepTimes
from expertly.policies.allocation.moepic import LayerRates, LayerSplit, SplitPlan, configure
from expertly.scheduler.budget import split_budget
from expertly.scheduler.decisions import replay_file
from expertly.scheduler.presets import get_system
from tests.engine.conftest import Cases
from tests.engine.failing import raising
from tests.engine.observe import loaded
from tests.families import generate
from tests.scheduler.drive import run_layer

SHAPE = Geometry((LayerGeometry(8, 2, 4, 16, 3, 2),) * 2, 4)


def settled(model: Any) -> int:
    """Wait for what is being worked out; how often something was."""
    for device in handle(model).engine.executor.shards:
        if device.configuring._thread is not None:
            device.configuring._thread.join()
    allocation: dict[str, Any] = expertly.stats(model).as_dict()["devices"][0]["allocation"]
    return int(allocation["configurations"])


@pytest.mark.parametrize("family", ["gpt_oss", "switch_transformers"])
def test_no_token_changes_when_what_is_kept_does_in_the_middle_of_a_generation(
    family: str, cases: Cases, tmp_path: Path
) -> None:
    """Every other token something is worked out, from times of this machine; and all of it is decided again."""
    case, path = cases[family], tmp_path / "decisions.jsonl"
    model, _ = expertly.load(
        str(case.store), memory="50%", system="moepic:tau=2", segments=4, device="cpu", decisions=path
    )
    engine, seen = handle(model).engine, set()
    begin = engine.begin_iteration

    def begin_iteration(info: Any) -> None:
        settled(model)
        begin(info)
        engine.scheduler.check()
        seen.add((tuple(engine.scheduler.cache.quotas), tuple(engine.scheduler.cache.tops)))

    engine.begin_iteration = begin_iteration
    for _ in range(6):
        assert generate(model, case.prompts) == case.tokens
    assert settled(model) >= 3 and len(seen) > 1, "it did change"
    expertly.unload(model)
    assert replay_file(path)[1].difference is None
    assert '["configure",' in path.read_text()


def test_a_device_works_out_what_its_own_layers_keep(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    settings = {"memory": "60%", "system": "moepic:tau=4", "segments": 4, "predict": "inline"}
    with loaded(case.store, devices="cpu:0,cpu:1", **settings) as model:
        for _ in range(40):  # as many as it takes to time a device's parts
            assert generate(model, case.prompts) == case.tokens
            if settled(model):
                break
        assert settled(model) >= 1


def configuring(job: Callable[[Any], Any]) -> Configuring:
    """Of a model that has been run for a while; what is due is this job."""
    system = get_system("moepic")
    control = system.scheduler(SHAPE, system.budget(SHAPE, split_budget(SHAPE, SHAPE.nbytes // 2)))
    for layer in range(2):
        run_layer(control, layer, [0, 1])
    found = Configuring(control)
    control.allocation.due = lambda: job  # type: ignore[method-assign]
    for begin in (0, 100):
        found.times.begin(begin)
        for layer in range(2):
            found.times.loaded(layer, 4, 100, has_waited=True)
            found.times.ran(layer, True, 10, 20, begin + 30 * (layer + 1))
    for num_segments in (2, 4) * 8:
        found.times.computed(1, num_segments, 7)
    return found


def test_a_pass_does_not_wait_for_it_and_nothing_is_worked_out_twice() -> None:
    going, asked = threading.Event(), []

    def job(timing: Any) -> Any:
        asked.append(timing)
        assert going.wait(10)
        return configure(SHAPE, [20], [LayerRates.alike(8)] * 2, timing)

    found = configuring(job)
    shares = list(found._scheduler.cache.quotas)
    for _ in range(3):
        found.begin_iteration()
    assert found._scheduler.cache.quotas == shares and len(asked) == 1
    going.set()
    assert found._thread is not None
    found._thread.join()
    found.begin_iteration()
    assert found._scheduler.allocation.facts()["configurations"] == 1 and found._thread is None
    found.close()


def test_what_it_raises_is_raised_at_the_beginning_of_a_pass_once() -> None:
    found = configuring(raising(ZeroDivisionError("made up")))
    found.begin_iteration()
    assert found._thread is not None
    found._thread.join()
    with pytest.raises(ZeroDivisionError, match="made up"):
        found.begin_iteration()
    found.close()


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

    found = configuring(raising(ZeroDivisionError("begun")))
    spans, found.times._spans = found.times._spans, [{}, {}]
    found.begin_iteration()
    assert found._thread is None
    found.times._spans = spans
    found.begin_iteration()
    assert found._thread is not None
    found.close()


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

    with loaded(case.store, memory="80%", system="moepic:tau=900:start=half", segments=4, predict="inline") as model:
        monkeypatch.setattr(LayerCall, "compute", noted)
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
        if not most:
            pytest.skip("nothing computes several experts in a call here")
        assert most == 1
        scheduler = handle(model).engine.scheduler
        layers = (max(1, quota // 4) for quota in scheduler.cache.quotas)
        scheduler.configure(SplitPlan(scheduler.geometry, tuple(LayerSplit(num, 4, 4 * num) for num in layers)))
        assert generate(model, case.prompts[:1]) == case.tokens[:1]
    assert most > 1


def test_a_system_that_works_nothing_out_has_no_thread_and_one_that_splits_says_how(cases: Cases) -> None:
    with loaded(cases["qwen3_moe"].store, memory="50%", system="lcp") as model:
        assert handle(model).engine.executor.shards[0].configuring is None
    with loaded(cases["qwen3_moe"].store, memory="50%", system="moepic:allocation=split") as model:
        told = expertly.stats(model).as_dict()["allocation"]
        assert told["name"] == "split" and {one["theta"] for one in told["split"]} == {0.5}

"""A model that is watched: all of its computing thread's time is told, once, and it runs as before."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

import expertly
from expertly.api import handle
from expertly.core.messages import Span
from expertly.engine.compute import LayerCall
from expertly.lab.compare.report import tokens_in_time
from expertly.lab.compare.simulated import TokenTimeline
from expertly.lab.plots import drawing
from expertly.lab.watching import watched
from expertly.scheduler.scheduler import Scheduler
from tests.engine.conftest import Cases
from tests.engine.observe import counts, loaded
from tests.families import generate


class Notes:
    """A SimulationWatcher."""

    def __init__(self) -> None:
        self.device: list[tuple[str, int, int]] = []
        self.moves: list[tuple[Span, int, int]] = []

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        self.device.append((what.split()[0], begin_ns, end_ns))

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self.device.append((what, begin_ns, end_ns))

    def moved(self, where: str, span: Span, begin_ns: int, end_ns: int) -> None:
        self.moves.append((span, begin_ns, end_ns))

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        """An engine's predictor has a thread of its own, which nobody watches."""


def in_flight_nbytes(scheduler: Scheduler) -> int:
    geometry = scheduler.geometry
    masks = enumerate(scheduler.slots.in_flight)
    return sum(mask.bit_count() * geometry.segment_nbytes(geometry.layer_of_expert(eid)) for eid, mask in masks)


@pytest.mark.parametrize("system", ["lru", "adapmoe", "moepic"])
def test_all_the_time_of_a_pass_has_one_name(system: str, cases: Cases) -> None:
    case, notes = cases["mixtral"], Notes()
    with loaded(case.store, memory="50%", system=system) as model:
        scheduler = handle(model).engine.scheduler
        before, compute = handle(model).engine.executor.shards[0].device.submit, LayerCall.compute
        assert generate(model, case.prompts) == case.tokens
        counted, stats = counts(model, "decode"), expertly.stats(model).as_dict()["phases"]
        coming_nbytes = in_flight_nbytes(scheduler)
        with watched(model, notes):
            assert generate(model, case.prompts) == case.tokens
        after = expertly.stats(model).as_dict()["phases"]
        coming_nbytes -= in_flight_nbytes(scheduler)
        assert handle(model).engine.executor.shards[0].device.submit == before and LayerCall.compute is compute
        assert sum(counts(model, "decode")) > sum(counted), "it decoded"
    assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(notes.device)), "no gap, and nothing twice"
    kinds = Counter(what for what, _, _ in notes.device)
    assert kinds["dense"] == kinds["head"] * scheduler.geometry.num_layers > 0 and kinds["expert"] >= kinds["dense"]
    waited_s = sum(end - begin for what, begin, end in notes.device if what == "wait") / 1e9
    stalled_s = sum(after[phase]["stall_s"] - stats[phase]["stall_s"] for phase in after)
    assert stalled_s == pytest.approx(waited_s, rel=0.1, abs=2e-4)
    assert kinds["wait"] or system != "lru", "which prefetches nothing"
    brought = sum(span.num_segments * scheduler.geometry.segment_nbytes(span.layer) for span, _, _ in notes.moves)
    asked = sum(after[phase]["bytes_loaded"] - stats[phase]["bytes_loaded"] for phase in after)
    assert brought == asked + coming_nbytes, "what the run before had asked for, without what is still to come"
    assert all(begin <= end for _, begin, end in notes.moves)


def test_tokens_are_drawn_beneath_each_other_with_what_the_colours_mean() -> None:
    drawn = {}
    for name, waits in (("measured", True), ("simulated", False)):
        timeline = TokenTimeline(0)
        timeline.computed("dense", 0, 0, 1000)
        if waits:
            timeline.spent("wait", 1000, 5000)
            timeline.moved("link", Span(0, 3, 0, 1, 0), 1000, 5000)
        timeline.computed("expert 3", 0, 5000 * waits, 6000)
        timeline.computed("head", -1, 6000, 9000)
        found = timeline.as_dict()
        assert found is not None
        drawn[f"lru, {name}"] = found
    with drawing():
        picture = tokens_in_time(drawn)
        text = picture.svg()
    for said in ("lru, measured: 9.00 us", "lru, simulated: 9.00 us", "waiting for loads", "an expert", "link"):
        assert said in text or said.replace("9.00 us", "9 us") in text, said
    assert "predicting" not in text and "loaded ahead" not in text, "nothing was"

"""What layers lack since their shares changed is loaded while nothing else is, and gives way to everything."""

from __future__ import annotations

import random

import pytest

from expertly.core.messages import Prediction
from expertly.policies.known import Known
from expertly.policies.moepic.plan import LayerSplit, SplitPlan
from expertly.scheduler.budget import split_budget
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.presets import get_system
from tests.scheduler.ahead import CheckedController
from tests.scheduler.drive import WAYS, geometry, one_token
from tests.scheduler.links import RandomLink
from tests.scheduler.test_ahead import BUDGETS
from tests.scheduler.test_split import Mute, soak

SHAPE = geometry(layers=2, experts=8, top_k=2, segments=4)


@pytest.mark.parametrize("ahead", ["cache", "ring"])
@pytest.mark.parametrize("eviction", ["lcp", "random"])
def test_whatever_fills_every_promise_holds(ahead: str, eviction: str) -> None:
    happened: set[str] = set()
    for share, ring in BUDGETS:
        for failures in (0.0, 0.02):
            some = {"eviction": eviction, "ahead": ahead, "failures": failures, "fill": "idle"}
            happened |= soak(f"{share} {failures}", 4, share, ring, **some)  # type: ignore[arg-type]
    assert happened >= {"filled", "unfilled", "in flight", "on the way", "there"}


@pytest.mark.parametrize(("order", "preemption"), WAYS)
def test_however_a_layer_runs_they_hold(order: str, preemption: str) -> None:
    happened: set[str] = set()
    for share, ring in BUDGETS:
        for transfer in ("asynchronous", "synchronous"):
            way = {"order": order, "preemption": preemption, "transfer": transfer, "fill": "idle"}
            happened |= soak(f"{share} {transfer}", 4, share, ring, num_iterations=6, **way)
    assert "filled" in happened
    assert preemption == "early" or "fills_promoted" in happened


# -- stories -------------------------------------------------------------------------------------------------------


class Story:
    """Layers of 8 tops of two segments, of 8 experts; what has begun on the link arrives when it is asked for."""

    def __init__(self, spec: str = "", needed: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        system = get_system(f"moepic:fill=idle{spec}")
        budget = system.budget(SHAPE, split_budget(SHAPE, (2 * 16 + 8) * SHAPE.segment_nbytes(0)))
        self.control = control = system._make(CheckedController, SHAPE, budget, Known(), None).watch()
        self.link = RandomLink(random.Random(0), 1.0)
        self.ahead = Prefetcher(control, self.link, Mute())
        assert control.keeper.shares == [16, 16] and control.keeper.tops == [0b0011] * 2
        for _ in range(2):  # those of later ids are used last
            for first, second in zip(needed[::2], needed[1::2], strict=True):
                self.token([first, second])

    def token(self, experts: list[int]) -> None:
        for layer in range(2):
            run_layer(self.control, self.link, one_token(layer, experts), lambda span: None, self.ahead)
            self.control.check()

    def plan(self, *layers: tuple[int, int, int]) -> None:
        self.control.configure(SplitPlan(SHAPE, tuple(LayerSplit(*layer) for layer in layers)))

    def coming(self) -> list[tuple[int, int, int]]:
        return [(span.layer, span.expert, span.segment) for span in self.link.ahead]

    def arrive(self) -> None:
        while self.link.ahead:
            self.control.loaded(self.link.ahead.pop(0))

    def resident(self, layer: int) -> list[int]:
        first = SHAPE.first_expert_id(layer)
        return self.control.residency.resident[first : first + 8]

    def filled_nbytes(self) -> int:
        return sum(counters.decode.filled_nbytes for counters in self.control.counters)


def test_an_experts_worth_at_a_time_is_loaded_of_the_most_valuable_first() -> None:
    """Tops of two become four experts, whole: of 0 to 3, which are all that is kept, the other halves."""
    story = Story()
    story.plan((4, 4, 16), (8, 2, 16))
    story.ahead.refill()
    assert story.coming() == [(0, 3, 2), (0, 3, 3), (0, 2, 2), (0, 2, 3)]
    story.ahead.refill()
    assert len(story.coming()) == 4, "no more while these are in flight"
    story.arrive()
    story.ahead.refill()
    assert story.coming() == [(0, 1, 2), (0, 1, 3), (0, 0, 2), (0, 0, 3)]
    story.arrive()
    story.ahead.refill()
    assert story.resident(0) == [0b1111] * 4 + [0] * 4 and story.resident(1) == [0b0011] * 4 + [0] * 4
    assert not story.coming() and not story.control.can_fill, "layer 1 lacks nothing that decode has needed"
    counts = story.control.counters[0].decode
    assert counts.filled_nbytes == 8 * SHAPE.segment_nbytes(0) and not counts.prefetched_nbytes
    hits = counts.hits
    story.token([0, 1])
    assert counts.hits == hits + 2
    story.control.counts_agree()


def test_only_what_is_worth_less_goes_for_it() -> None:
    """All tops are kept; then four whole experts: those used last, and the tops of the others go for them."""
    story = Story(needed=(0, 1, 2, 3, 4, 5, 6, 7))
    story.plan((4, 4, 16), (8, 2, 16))
    for _ in range(4):
        story.ahead.refill()
        story.arrive()
        story.control.check()
    assert story.resident(0) == [0] * 4 + [0b1111] * 4 and story.resident(1) == [0b0011] * 8


def test_where_a_share_grew_what_was_needed_before_comes_back() -> None:
    """Layer 1 keeps two tops, then eight: of the experts that went, those used last are there again before anybody
    needs them; 6 and 7, which nobody ever needed, are not.
    """
    story = Story(needed=(0, 1, 2, 3, 4, 5))
    story.plan((8, 2, 16), (2, 2, 4))
    assert story.resident(1) == [0] * 4 + [0b0011] * 2 + [0] * 2
    story.plan((8, 2, 16), (8, 2, 16))
    story.ahead.refill()
    assert story.coming() == [(1, 3, 0), (1, 3, 1), (1, 2, 0), (1, 2, 1)]
    story.arrive()
    story.ahead.refill()
    story.arrive()
    story.ahead.refill()
    assert not story.coming() and story.resident(1) == [0b0011] * 6 + [0] * 2


def test_what_is_predicted_goes_before_it_and_it_comes_later() -> None:
    story = Story()
    story.plan((4, 4, 16), (8, 2, 16))
    story.ahead.refill()
    assert story.coming()[0] == (0, 3, 2) and story.filled_nbytes()
    story.control.predict(Prediction(1, [5], [0.9], 1))
    story.ahead.refill()
    assert story.coming() == [(1, 5, segment) for segment in range(4)] and not story.filled_nbytes()
    story.control.check()
    story.arrive()
    story.ahead.refill()
    assert story.coming()[0] == (0, 3, 2)


def test_its_own_layer_takes_it_back_and_demands() -> None:
    story = Story()
    story.plan((4, 4, 16), (8, 2, 16))
    story.ahead.refill()
    story.link.chance = 0.0
    run_layer(story.control, story.link, one_token(0, [3, 1]), lambda span: None, story.ahead)
    assert story.control.num_unfilled == 4 and story.resident(0)[:4] == [0b0011, 0b1111, 0b0011, 0b1111]
    story.control.counts_agree()


def test_a_demand_joins_what_has_begun() -> None:
    story = Story()
    num_before = len(story.link.submitted)
    story.plan((4, 4, 16), (8, 2, 16))
    story.ahead.refill()
    story.link.begun, story.link.ahead, story.link.chance = story.link.ahead, [], 0.0
    run_layer(story.control, story.link, one_token(0, [3, 1]), lambda span: None, story.ahead)
    assert story.control.num_fills_joined == 2 and story.resident(0)[3] == 0b1111
    loads = [(span.expert, span.segment, span.num_segments) for span in story.link.submitted[num_before:]]
    assert loads.count((3, 2, 1)) == 1 and (3, 2, 2) not in loads, "nothing is loaded twice"
    story.control.counts_agree()


@pytest.mark.parametrize("spec", ["", ":prediction=none"])
def test_by_default_it_waits_until_it_is_needed(spec: str) -> None:
    system = get_system(f"moepic{spec}")
    assert system.fill == "demand"
    control = system.scheduler(SHAPE, system.budget(SHAPE, split_budget(SHAPE, SHAPE.nbytes * 5 // 8)))
    control.configure(SplitPlan(SHAPE, (LayerSplit(4, 4, 16),) * 2))
    assert not control.can_fill

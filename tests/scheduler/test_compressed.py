"""The compressed tier's decisions: beside a naive reference, step by step, and in short stories."""

from __future__ import annotations

import random
from typing import Any

import pytest

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.scheduler import compressed
from expertly.scheduler.compressed import HALF_LIFE, CompressedTier, TierSlot, tier_slots


def shape(num_layers: int = 2, num_experts: int = 4, segments: int = 1, width: int = 4) -> Geometry:
    return Geometry((LayerGeometry(num_experts, 2, 2, width, 2, 1),) * num_layers, segments)


def load(tier: CompressedTier, expert: int, layer: int = 0, segment: int = 0) -> str:
    """Where a whole load found the segment, and whether it stays."""
    slot = tier.begin(layer, expert, segment)
    tier.end(layer, expert, segment)
    tier.check()
    return "passed by" if slot is None else "held" if slot.is_filled else "stays"


class Reference:
    """One size class: every load since the beginning is remembered, everything is scanned."""

    def __init__(self, num_slots: int, num_segments: int) -> None:
        self.num_slots = num_slots
        self.growth = 2.0 ** (1.0 / (HALF_LIFE * num_segments))
        self.weight = 1.0
        self.score: dict[int, float] = {}
        self.held: set[int] = set()
        self.busy: set[int] = set()

    def begin(self, sid: int) -> str:
        self.weight *= self.growth
        before = self.score.get(sid, 0.0)
        self.score[sid] = before + self.weight
        self.busy.add(sid)
        if sid in self.held:
            return "held"
        if len(self.held) == self.num_slots:
            may_go = [one for one in self.held - self.busy if self.score[one] < before]
            if not may_go:
                return "passed by"
            self.held.remove(min(may_go, key=lambda one: (self.score[one], one)))
        self.held.add(sid)
        return "stays"


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("num_slots", [0, 1, 5, 12])
def test_it_decides_as_a_naive_reference_does(num_slots: int, segments: int) -> None:
    dice = random.Random(num_slots * segments)
    geometry = shape(3, 8, segments)
    tier, reference = CompressedTier(geometry, [num_slots]), Reference(num_slots, 24 * segments)
    under_way: list[tuple[int, int, int, int]] = []
    found = {"held": 0, "passed by": 0, "stays": 0}
    for _ in range(3000):
        if len(under_way) > 3 or (under_way and dice.random() < 0.5):
            sid, *where = under_way.pop(dice.randrange(len(under_way)))
            tier.end(*where)
            reference.busy.remove(sid)
        layer, expert = dice.randrange(3), min(dice.randrange(8), dice.randrange(8))
        where = [layer, expert, dice.randrange(segments)]
        sid = (layer * 8 + expert) * segments + where[2]
        if sid in reference.busy:
            continue
        slot = tier.begin(*where)
        expected = reference.begin(sid)
        assert expected == ("passed by" if slot is None else "held" if slot.is_filled else "stays")
        found[expected] += 1
        under_way.append((sid, where[0], where[1], where[2]))
        tier.check()
        held = [tier.holds(*divmod(one // segments, 8), one % segments) for one in sorted(reference.held)]
        assert sum(held) >= len(held) - len(under_way), "what is not being filled is there"
    if num_slots == 5:
        assert min(found.values()) > 20, "each of it happened"
    if not num_slots:
        assert not found["held"] and not found["stays"]


def test_what_is_loaded_often_stays_and_what_comes_once_passes_by() -> None:
    tier = CompressedTier(shape(), [1])
    assert [load(tier, 0), load(tier, 0), load(tier, 1)] == ["stays", "held", "passed by"]
    assert load(tier, 0) == "held"


def test_a_prompt_that_loads_everything_once_takes_no_place_of_what_is_loaded_often() -> None:
    tier = CompressedTier(shape(1, 8), [2])
    for _ in range(3):
        load(tier, 0), load(tier, 1)
    assert [load(tier, expert) for expert in range(8)] == ["held", "held", *["passed by"] * 6]


def test_what_comes_round_and_round_does_not_chase_itself_out() -> None:
    """A least-recently-used tier would hold nothing in time."""
    tier = CompressedTier(shape(1, 8), [3])
    outcomes = [load(tier, i % 8) for i in range(80)]
    assert outcomes[8:].count("held") == 3 * 9


def test_loads_long_ago_count_less() -> None:
    tier = CompressedTier(shape(1, 4), [1])
    for _ in range(3):
        load(tier, 0)
    outcomes = [load(tier, 1 + i % 3) for i in range(HALF_LIFE * 4 * 4)]
    assert outcomes[0] == "passed by" and outcomes[-1] != "passed by"


def test_what_is_being_loaded_is_not_evicted() -> None:
    tier = CompressedTier(shape(), [1])
    assert tier.begin(0, 0, 0) == TierSlot(0, False)
    for _ in range(4):
        assert load(tier, 1) == "passed by", "its slot is being filled"
    tier.end(0, 0, 0)
    assert tier.holds(0, 0, 0) and tier.begin(0, 0, 0) == TierSlot(0, True)
    for _ in range(4):
        assert load(tier, 1) == "passed by", "its slot is being decoded"
    tier.end(0, 0, 0)
    assert load(tier, 1) == "stays" and not tier.holds(0, 0, 0)


def test_a_failed_load_leaves_nothing_behind() -> None:
    tier = CompressedTier(shape(), [1])
    tier.begin(0, 0, 0)
    tier.fail(0, 0, 0)
    assert not tier.holds(0, 0, 0) and load(tier, 0) == "stays"
    assert tier.begin(0, 0, 0) == TierSlot(0, True)
    tier.fail(0, 0, 0)  # what it held was damaged
    tier.check()
    assert not tier.holds(0, 0, 0) and load(tier, 0) == "stays"


def test_a_load_taken_back_frees_what_it_would_have_filled_and_keeps_what_is_there() -> None:
    tier = CompressedTier(shape(), [2])
    load(tier, 0)
    tier.begin(0, 0, 0), tier.begin(0, 1, 0)
    for expert in (0, 1):
        tier.withdraw(0, expert, 0)
    tier.check()
    assert tier.holds(0, 0, 0) and not tier.holds(0, 1, 0)


def test_after_an_abandoned_pass_nothing_half_filled_is_there_and_all_slots_are() -> None:
    tier = CompressedTier(shape(), [4])
    load(tier, 0), load(tier, 1)
    tier.begin(0, 1, 0), tier.begin(0, 2, 0), tier.begin(1, 3, 0)
    tier.abandon()
    tier.check()
    assert tier.holds(0, 0, 0) and not any(tier.holds(*one) for one in ((0, 1, 0), (0, 2, 0), (1, 3, 0)))
    assert [load(tier, expert, 1) for expert in (0, 1)] == ["stays", "stays"]


@pytest.mark.parametrize("nth", range(1, 7))
def test_an_interrupt_in_the_middle_of_a_load_is_put_right(nth: int) -> None:
    """Wherever it comes, no slot is lost, and nothing that was not filled is taken to be."""
    tier = CompressedTier(shape(1, 8), [2])
    load(tier, 0), load(tier, 1)
    calls = 0

    class Interrupting(dict[int, int]):
        def tick(self) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise KeyboardInterrupt

        def pop(self, *arguments: Any) -> Any:
            self.tick()
            return super().pop(*arguments)

        def __setitem__(self, key: int, value: int) -> None:
            self.tick()
            super().__setitem__(key, value)
            self.tick()

    one = tier._classes[0]
    one._slots = Interrupting(one._slots)
    with pytest.raises(KeyboardInterrupt):
        for expert in (2, 2, 2, 3, 3, 3):
            tier.begin(0, expert, 0)
            tier.end(0, expert, 0)
    one._slots = dict(one._slots)
    in_the_middle = set(one._filling)
    tier.abandon()
    tier.check()
    assert not any(tier.holds(0, expert, 0) for expert in in_the_middle)
    assert len(one._free) + len(one._slots) == 2


def test_scores_that_grow_are_scaled_and_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(3)
    stream = [min(dice.randrange(8), dice.randrange(8)) for _ in range(4000)]
    tiers = []
    for most in (compressed._MOST, 8.0):
        monkeypatch.setattr(compressed, "_MOST", most)
        tier = CompressedTier(shape(1, 8), [3])
        tiers.append([load(tier, expert) for expert in stream])
    assert tiers[0] == tiers[1] and {"held", "passed by", "stays"} == set(tiers[0])


def test_layers_of_several_sizes_have_places_of_their_own() -> None:
    layers = (LayerGeometry(4, 2, 2, 4, 2, 1), LayerGeometry(4, 2, 2, 8, 2, 1))
    tier = CompressedTier(Geometry(layers, 1), [1, 1])
    assert load(tier, 0, 0) == load(tier, 0, 1) == "stays"
    assert tier.slots_per_class == [1, 1] and tier.holds(0, 0, 0) and tier.holds(1, 0, 0)


@pytest.mark.parametrize(("nbytes", "slots"), [(0, [0, 0]), (120, [4, 4]), (10**9, [4, 4]), (60, [2, 2]), (59, [1, 1])])
def test_slots_share_the_memory_in_proportion_and_never_exceed_it(nbytes: int, slots: list[int]) -> None:
    layers = (LayerGeometry(4, 2, 2, 4, 2, 1), LayerGeometry(4, 2, 2, 8, 2, 1))
    assert tier_slots(Geometry(layers, 1), [10, 20], nbytes) == slots

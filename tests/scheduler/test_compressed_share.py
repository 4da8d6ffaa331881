"""Which share of the memory holds compressed experts: where it pays, how much, and that it is never a loss by its own
measure."""

from __future__ import annotations

import pytest

from expertly.core.costs import CodecCosts
from expertly.policies.allocation.adapmoe import StackDistances
from expertly.scheduler.compressed_share import LEAST_GAIN, MEASURED, REUSES, Loading, choose_share, reuse_of, steeper

EXPERTS = 1_000_000_000
COSTS = CodecCosts(0.65, 1e9, 2)
RING = EXPERTS // 100


def share_of(memory: float, disk: float, costs: CodecCosts = COSTS) -> float:
    return choose_share(EXPERTS, int(memory * EXPERTS), RING, disk, costs).share


@pytest.mark.parametrize("memory", [0.1, 0.25, 0.5, 0.75, 0.95])
def test_a_disk_as_fast_as_decoding_needs_no_copies(memory: float) -> None:
    chosen = choose_share(EXPERTS, int(memory * EXPERTS), RING, 1.3e9, COSTS)
    assert chosen.share == 0 and chosen.gain == 0
    assert "2.00 GB/s of weights, decoding 2.00" in chosen.why and "would not save 3%" in chosen.why


def test_a_slow_disk_is_worth_copies_and_the_slower_the_more() -> None:
    gains = [choose_share(EXPERTS, EXPERTS // 4, RING, disk, COSTS).gain for disk in (1e9, 3e8, 1e8, 1e7)]
    assert gains == sorted(gains) and gains[0] == 0 and gains[-1] > 0.1


def test_faster_decoding_is_worth_more_copies() -> None:
    slow, fast = (choose_share(EXPERTS, EXPERTS // 4, RING, 2e8, CodecCosts(0.65, rate, 2)) for rate in (2e8, 1e10))
    assert slow.share == 0 and fast.share > 0.5 and fast.gain > 2 * LEAST_GAIN


def test_weights_that_do_not_compress_are_not_held_twice() -> None:
    assert share_of(0.25, 1e8) > 0
    assert share_of(0.25, 1e8, CodecCosts(1.0, 1e9, 2)) == 0


def test_memory_for_all_experts_has_nothing_to_compress() -> None:
    chosen = choose_share(EXPERTS, EXPERTS, RING, 1e6, COSTS)
    assert (chosen.share, chosen.why) == (0, "all experts are kept: none is loaded twice")


@pytest.mark.parametrize("least", [0.15, 0.5, 0.99, 1.0])
def test_what_is_left_is_never_less_than_the_ring(least: float) -> None:
    """The budget of a quarter, of which so much is the ring."""
    memory = EXPERTS // 4
    chosen = choose_share(EXPERTS, memory, int(memory * least), 1e7, COSTS)
    assert chosen.share <= 1 - least + 1e-9
    if least < 0.5:
        assert chosen.share > 0


def test_a_model_that_needs_few_experts_wants_other_copies_than_one_that_needs_all() -> None:
    """Where a quarter of the experts serve everything and are kept, copies would only take their places."""
    few = [(0.0, 0.0), (0.24, 1.0), (1.0, 1.0)]
    even = [(0.0, 0.0), (1.0, 1.0)]
    kinds = [choose_share(EXPERTS, EXPERTS // 4, RING, 1e7, COSTS, [reuse]).share for reuse in (few, even)]
    assert kinds[0] == 0 and kinds[1] > 0.5


def test_what_is_chosen_for_several_is_no_loss_for_any_of_them() -> None:
    for memory in (0.1, 0.25, 0.5, 0.6, 0.75):
        for disk in (5e7, 1e8, 2e8, 5e8):
            budget = int(memory * EXPERTS)
            together = choose_share(EXPERTS, budget, RING, disk, COSTS)
            alone = [choose_share(EXPERTS, budget, RING, disk, COSTS, [reuse]).gain for reuse in REUSES]
            assert together.gain <= sum(alone) / len(alone) + 1e-9
            assert together.gain == 0 or (together.gain >= LEAST_GAIN and min(alone) > 0)


def test_a_model_whose_reuse_is_known_dares_more_than_one_of_which_nobody_knows() -> None:
    budget = EXPERTS * 3 // 4
    known = [choose_share(EXPERTS, budget, RING, 1e8, COSTS, [reuse]).gain for reuse in REUSES]
    assert max(known) > 0.3 and choose_share(EXPERTS, budget, RING, 1e8, COSTS).gain == 0


def test_half_of_the_experts_behind_a_disk_of_20_mb_per_s() -> None:
    """Also where decoding was measured beside other processes that took most of its time."""
    for rate in (1e9, 6e8):
        chosen = choose_share(EXPERTS, EXPERTS // 2, RING, 2e7, CodecCosts(0.72, rate, 2))
        assert chosen.share > 0.5 and chosen.gain > 0.3


def test_steeper_is_above_all_others() -> None:
    reuse = steeper(REUSES)
    assert reuse[0] == (0.0, 0.0) and reuse[-1] == (1.0, 1.0)
    assert all(one >= max(rates) for (_, one), *rates in zip(reuse, *([r for _, r in x] for x in REUSES), strict=True))


@pytest.mark.parametrize("held_out", MEASURED)
def test_what_others_recur_like_is_no_loss_for_a_model_that_was_left_out(held_out: str) -> None:
    """By the expected time to load, which `bench/codec_auto.py --held-out` compares with simulated ones."""
    others = [reuse for whose, reuse in MEASURED.items() if whose != held_out]
    for memory in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85):
        for disk in (2e7, 5e7, 1e8, 2e8, 4e8):
            for costs in (CodecCosts(0.65, 5e8, 2), COSTS, CodecCosts(0.72, 1.6e9, 2)):
                budget = int(memory * EXPERTS)
                chosen = choose_share(EXPERTS, budget, RING, disk, costs, others)
                gain = Loading(EXPERTS, budget, RING, disk, costs).gain(chosen.share, MEASURED[held_out])
                assert gain >= -0.07, (memory, disk, chosen.share)
                assert memory > 0.75 or gain >= 0, (memory, disk, chosen.share)


def test_reuse_is_that_of_traces() -> None:
    for reuse in REUSES:
        assert reuse[0] == (0.0, 0.0) and reuse[-1] == (1.0, 1.0)
        assert list(reuse) == sorted(reuse) and [rate for _, rate in reuse] == sorted(rate for _, rate in reuse)


def test_a_models_own_reuse_is_what_its_caches_would_hit_once_warm() -> None:
    """Two experts of eight in turn: a cache of one hits nothing, one of two everything."""
    layers = [StackDistances(8), StackDistances(8)]
    for token in range(100):
        for layer in layers:
            layer.add([(1, token % 2)])
    reuse = reuse_of([layer.misses() for layer in layers])
    assert reuse is not None and reuse[0] == (0.0, 0.0) and reuse[-1] == (1.0, 1.0)
    assert dict(reuse)[0.125] == 0 and dict(reuse)[0.25] == 1 and dict(reuse)[0.1875] == pytest.approx(0.5)


def test_what_was_never_used_twice_says_nothing() -> None:
    once = StackDistances(4)
    once.add([(1, 0), (1, 1)])
    assert reuse_of([once.misses()]) is None

"""Costs that are put into layers are found again in how long they take."""

from __future__ import annotations

import random

import pytest

from expertly.core.costs import Link
from expertly.lab.profile_fits import LayerSample, fit_layers, samples_of

FALLBACK = Link(123.0, 4, 5)
TOP_K, EXPERT_NS, EXPERT_NBYTES = 4, 1_000, 6_000_000


def layer(num_absent: int, submit_ns: int, load_ns: int, latency_ns: int, each_ns: int) -> LayerSample:
    """By hand: computing what has arrived, then what is here, then waiting."""
    now, stall, ready = 500 + (submit_ns if num_absent else 0), 0, TOP_K - num_absent
    arrivals = [latency_ns + each_ns * (i + 1) for i in range(num_absent)]
    while ready or arrivals:
        if arrivals and arrivals[0] <= now:
            arrivals.pop(0)
            now += load_ns
        elif ready:
            ready -= 1
        else:
            stall += arrivals[0] - now
            now = arrivals[0]
            continue
        now += EXPERT_NS
    return LayerSample(num_absent, now, stall)


@pytest.mark.parametrize(
    ("submit_ns", "load_ns", "latency_ns", "each_ns"), [(700, 50, 300, 2_500), (0, 0, 0, 4_000), (900, 0, 2_000, 1_500)]
)
def test_costs_are_found_again(submit_ns: int, load_ns: int, latency_ns: int, each_ns: int):
    samples = [layer(n, submit_ns, load_ns, latency_ns, each_ns) for n in range(TOP_K + 1) for _ in range(5)]
    costs = fit_layers(samples, TOP_K, EXPERT_NS, EXPERT_NBYTES, FALLBACK)
    assert costs.resident_ns == 500 + TOP_K * EXPERT_NS
    assert (costs.submit_ns, costs.load_ns) == (pytest.approx(submit_ns, abs=2), pytest.approx(load_ns, abs=2))
    assert EXPERT_NBYTES / costs.link.nbytes_per_s * 1e9 == pytest.approx(each_ns, rel=0.05)
    assert costs.link.latency_ns == pytest.approx(latency_ns, abs=0.1 * each_ns)


def test_a_few_layers_that_took_much_longer_change_little():
    dice = random.Random(0)
    samples = [layer(n, 700, 50, 300, 2_500) for n in range(TOP_K + 1) for _ in range(9)]
    samples += [LayerSample(dice.randint(0, TOP_K), 500_000, 100_000) for _ in range(4)]
    costs = fit_layers(samples, TOP_K, EXPERT_NS, EXPERT_NBYTES, FALLBACK)
    assert costs.submit_ns == pytest.approx(700, abs=5)
    assert EXPERT_NBYTES / costs.link.nbytes_per_s * 1e9 == pytest.approx(2_500, rel=0.05)


def test_where_nothing_was_loaded_nothing_is_charged():
    costs = fit_layers([layer(0, 1, 1, 1, 1)] * 9, TOP_K, EXPERT_NS, EXPERT_NBYTES, FALLBACK)
    assert (costs.resident_ns, costs.submit_ns, costs.load_ns, costs.link) == (4_500, 0, 0, FALLBACK)
    assert fit_layers([], TOP_K, EXPERT_NS, EXPERT_NBYTES, FALLBACK).resident_ns is None


def test_layers_that_did_not_run_or_had_part_of_an_expert_say_nothing():
    before = [(3, 30, 100, 10)] * 4
    after = [(5, 50, 190, 40), (3, 30, 100, 10), (4, 35, 150, 10), (3, 30, 130, 10)]
    assert samples_of(before, after, 10) == [LayerSample(2, 90, 30), LayerSample(0, 30, 0)]


def test_waiting_for_a_processor_is_no_cost_of_the_computing_thread():
    before, after = [(0, 0, 0, 0)] * 2, [(2, 20, 90, 30), (0, 0, 30, 0)]
    samples = samples_of(before, after, 10, processor_ns=[25, 28])
    assert samples == [LayerSample(2, 90, 65), LayerSample(0, 30, 2)]
    assert [sample.busy_ns for sample in samples] == [25, 28]

"""Costs that are put into layers are found again in how long they take."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from expertly.core.costs import CodecCosts, LayerTime, Link, MeasuredCompute
from expertly.core.geometry import Geometry
from expertly.lab.profile_fits import LayerSample, Shot, fit_decoding, fit_layers, fit_link, samples_of
from tests.sim.drive import INFINITE, sized

FALLBACK = Link(123.0, 4, 5)
TOP_K, EXPERT_NS, EXPERT_NBYTES = 4, 1_000, 6_000_000


def layer(
    num_absent: int, submit_ns: int, load_ns: int, latency_ns: int, each_ns: int, *, together: bool = False
) -> LayerSample:
    """By hand: computing what has arrived, then what is here, then waiting."""
    now, stall, ready = 500 + (submit_ns if num_absent else 0), 0, TOP_K - num_absent
    arrivals = [latency_ns + each_ns * (num_absent if together else i + 1) for i in range(num_absent)]
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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("submit_ns", "load_ns", "latency_ns", "each_ns"), [(700, 50, 300, 2_500), (0, 0, 0, 4_000), (900, 0, 2_000, 1_500)]
)
def test_costs_are_found_again(submit_ns: int, load_ns: int, latency_ns: int, each_ns: int, together: bool):
    times = submit_ns, load_ns, latency_ns, each_ns
    samples = [layer(n, *times, together=together) for n in range(TOP_K + 1) for _ in range(5)]
    costs = fit_layers(samples, TOP_K, EXPERT_NS, EXPERT_NBYTES, replace(FALLBACK, arrive_together=together))
    assert costs.link.arrive_together == together
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


def test_a_link_is_found_again():
    """Of spans of two sizes each part of it; of one size a rate that covers everything; never less than nothing."""
    two_sizes = [Shot(n, n * size, 0, 1_000 + n * (50 + size // 2)) for n in (1, 2, 4, 8) for size in (4_000, 16_000)]
    link = fit_link(two_sizes)
    assert (link.nbytes_per_s, link.latency_ns, link.overhead_ns) == (pytest.approx(2e9), 1_000, 50)
    link = fit_link([Shot(n, n * 8_000, 0, 1_000 + n * 4_050) for n in (1, 2, 4, 8)])
    assert (link.latency_ns, link.occupies_ns(8_000)) == (1_000, pytest.approx(4_050, abs=1))
    link = fit_link([Shot(1, 1_000, 0, 1_000), Shot(2, 2_000, 0, 3_000), Shot(4, 4_000, 0, 8_000)])
    assert link.latency_ns >= 0 and link.overhead_ns >= 0 and link.nbytes_per_s > 0


@pytest.mark.parametrize(("first_ns", "together"), [(1_100, False), (2_400, False), (2_700, True), (4_000, True)])
def test_spans_arrive_together_where_the_first_comes_nearer_to_the_last_than_to_one_alone(
    first_ns: int, together: bool
):
    shots = [Shot(1, 10, 40, 40), Shot(1, 1_000, 1_000, 1_000), Shot(4, 40, 40, 100), Shot(4, 4_000, first_ns, 4_000)]
    assert fit_link(shots).arrive_together == together
    assert not fit_link(shots[:2]).arrive_together, "nobody knows"


# -- the rate of decoding, where it can be worked out by hand --------------------------------------------------------


GEOMETRY = Geometry(sized(2, 8, 4, width=250_000), 1)  # experts of a million bytes
ALONE = CodecCosts(0.5, 1e9, threads=2, threads_beside=2)
COMPUTE = MeasuredCompute("toy", "float32", 1, 1, 2, GEOMETRY.layers[0], (1,), *[(0,)] * 5, 0, 0, 1.0)


def layers(nbytes_per_s: float, around_ns: int = 0, counts: tuple[int, ...] = (1, 2, 4)) -> list[LayerTime]:
    """Of a machine that only decodes, by two processors of so many bytes a second each."""
    loading = [LayerTime(n, around_ns + round(n * 1e9 * 1e6 / (2 * nbytes_per_s)), 9) for n in counts]
    return [LayerTime(0, around_ns, 9), *loading]


@pytest.mark.parametrize("rate", [0.25e9, 0.6e9, 0.9e9])
@pytest.mark.parametrize("around_ns", [0, 3_000_000])
def test_the_rate_is_found(rate: float, around_ns: int) -> None:
    found = fit_decoding(layers(rate, around_ns), INFINITE, ALONE, COMPUTE, GEOMETRY)
    assert found.decode_nbytes_per_s == pytest.approx(rate, rel=0.03)
    assert replace(found, decode_nbytes_per_s=1e9) == ALONE


def test_it_is_never_more_than_alone_nor_out_of_all_proportion() -> None:
    assert fit_decoding(layers(5e9), INFINITE, ALONE, COMPUTE, GEOMETRY) == ALONE
    slow = fit_decoding(layers(0.01e9), INFINITE, ALONE, COMPUTE, GEOMETRY)
    assert slow.decode_nbytes_per_s == pytest.approx(0.2e9)


def test_without_layers_that_loaded_it_is_what_it_was() -> None:
    for one in ([], [LayerTime(0, 5_000_000, 100)]):
        assert fit_decoding(one, INFINITE, ALONE, COMPUTE, GEOMETRY) == ALONE


def test_what_the_disk_takes_is_not_taken_for_decoding() -> None:
    """500 KB a read at 0.25 GB/s are 2 ms an expert; the last one is decoded in one after that."""
    disk = Link(0.25e9, 0, 0)
    times = [LayerTime(0, 0, 9), *(LayerTime(n, n * 2_000_000 + 500_000, 9) for n in (1, 2, 3))]
    found = fit_decoding(times, disk, ALONE, COMPUTE, GEOMETRY)
    assert found.decode_nbytes_per_s > 0.4e9, "by the times alone it would be 0.2"


def test_what_computing_takes_of_the_processors_is_not_taken_for_decoding() -> None:
    """Of four experts one is here: while it is computed, three share one processor of two, and then both."""
    small = Geometry(sized(2, 8, 4, width=60_000), 1)  # one part each
    compute = replace(COMPUTE, layer=small.layers[0], expert_ns=(240_000,))
    costs = replace(ALONE, threads_beside=1)
    total_ns = 240_000 + 240_000 + 3 * 240_000  # they come together, and are computed then
    found = fit_decoding([LayerTime(0, 960_000, 9), LayerTime(3, total_ns, 9)], INFINITE, costs, compute, small)
    assert found.decode_nbytes_per_s == pytest.approx(1e9, rel=0.03)
    both = fit_decoding([LayerTime(0, 960_000, 9), LayerTime(3, total_ns, 9)], INFINITE, ALONE, compute, small)
    assert both.decode_nbytes_per_s < 0.85e9, "as if computing took none"

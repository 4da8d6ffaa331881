"""What is measured, from the times of iterations."""

from __future__ import annotations

from typing import Any, cast

import pytest

from expertly_lab.sim.metrics import Metrics, percentile
from expertly_lab.sim.workload import Iteration


def iteration(requests: tuple[int, ...], prefilling: tuple[int, ...] = (), arrival_ns: int = 0) -> Iteration:
    return Iteration(0, requests, prefilling, len(requests), [], 0, arrival_ns, cast(Any, None), 0)


def test_a_prompt_beside_others_answers_is_the_first_token_of_its_own_request_only() -> None:
    metrics = Metrics()
    metrics.add(iteration((0,), (0,)), 0, 100, 10)
    metrics.add(iteration((0, 1), (1,)), 100, 250, 0)  # request 0 goes on while 1 begins
    metrics.add(iteration((0, 1)), 250, 300, 20)
    assert metrics.ttft_s(is_queued=False) == pytest.approx((100 + 150) / 2 / 1e9)
    assert metrics.tpot_s == pytest.approx(50 / 1e9), "of passes that are decode alone"
    assert (metrics.num_decode_iterations, metrics.num_requests) == (1, 2)
    assert metrics.stall_share == 30 / 300


def test_a_prompt_in_several_passes_ends_with_the_last() -> None:
    metrics = Metrics()
    assert metrics.tpot_s is metrics.stall_share is metrics.ttft_s(is_queued=True) is None, "nothing measured yet"
    for begin in (0, 100, 200):
        metrics.add(iteration((0,), (0,)), begin, begin + 100, 0)
    assert metrics.ttft_s(is_queued=False) == pytest.approx(300 / 1e9)


def test_time_without_a_request_is_neither_busy_nor_stalled() -> None:
    metrics = Metrics()
    metrics.add(iteration((0,), arrival_ns=0), 0, 100, 50)
    metrics.add(iteration((1,), arrival_ns=1000), 1000, 1100, 0)
    assert metrics.stall_share == 50 / 200
    assert [each["latency_s"] for each in metrics.times_by_request(True)] == pytest.approx([1e-7, 1e-7])


def test_hits_of_a_batch_are_nobodys() -> None:
    metrics = Metrics()
    metrics.add(iteration((0,)), 0, 100, 0, 3, 4)
    metrics.add(iteration((0, 1)), 100, 200, 0, 5, 8)
    metrics.add(iteration((1,)), 200, 300, 0, 1, 4)
    metrics.add(iteration((0,)), 300, 400, 0, 4, 4)
    assert metrics.hits_by_request() == [(7, 8), (1, 4)]


def test_percentiles_are_values_that_occurred() -> None:
    for num, percent, expected in [(1, 50, 1), (2, 50, 1), (3, 50, 2), (100, 99, 99), (100, 50, 50), (10, 95, 10)]:
        assert percentile(list(range(1, num + 1)), percent) == expected
    assert percentile([], 50) is None

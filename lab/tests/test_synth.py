"""Made-up routing has the statistics it claims, and its optimum is the optimum."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expertly.core.errors import TraceError
from expertly_lab.synth import SynthWorkload, write_workload, zipf
from expertly_lab.trace.reader import Trace
from lab.tests.closed_forms import loop, most_hits_of_loop

Experts = npt.NDArray[np.uint16]


def experts_of(workload: SynthWorkload) -> Experts:
    return np.concatenate(list(workload.blocks()))


def lru_hits(demands: list[list[int]], capacity: int) -> int:
    """Of one layer; what a token demands is never evicted for it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for needed in demands:
        hits += sum(expert in cache for expert in needed)
        for expert in needed:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def most_hits(demands: list[list[int]], capacity: int) -> int:
    """The most that any choice of victims can hit in one layer, by trying all."""
    best = {frozenset[int](): 0}
    for needed in demands:
        after: dict[frozenset[int], int] = {}
        for cache, hits in best.items():
            hits += len(cache & set(needed))
            others = sorted(cache - set(needed))
            for kept in combinations(others, min(len(others), capacity - len(needed))):
                state = frozenset((*kept, *needed))
                after[state] = max(after.get(state, -1), hits)
        best = after
    return max(best.values())


@pytest.mark.parametrize(("num_experts", "top_k"), [(3, 1), (5, 1), (4, 2), (6, 2), (8, 2), (6, 3), (2, 2)])
def test_optimum_of_a_loop_is_what_brute_force_finds(num_experts: int, top_k: int) -> None:
    for num_tokens in (1, 2, 3, 5, 8, 13):
        workload = loop(2, num_experts, top_k, num_tokens)
        experts = experts_of(workload)
        assert experts.shape == (num_tokens, 2, top_k)
        for capacity in range(top_k, num_experts + 1, top_k):
            demands = experts[:, 1].tolist()
            assert most_hits_of_loop(workload, capacity) == 2 * most_hits(demands, capacity), (num_tokens, capacity)
            if capacity < num_experts:
                assert lru_hits(demands, capacity) == 0


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_no_expert_twice_and_the_same_for_the_same_seed(keep: float) -> None:
    def experts(seed: int) -> Experts:
        return experts_of(zipf(3, 8, 3, 500, exponent=1.2, keep=keep, seed=seed))

    found = experts(1)
    assert found.shape == (500, 3, 3) and found.max() == 7
    assert (np.diff(np.sort(found, axis=-1).astype(int), axis=-1) > 0).all()
    np.testing.assert_array_equal(found, experts(1))
    assert (found != experts(2)).any()


def test_popularity_follows_the_exponent() -> None:
    first = experts_of(zipf(2, 6, 1, 40_000, exponent=1.5, seed=0))
    shares = np.sort(np.bincount(first[:, 0, 0], minlength=6))[::-1] / 40_000
    weights = np.arange(1, 7) ** -1.5
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.01)
    even = np.bincount(experts_of(zipf(1, 6, 2, 30_000, exponent=0)).reshape(-1)) / 30_000
    np.testing.assert_allclose(even, 1 / 3, atol=0.015)


def test_experts_are_kept_as_often_as_asked() -> None:
    def kept(keep: float) -> float:
        experts = experts_of(zipf(1, 64, 4, 5_000, exponent=0, keep=keep))[:, 0]
        return float((experts[1:, :, None] == experts[:-1, None, :]).any(-1).mean())

    assert kept(1.0) == 1.0
    by_chance = kept(0.0)
    assert by_chance == pytest.approx(4 / 64, abs=0.01)
    expected = 0.7 + 0.3 * 4 * 0.3 / (64 - 2.8)  # the drawn ones may be dropped ones
    assert kept(0.7) == pytest.approx(expected, abs=0.01)


def test_a_workload_becomes_a_trace(tmp_path: Path) -> None:
    workload = zipf(2, 8, 2, 11, seed=5)
    write_workload(tmp_path / "trace", workload, model="synth", num_requests=3, prefill_tokens=2, seed=5)
    trace = Trace.open(tmp_path / "trace")
    np.testing.assert_array_equal(trace.rows("experts", 0, 11), experts_of(workload))
    assert trace.rows("request", 0, 11).tolist() == [0] * 4 + [1] * 4 + [2] * 3
    assert trace.rows("iteration", 0, 11).tolist() == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7]
    assert trace.rows("is_prefill", 0, 11).tolist() == [True, True, False, False] * 2 + [True, True, False]
    weights = trace.rows("weights", 0, 11).astype(float)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=2e-3)
    assert (np.diff(weights, axis=-1) <= 0).all()
    assert not any(field.is_real for field in trace.manifest.fields.values())


def test_a_prefill_of_more_rows_than_a_block(tmp_path: Path) -> None:
    workload = zipf(1, 2, 1, 20_001)
    write_workload(tmp_path / "trace", workload, model="synth", prefill_tokens=20_000)
    trace = Trace.open(tmp_path / "trace")
    assert (trace.num_rows, trace.num_iterations) == (20_001, 2)


@pytest.mark.parametrize(
    ("sizes", "how", "message"),
    [
        ((1, 8, 9, 5), {}, "top_k=9: must be from 1 to 8"),
        ((1, 70_000, 2, 5), {}, "experts=70000: must be from 1 to 65535"),
        ((1, 4, 2, 5), {"num_requests": 6}, "requests=6: must be from 1 to the 5 tokens"),
        ((1, 4, 2, 5), {"num_requests": 2, "prefill_tokens": 3}, "prefill_tokens=3: must be from 0 to the 2 tokens of"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, sizes: tuple[int, ...], how: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        write_workload(tmp_path / "trace", zipf(*sizes), model="synth", **how)
    assert not (tmp_path / "trace").exists()

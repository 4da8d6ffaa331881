"""Made-up routing has the statistics it claims, its optimum is the optimum, its lookahead as right as it says."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expertly.core.errors import TraceError
from expertly_lab.synth import SynthWorkload, modelled_lookahead, write_workload, zipf
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
        ((2, 8, 2, 5), {"lookahead": 1.5}, "lookahead=1.5: must be from 0 to 1"),
        ((2, 8, 2, 5), {"lookahead": float("nan")}, "lookahead=nan: must be from 0 to 1"),
        ((2, 7, 4, 5), {"lookahead": 0.9}, "lookahead=0.9: of 7 experts, top-4, too few are not needed"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, sizes: tuple[int, ...], how: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        write_workload(tmp_path / "trace", zipf(*sizes), model="synth", **how)
    assert not (tmp_path / "trace").exists()


# -- a modelled lookahead --------------------------------------------------------------------------------------------


Bools = npt.NDArray[np.bool_]


def is_named(scores: npt.NDArray[np.float16], top_k: int) -> Bools:
    """[T, L - 1, E]: which are among the K best of the layers after the first."""
    order = np.argsort(-scores[:, :-1, 0].astype(np.float32), axis=-1, kind="stable")
    named = np.zeros(order.shape, np.bool_)
    np.put_along_axis(named, order[..., :top_k], True, axis=-1)
    return named


def is_needed(experts: npt.NDArray[np.uint16], num_experts: int) -> Bools:
    needed = np.zeros((*experts.shape[:2], num_experts), np.bool_)
    np.put_along_axis(needed, experts.astype(np.intp), True, axis=-1)
    return needed[:, 1:]


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (6, 3)])
@pytest.mark.parametrize("accuracy", [0.0, 0.545, 0.905, 1.0])
def test_it_is_right_as_often_as_stated(num_experts: int, top_k: int, accuracy: float) -> None:
    experts = np.concatenate(list(zipf(5, num_experts, top_k, 3000, exponent=0.3, seed=2).blocks()))
    scores = modelled_lookahead(np.random.default_rng(1), experts, num_experts, accuracy)
    assert scores.shape == (3000, 5, 1, num_experts) and scores.dtype == np.float16
    named, needed = is_named(scores, top_k), is_needed(experts, num_experts)
    right = (named & needed).sum() / needed.sum()
    assert right == pytest.approx(accuracy, abs=0 if accuracy in (0, 1) else 0.01)
    np.testing.assert_allclose(scores[:, :-1].astype(float).sum(-1), 1, atol=0.01)
    assert (scores[:, :-1] > 0).all() and not scores[:, -1].any()


def test_wrong_ones_are_anybody_and_missed_ones_anywhere() -> None:
    num_experts, top_k = 8, 2
    experts = np.concatenate(list(zipf(2, num_experts, top_k, 40_000, exponent=0, seed=3).blocks()))
    scores = modelled_lookahead(np.random.default_rng(1), experts, num_experts, 0.5)
    named, needed = is_named(scores, top_k), is_needed(experts, num_experts)
    wrong = (named & ~needed)[:, 0].sum(axis=0)
    np.testing.assert_allclose(wrong / wrong.sum(), 1 / num_experts, atol=0.005)
    places = np.argsort(np.argsort(-scores[:, 0, 0].astype(np.float32), axis=-1), axis=-1)
    of_missed = np.bincount(places[needed[:, 0] & ~named[:, 0]], minlength=num_experts)
    assert not of_missed[:top_k].any()
    np.testing.assert_allclose(of_missed[top_k:] / of_missed.sum(), 1 / (num_experts - top_k), atol=0.01)


def test_a_trace_with_it_says_so_and_is_the_same_otherwise(tmp_path: Path) -> None:
    workload = zipf(3, 8, 2, 50, seed=5)
    for name, accuracy in (("with", 0.905), ("again", 0.905), ("without", None)):
        write_workload(tmp_path / name, workload, model="synth", prefill_tokens=4, lookahead=accuracy, seed=5)
    traces = {name: Trace.open(tmp_path / name) for name in ("with", "again", "without")}
    trace = traces["with"]
    assert trace.is_modelled("lookahead") and not trace.is_real("lookahead")
    assert trace.manifest.fields["lookahead"].note.startswith("modelled: 0.905 of the K best")
    assert not traces["without"].is_modelled("lookahead") and not trace.is_modelled("experts")
    for field in ("experts", "weights"):
        np.testing.assert_array_equal(trace.rows(field, 0, 50), traces["without"].rows(field, 0, 50))
    scores = trace.rows("lookahead", 0, 50)
    np.testing.assert_array_equal(scores, traces["again"].rows("lookahead", 0, 50))
    assert scores.shape == (50, 3, 1, 8)


def test_who_names_as_many_as_he_can_may_be_always_right(tmp_path: Path) -> None:
    write_workload(tmp_path / "trace", zipf(2, 4, 4, 5), model="synth", lookahead=1.0)
    assert (Trace.open(tmp_path / "trace").rows("lookahead", 0, 5)[:, 0] > 0).all()

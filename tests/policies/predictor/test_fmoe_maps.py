"""The store of expert maps: what goes into it and what goes, and the maps nearest to a pass."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.geometry import ModelShape
from expertly.core.observation import Floats
from expertly.policies.fmoe import MapStore, Search
from tests.policies.predictor.naive import NaiveStore, cosine, cosines, random_scores

LAYERS, EXPERTS, TOP_K, HIDDEN = 6, 8, 2, 16
SIZES = (EXPERTS, 3, EXPERTS, EXPERTS, 5, EXPERTS)
RAGGED, SHAPE = ModelShape(SIZES, (TOP_K,) * LAYERS), ModelShape((EXPERTS,) * LAYERS, (TOP_K,) * LAYERS)


def born_of(store: MapStore) -> list[int]:
    return sorted(store.born[: store.num_maps].tolist())


@pytest.mark.parametrize(
    ("weight", "quota", "has_embeddings"),
    [(0.0, 0.3, True), (0.3, 0.1, True), (0.3, 1.0, True), (1.0, 0.3, True), (0.3, 0.3, False)],
)
def test_adding_in_blocks_equals_adding_one_at_a_time_by_the_equations(
    weight: float, quota: float, has_embeddings: bool
) -> None:
    dice = np.random.default_rng(1)
    store = MapStore(SHAPE, 30, semantic_weight=weight, quota=quota)
    naive = NaiveStore(30, weight, quota)
    next_request = 0
    for size in [1, 7, 20, 1, 40, 3, 64, 1, 1, 300, 17]:
        scores = random_scores(dice, size, LAYERS, EXPERTS)
        embedding = dice.standard_normal((size, HIDDEN), np.float32) if has_embeddings else None
        if size in (40, 300):
            requests = np.full(size, next_request)  # a prefill
        else:
            requests = next_request + dice.integers(0, 4, size)
            next_request += 3
        store.add(scores, requests, embedding)
        for row in range(size):
            naive.add(scores[row], int(requests[row]), None if embedding is None else embedding[row])
        assert born_of(store) == sorted(row[0] for row in naive.rows)
    by_age = {int(born): slot for slot, born in enumerate(store.born[: store.num_maps])}
    for born, request, scores, embedding in naive.rows:
        slot = by_age[born]
        assert store.requests[slot] == request
        assert (store.maps[:, slot] == scores).all()
        if embedding is not None:
            assert store.embeddings is not None
            assert cosine(store.embeddings[slot], embedding) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("num_before", [0, 30])
def test_rows_that_are_not_finite_are_left_out(num_before: int) -> None:
    dice = np.random.default_rng(9)
    store = MapStore(SHAPE, 30, semantic_weight=0.4)
    scores = random_scores(dice, num_before + 4, LAYERS, EXPERTS)
    embedding = dice.standard_normal((num_before + 4, HIDDEN), np.float32)
    requests = np.arange(num_before + 4)
    first, rest = slice(0, num_before), slice(num_before, None)
    store.add(scores[first], requests[first], embedding[first])
    scores[num_before, 2, 3], embedding[num_before + 2, 0] = np.nan, np.inf
    store.add(scores[rest], requests[rest], embedding[rest], Search(store, 4))
    stored = store.requests[: store.num_maps]
    assert num_before + 3 in stored
    assert not {num_before, num_before + 2} & set(stored.tolist())
    assert store.num_maps == max(num_before, 2)
    assert store.embeddings is not None
    assert np.isfinite(store.maps).all() and np.isfinite(store.embeddings).all()


# -- the maps nearest to a pass, brought forward a layer at a time ---------------------------------------------------


def ragged_scores(dice: np.random.Generator, num_rows: int) -> Floats:
    """Layers have as many experts as SIZES says; the last never runs in some rows."""
    scores = random_scores(dice, num_rows, LAYERS, EXPERTS)
    for layer, num_experts in enumerate(SIZES):
        scores[:, layer, num_experts:] = 0
    scores[1::3, -1] = 0
    return scores


def filled(dice: np.random.Generator, num_maps: int, has_embeddings: bool = True) -> MapStore:
    store = MapStore(RAGGED, 50, semantic_weight=0.5, quota=1.0)
    scores = ragged_scores(dice, num_maps)
    embedding = dice.standard_normal((num_maps, HIDDEN), np.float32) if has_embeddings else None
    store.add(scores, np.arange(num_maps), embedding)
    return store


@pytest.mark.parametrize(("num_maps", "num_rows"), [(1, 1), (37, 2), (90, 1), (90, 33)])
@pytest.mark.parametrize("layers", [range(6), [0, 1, 3, 5], [2, 3], [5]])
def test_incremental_cosines_are_those_of_the_whole(num_maps: int, num_rows: int, layers: list[int]) -> None:
    dice = np.random.default_rng(num_maps)
    store = filled(dice, num_maps)
    for _ in range(2):  # buffers are used again
        rows = ragged_scores(dice, num_rows)
        search = Search(store, num_rows)
        assert search.cosines() is None
        seen = []
        for layer in layers:
            search.observe(layer, np.ascontiguousarray(rows[:, layer, : SIZES[layer]]))
            seen.append(layer)
            result = search.cosines()
            if num_rows == 1 and not rows[:, seen].any():
                assert result is None
                continue
            assert result is not None and result.shape == (num_rows, store.num_maps)
            maps = store.maps[seen, : store.num_maps].transpose(1, 0, 2)
            np.testing.assert_allclose(result, cosines(rows[:, seen], maps), atol=1e-5)
        rows[:, [layer for layer in range(LAYERS) if layer not in seen]] = 0
        whole = search.cosines(store.squares[:, : store.num_maps].sum(axis=0))
        assert whole is not None
        maps = store.maps[:, : store.num_maps].transpose(1, 0, 2)
        np.testing.assert_allclose(whole, cosines(rows, maps), atol=1e-5)


def test_nothing_is_like_an_empty_store_or_a_row_of_zeros() -> None:
    search = Search(MapStore(RAGGED, 10), 1)
    search.observe(0, np.full((1, EXPERTS), 1 / EXPERTS, np.float32))
    assert search.cosines() is None
    assert search.semantic(np.ones((1, HIDDEN), np.float32)) is None
    search = Search(filled(np.random.default_rng(0), 5, has_embeddings=False), 1)
    assert search.semantic(np.ones((1, HIDDEN), np.float32)) is None
    search.observe(0, np.zeros((1, EXPERTS), np.float32))
    assert search.cosines() is None


@pytest.mark.parametrize("num_rows", [1, 5])
def test_of_equally_near_maps_the_newest_is_taken(num_rows: int) -> None:
    dice = np.random.default_rng(2)
    store = filled(dice, 90)  # more than it holds: rows are not in the order of their age
    same, embedding = random_scores(dice, 1, LAYERS, EXPERTS), dice.standard_normal((1, HIDDEN), np.float32)
    place = []
    equal = dice.permutation(50)[:12]
    assert store.embeddings is not None
    store.maps[:, equal] = same.transpose(1, 0, 2)
    store.squares[:, equal] = np.square(same).sum(axis=2).T
    store.embeddings[equal] = embedding / np.linalg.norm(embedding)
    newest = int(equal[store.born[equal].argmax()])
    search = Search(store, num_rows)
    semantic = search.semantic(np.repeat(embedding, num_rows, axis=0))
    assert semantic is not None
    place.append(search.nearest(semantic))
    for layer in range(LAYERS):
        search.observe(layer, np.repeat(same[:, layer], num_rows, axis=0))
        trajectory = search.cosines()
        assert trajectory is not None
        place.append(search.nearest(trajectory))
    for slots, scores in place:
        assert [*slots] == [newest] * num_rows
        assert scores == pytest.approx([1] * num_rows, abs=1e-5) and max(scores) <= 1

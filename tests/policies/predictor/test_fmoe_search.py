"""The maps nearest to a pass, brought forward a layer at a time."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.observation import Floats
from expertly.policies.fmoe import MapStore, Search
from expertly.policies.learned import ModelShape
from tests.policies.predictor.naive import cosines, random_scores

LAYERS, EXPERTS, TOP_K, HIDDEN = 6, 8, 2, 16
SIZES = (EXPERTS, 3, EXPERTS, EXPERTS, 5, EXPERTS)
SHAPE = ModelShape(SIZES, (TOP_K,) * LAYERS)


def ragged_scores(dice: np.random.Generator, num_rows: int) -> Floats:
    """Layers have as many experts as SIZES says; the last never runs in some rows."""
    scores = random_scores(dice, num_rows, LAYERS, EXPERTS)
    for layer, num_experts in enumerate(SIZES):
        scores[:, layer, num_experts:] = 0
    scores[1::3, -1] = 0
    return scores


def filled(dice: np.random.Generator, num_maps: int, has_embeddings: bool = True) -> MapStore:
    store = MapStore(SHAPE, 50, semantic_weight=0.5, quota=1.0)
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
        assert search.trajectory() is None
        seen = []
        for layer in layers:
            search.observe(layer, np.ascontiguousarray(rows[:, layer, : SIZES[layer]]))
            seen.append(layer)
            found = search.trajectory()
            if num_rows == 1 and not rows[:, seen].any():
                assert found is None
                continue
            assert found is not None and found.shape == (num_rows, store.num_maps)
            maps = store.maps[seen, : store.num_maps].transpose(1, 0, 2)
            np.testing.assert_allclose(found, cosines(rows[:, seen], maps), atol=1e-5)
        rows[:, [layer for layer in range(LAYERS) if layer not in seen]] = 0
        whole = search.of_all_layers()
        assert whole is not None
        maps = store.maps[:, : store.num_maps].transpose(1, 0, 2)
        np.testing.assert_allclose(whole, cosines(rows, maps), atol=1e-5)


def test_nothing_is_like_an_empty_store_or_a_row_of_zeros() -> None:
    search = Search(MapStore(SHAPE, 10), 1)
    search.observe(0, np.full((1, EXPERTS), 1 / EXPERTS, np.float32))
    assert search.trajectory() is None
    assert search.semantic(np.ones((1, HIDDEN), np.float32)) is None
    search = Search(filled(np.random.default_rng(0), 5, has_embeddings=False), 1)
    assert search.semantic(np.ones((1, HIDDEN), np.float32)) is None
    search.observe(0, np.zeros((1, EXPERTS), np.float32))
    assert search.trajectory() is None


@pytest.mark.parametrize("num_rows", [1, 5])
def test_of_equally_near_maps_the_newest_is_taken(num_rows: int) -> None:
    dice = np.random.default_rng(2)
    store = filled(dice, 90)  # more than it holds: rows are not in the order of their age
    same, embedding = random_scores(dice, 1, LAYERS, EXPERTS), dice.standard_normal((1, HIDDEN), np.float32)
    where = []
    slots = dice.permutation(50)[:12]
    state = {name: array.copy() for name, array in store.state().items()}
    state["maps"][:, slots] = same.transpose(1, 0, 2)
    state["embeddings"][slots] = embedding / np.linalg.norm(embedding)
    store = MapStore(SHAPE, 50)
    store.restore(state)
    newest = int(slots[state["born"][slots].argmax()])
    search = Search(store, num_rows)
    semantic = search.semantic(np.repeat(embedding, num_rows, axis=0))
    assert semantic is not None
    where.append(search.nearest(semantic))
    for layer in range(LAYERS):
        search.observe(layer, np.repeat(same[:, layer], num_rows, axis=0))
        trajectory = search.trajectory()
        assert trajectory is not None
        where.append(search.nearest(trajectory))
    for nearest in where:
        assert [*nearest.slots] == [newest] * num_rows
        assert nearest.scores == pytest.approx([1] * num_rows, abs=1e-5)
        assert max(nearest.scores) <= 1

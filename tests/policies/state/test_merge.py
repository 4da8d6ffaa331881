"""Merging keeps what differs; coverage says how much there is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import NONE, MapStore
from expertly.policies.state.coverage import coverage_bounds, mean_similarities
from expertly.policies.state.merge import merged
from tests.policies.state.builders import SHAPE, add_random, assert_same, make_store

ONE_LAYER = ModelShape((4,), (1,))


def one_hot_store(experts: list[int], capacity: int = 10, requests: list[int] | None = None) -> MapStore:
    """Each map is sure of one expert."""
    store = MapStore(ONE_LAYER, capacity, quota=1.0)
    scores = np.eye(4, dtype=np.float32)[experts][:, None]
    numbers = np.array(requests or [0] * len(experts), np.int64)
    store.add(scores, np.array(experts, np.uint16)[:, None, None], numbers)
    return store


def experts_of(store: MapStore) -> list[int]:
    return sorted(store.chosen[: store.num_maps, 0, 0].tolist())


def test_where_there_is_room_all_maps_are_kept() -> None:
    stores = [make_store(6, 20, seed=1), make_store(9, 12, seed=2), make_store(4, 20, seed=3, hidden_size=None)]
    out = merged(stores, 40)
    assert (out.num_maps, out.capacity, out.semantic_weight, out.quota) == (19, 40, 0.25, 0.5)
    first = 0
    for store in stores:
        part = slice(first, first + store.num_maps)
        np.testing.assert_array_equal(out.maps[:, part], store.state()["maps"])
        np.testing.assert_array_equal(out.chosen[part], store.state()["chosen"])
        first += store.num_maps
    assert out.embeddings is not None
    np.testing.assert_allclose(out.embeddings[:6], stores[0].state()["embeddings"], atol=1e-3)
    assert not out.embeddings[15:19].any()


def test_requests_of_two_stores_are_not_the_same() -> None:
    out = merged([make_store(8), make_store(8, seed=1)], 20)
    assert sorted(set(out.requests[:16].tolist())) == [-4, -3, -2, -1]
    assert sorted(out.num_of_request.values()) == [4, 4, 4, 4]


def test_what_is_redundant_goes() -> None:
    out = merged([one_hot_store([0, 1]), one_hot_store([0, 2, 1, 3])], 4)
    assert experts_of(out) == [0, 1, 2, 3]


def test_a_smaller_store_keeps_what_differs() -> None:
    assert experts_of(merged([one_hot_store([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])], 4)) == [0, 1, 2, 3]
    assert experts_of(merged([one_hot_store([3, 3, 1])], 1)) == [1], "the newest stays"


def test_one_store_of_the_same_capacity_stays_as_it_is() -> None:
    store = make_store(7, hidden_size=None)
    assert_same(merged([store], store.capacity), store)


def test_one_request_keeps_to_its_quota() -> None:
    store = make_store(20, 20)
    add_random(store, 5, seed=9, first_request=50, each=5)
    assert max(merged([store], 4).num_of_request.values()) == 2


def test_stores_of_two_models_do_not_merge() -> None:
    with pytest.raises(ConfigError, match="not of one model"):
        merged([make_store(3), MapStore(ONE_LAYER, 4)], 5)
    with pytest.raises(ConfigError, match="embeddings of 5 and 7 numbers"):
        merged([make_store(3), make_store(3, hidden_size=7)], 5)


def test_coverage_bounds_are_those_of_the_paper() -> None:
    low, high = coverage_bounds(ModelShape((8,) * 32, (2,) * 32))  # Mixtral
    assert (low.num_maps, low.similarity, high.similarity) == (512, 0.75, 0.98)
    assert high.num_maps == math.ceil(128 * math.log(256))
    assert coverage_bounds(SHAPE)[0].num_maps == 2 * (8 + 6 + 8)


def test_mean_similarity_is_over_pairs() -> None:
    assert mean_similarities(one_hot_store([2, 2, 2])) == (pytest.approx(1), None)
    assert mean_similarities(one_hot_store([0, 1, 2]))[0] == pytest.approx(0)
    assert mean_similarities(one_hot_store([0, 0, 1]))[0] == pytest.approx(1 / 3)
    assert mean_similarities(one_hot_store([0])) == (None, None)
    store = make_store(12)
    state = store.state()
    maps = state["maps"].transpose(1, 0, 2).reshape(12, -1)
    for found, rows in zip(mean_similarities(store), (maps, state["embeddings"]), strict=True):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert found == pytest.approx((unit @ unit.T)[np.triu_indices(12, 1)].mean(), abs=1e-5)


def test_mean_similarity_of_a_sample_is_repeatable() -> None:
    store = make_store(300, 300)
    few = mean_similarities(store, 50, seed=1)
    assert few == mean_similarities(store, 50, seed=1) != mean_similarities(store, 50, seed=2)
    whole = mean_similarities(store, 300)
    assert few[0] == pytest.approx(whole[0], abs=0.05)


def test_maps_of_layers_that_never_ran_have_no_similarity() -> None:
    store = MapStore(ONE_LAYER, 4)
    store.add(np.zeros((3, 1, 4), np.float32), np.full((3, 1, 1), NONE, np.uint16), np.arange(3))
    assert mean_similarities(store) == (None, None)

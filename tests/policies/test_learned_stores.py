"""Stores of one model made one: merged and cut, or with what replicas learned added once, checked and told apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from expertly.core.errors import ConfigError, StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import NONE, MapStore, coverage_bounds, mean_similarities
from tests.policies.learned_builders import SHAPE, add_random, assert_same, make_matrices, make_store

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
    out = MapStore.merged(stores, 40)
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
    out = MapStore.merged([make_store(8), make_store(8, seed=1)], 20)
    assert sorted(set(out.requests[:16].tolist())) == [-4, -3, -2, -1]
    assert sorted(out.num_of_request.values()) == [4, 4, 4, 4]


def test_what_is_redundant_goes() -> None:
    out = MapStore.merged([one_hot_store([0, 1]), one_hot_store([0, 2, 1, 3])], 4)
    assert experts_of(out) == [0, 1, 2, 3]


def test_a_smaller_store_keeps_what_differs() -> None:
    assert experts_of(MapStore.merged([one_hot_store([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])], 4)) == [0, 1, 2, 3]
    assert experts_of(MapStore.merged([one_hot_store([3, 3, 1])], 1)) == [1], "the newest stays"


def test_one_store_of_the_same_capacity_stays_as_it_is() -> None:
    store = make_store(7, hidden_size=None)
    assert_same(MapStore.merged([store], store.capacity), store)


def test_one_request_keeps_to_its_quota() -> None:
    store = make_store(20, 20)
    add_random(store, 5, seed=9, first_request=50, each=5)
    assert max(MapStore.merged([store], 4).num_of_request.values()) == 2


def test_stores_of_two_models_do_not_merge() -> None:
    with pytest.raises(ConfigError, match="not of one model"):
        MapStore.merged([make_store(3), MapStore(ONE_LAYER, 4)], 5)
    with pytest.raises(ConfigError, match="embeddings of 5 and 7 numbers"):
        MapStore.merged([make_store(3), make_store(3, hidden_size=7)], 5)


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


def test_merged_matrices_are_all_of_them_the_older_ones_first() -> None:
    one, other = make_matrices(2, 3), make_matrices(1, 4, seed=1)
    both = Matrices.merged([one, other], 20)
    np.testing.assert_array_equal(both.decode.matrices[:7], [*one.decode.matrices[:3], *other.decode.matrices[:4]])
    assert (both.prefill.num_matrices, both.capacity) == (3, 20)
    assert Matrices.merged([one, other], 2).num_needed == 2


def test_what_is_new_is_added_and_what_is_known_is_not() -> None:
    mine, theirs = make_store(6, seed=1), make_store(8, seed=2)
    other = mine.of_another(theirs.state())
    assert mine.absorb(other, mine.digests(), 256) == 8
    assert mine.num_maps == 14
    assert theirs.digests() < mine.digests()
    assert mine.absorb(other, mine.digests(), 256) == 0
    assert mine.num_maps == 14


def test_digests_survive_being_stored_again() -> None:
    """Else what one has told comes back as new, without end."""
    theirs = make_store(8, seed=2)
    mine = make_store(0)
    mine.absorb(mine.of_another(theirs.state()), set(), 256)
    assert mine.digests() == theirs.digests()


def test_requests_of_others_are_nobodys_here() -> None:
    mine, theirs = make_store(6, seed=1), make_store(8, seed=2)
    before = set(mine.requests[:6].tolist())
    mine.absorb(mine.of_another(theirs.state()), set(), 256)
    new = mine.requests[6:14].tolist()
    assert not before & set(new) and max(new) < 0
    old = theirs.requests[:8]
    np.testing.assert_array_equal(np.equal.outer(new, new), np.equal.outer(old, old), "grouped as they were")


def test_into_a_full_store_only_the_newest_go() -> None:
    mine, theirs = make_store(20, capacity=20, seed=1), make_store(12, seed=2)
    assert mine.absorb(mine.of_another(theirs.state()), set(), 3) == 3
    assert mine.num_maps == 20
    newest = np.argsort(theirs.born[:12])[-3:]
    assert mine.born.max() >= 22
    for slot in newest:
        assert any(np.array_equal(mine.maps[:, one], theirs.maps[:, slot]) for one in range(20))


def test_a_store_with_room_takes_all_that_fits() -> None:
    mine, theirs = make_store(0, capacity=20), make_store(12, seed=2)
    assert mine.absorb(mine.of_another(theirs.state()), set(), 3) == 12


def test_matrices_are_shared_by_phase() -> None:
    mine, theirs = make_matrices(3, 3, seed=1), make_matrices(3, 3, seed=2)
    other = mine.of_another(theirs.state())
    assert mine.absorb(other, mine.digests(), 256) == 6
    assert (mine.prefill.num_matrices, mine.decode.num_matrices) == (6, 6)
    np.testing.assert_array_equal(mine.decode.matrices[3:6], theirs.decode.matrices[:3])
    assert mine.absorb(other, mine.digests(), 256) == 0


@pytest.mark.parametrize("kind", ["other shape", "other width", "missing", "other kind", "not a number"])
def test_what_is_of_another_model_is_refused(kind: str) -> None:
    mine = make_store(4)
    state = dict(make_store(4, seed=1).state())
    if kind == "other shape":
        state = dict(MapStore(ModelShape((4,), (1,))).state())
    elif kind == "other width":
        state = dict(make_store(4, hidden_size=7).state())
    elif kind == "not a number":
        state["maps"] = np.full_like(state["maps"], np.nan)
    elif kind == "missing":
        del state["chosen"]
    else:
        state = make_matrices().state()
    with pytest.raises(StoreError):
        mine.of_another(state)

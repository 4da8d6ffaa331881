"""Stores of one model made one: merged and cut, or with what replicas learned added once, checked and told apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from expertly.core.errors import ConfigError, StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import NONE, MapStore, coverage_bounds, mean_similarities
from tests.policies.learned_builders import SHAPE, make_matrices, make_store

ONE_LAYER = ModelShape((4,), (1,))


def test_where_there_is_room_all_maps_are_kept_and_requests_stay_apart() -> None:
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
    assert sorted(set(out.requests[:19].tolist())) == [-6, -5, -4, -3, -2, -1], "four maps each"
    assert sum(out.num_of_request.values()) == 19


@pytest.mark.parametrize(
    ("stores", "capacity", "kept"),
    [
        ([[0, 1], [0, 2, 1, 3]], 4, [0, 1, 2, 3]),
        ([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3]], 4, [0, 1, 2, 3]),
        ([[3, 3, 1]], 1, [1]),  # the newest stays
    ],
)
def test_the_most_redundant_map_is_replaced(stores: list[list[int]], capacity: int, kept: list[int]) -> None:
    """Each map is sure of one expert."""
    made = []
    for experts in stores:
        made.append(MapStore(ONE_LAYER, 10, quota=1.0))
        scores, chosen = np.eye(4, dtype=np.float32)[experts][:, None], np.array(experts, np.uint16)[:, None, None]
        made[-1].add(scores, chosen, np.zeros(len(experts), np.int64))
    out = MapStore.merged(made, capacity)
    assert sorted(out.chosen[: out.num_maps, 0, 0].tolist()) == kept


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
    """Rows of the identity are alike or have nothing in common; a layer that never ran has no similarity."""
    for experts, expected in (([2, 2, 2], 1), ([0, 1, 2], 0), ([0, 0, 1], 1 / 3), ([0], None), ([None] * 3, None)):
        store = MapStore(ONE_LAYER, 4, quota=1.0)
        scores = np.array([np.zeros(4) if one is None else np.eye(4)[one] for one in experts], np.float32)
        store.add(scores[:, None], np.full((len(experts), 1, 1), NONE), np.arange(len(experts)))
        found = mean_similarities(store)
        assert found == (expected if expected is None else pytest.approx(expected), None)
    store = make_store(12)
    state = store.state()
    maps = state["maps"].transpose(1, 0, 2).reshape(12, -1)
    for found, rows in zip(mean_similarities(store), (maps, state["embeddings"]), strict=True):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert found == pytest.approx((unit @ unit.T)[np.triu_indices(12, 1)].mean(), abs=1e-5)


def test_merged_matrices_are_all_of_them_the_older_ones_first() -> None:
    one, other = make_matrices(2, 3), make_matrices(1, 4, seed=1)
    both = Matrices.merged([one, other], 20)
    np.testing.assert_array_equal(both.decode.matrices[:7], [*one.decode.matrices[:3], *other.decode.matrices[:4]])
    assert (both.prefill.num_matrices, both.capacity) == (3, 20)
    assert Matrices.merged([one, other], 2).num_needed == 2


def test_new_items_are_added_and_known_ones_are_not() -> None:
    """Digests survive being stored again, else what one has told would come back as new, without end."""
    mine, theirs = make_store(6, seed=1), make_store(8, seed=2)
    other, before = mine.of_another(theirs.state()), set(mine.requests[:6].tolist())
    assert mine.absorb(other, mine.digests(), 256) == 8
    assert mine.num_maps == 14 and theirs.digests() < mine.digests()
    new, old = mine.requests[6:14].tolist(), theirs.requests[:8]
    assert not before & set(new) and max(new) < 0, "requests of others are nobody's here"
    np.testing.assert_array_equal(np.equal.outer(new, new), np.equal.outer(old, old), "grouped as they were")
    assert mine.absorb(other, mine.digests(), 256) == 0
    assert mine.num_maps == 14


@pytest.mark.parametrize(("num_before", "num_taken"), [(20, 3), (0, 12)])
def test_only_the_newest_go_into_a_full_store_and_all_that_fits_into_another(num_before: int, num_taken: int) -> None:
    mine, theirs = make_store(num_before, capacity=20, seed=1), make_store(12, seed=2)
    assert mine.absorb(mine.of_another(theirs.state()), set(), 3) == num_taken
    assert mine.num_maps == max(20 * (num_before > 0), num_taken)
    for slot in np.argsort(theirs.born[:12])[-3:]:
        assert any(np.array_equal(mine.maps[:, one], theirs.maps[:, slot]) for one in range(20))


def test_matrices_are_exchanged_by_phase() -> None:
    mine, theirs = make_matrices(3, 3, seed=1), make_matrices(3, 3, seed=2)
    other = mine.of_another(theirs.state())
    assert mine.absorb(other, mine.digests(), 256) == 6
    assert (mine.prefill.num_matrices, mine.decode.num_matrices) == (6, 6)
    np.testing.assert_array_equal(mine.decode.matrices[3:6], theirs.decode.matrices[:3])
    assert mine.absorb(other, mine.digests(), 256) == 0


@pytest.mark.parametrize("kind", ["other shape", "other width", "missing", "other kind", "not a number", "too many"])
def test_states_of_another_model_are_refused(kind: str) -> None:
    states = {
        "other shape": MapStore(ONE_LAYER).state(),
        "other width": make_store(4, hidden_size=7).state(),
        "missing": {name: array for name, array in make_store(4).state().items() if name != "chosen"},
        "other kind": make_matrices().state(),
        "not a number": make_store(4).state() | {"maps": np.full((3, 4, 8), np.nan)},
        "too many": make_store(4).state() | {"requests": np.zeros(5, np.int64)},
    }
    with pytest.raises(StoreError):
        make_store(4).of_another(states[kind])

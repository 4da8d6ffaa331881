"""The store of expert maps: what goes into it, and what goes."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore
from tests.policies.predictor.naive import NaiveStore, cosine, cosines, random_scores, top

LAYERS, EXPERTS, TOP_K, HIDDEN = 5, 8, 2, 16
SHAPE = ModelShape((EXPERTS,) * LAYERS, (TOP_K,) * LAYERS)


def born_of(store: MapStore) -> list[int]:
    return sorted(store.born[: store.num_maps].tolist())


def test_ids_outside_the_layer_are_no_choices() -> None:
    store = MapStore(ModelShape((8, 4), (2, 2)), 4)
    chosen = np.array([[[7, 99], [4, 3]], [[-1, 0], [65535, 1]]], np.int32)
    store.add(random_scores(np.random.default_rng(0), 2, 2, 8), chosen, np.array([1, 2]))
    assert store.chosen[:2].tolist() == [[[7, 65535], [65535, 3]], [[65535, 0], [65535, 1]]]


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
        store.add(scores, top(scores, TOP_K), requests, embedding)
        for row in range(size):
            naive.add(scores[row], int(requests[row]), None if embedding is None else embedding[row])
        assert born_of(store) == sorted(row[0] for row in naive.rows)
    by_age = {int(born): slot for slot, born in enumerate(store.born[: store.num_maps])}
    for born, request, scores, embedding in naive.rows:
        slot = by_age[born]
        assert store.requests[slot] == request
        assert (store.maps[:, slot] == scores).all()
        assert (store.chosen[slot] == top(scores, TOP_K)).all()
        if embedding is not None:
            assert store.embeddings is not None
            assert cosine(store.embeddings[slot], embedding) == pytest.approx(1, abs=1e-6)


def test_known_cosines_change_nothing_but_the_work() -> None:
    dice = np.random.default_rng(2)
    plain = MapStore(SHAPE, 30, semantic_weight=0.4)
    told = MapStore(SHAPE, 30, semantic_weight=0.4)
    for number, size in enumerate([25, 1, 9, 1, 600, 1, 12, 300]):  # the long ones take more than one block
        scores = random_scores(dice, size, LAYERS, EXPERTS)
        embedding = dice.standard_normal((size, HIDDEN), np.float32)
        requests = np.full(size, number) if size > 100 else number + dice.integers(0, 9, size)
        n = told.num_maps
        trajectory = cosines(scores, told.maps[:, :n].transpose(1, 0, 2)).astype(np.float32)
        semantic = None
        if told.embeddings is not None:
            semantic = cosines(embedding, told.embeddings[:n]).astype(np.float32)
        plain.add(scores, top(scores, TOP_K), requests, embedding)
        told.add(scores, top(scores, TOP_K), requests, embedding, semantic, trajectory)
        for name, array in plain.state().items():
            assert (told.state()[name] == array).all(), name


def filled(num_maps: int = 20, capacity: int = 30) -> MapStore:
    dice = np.random.default_rng(6)
    store = MapStore(SHAPE, capacity, semantic_weight=0.4, quota=0.5)
    scores = random_scores(dice, num_maps, LAYERS, EXPERTS)
    store.add(scores, top(scores, TOP_K), np.arange(num_maps), dice.standard_normal((num_maps, HIDDEN), np.float32))
    return store


def test_rows_of_another_model_are_refused() -> None:
    store = filled()
    scores = random_scores(np.random.default_rng(0), 2, LAYERS, EXPERTS + 1)
    with pytest.raises(ConfigError, match="scores has shape"):
        store.add(scores, top(scores, TOP_K), np.arange(2))
    scores = scores[..., :EXPERTS]
    with pytest.raises(ConfigError, match="chosen has shape"):
        store.add(scores, top(scores, TOP_K + 1), np.arange(2))
    with pytest.raises(ConfigError, match="embedding has shape"):
        store.add(scores, top(scores, TOP_K), np.arange(2), np.zeros((2, HIDDEN + 1), np.float32))


@pytest.mark.parametrize("num_before", [0, 30])
def test_rows_that_are_not_finite_are_left_out(num_before: int) -> None:
    dice = np.random.default_rng(9)
    store = MapStore(SHAPE, 30, semantic_weight=0.4)
    scores = random_scores(dice, num_before + 4, LAYERS, EXPERTS)
    embedding = dice.standard_normal((num_before + 4, HIDDEN), np.float32)
    chosen, requests = top(scores, TOP_K), np.arange(num_before + 4)
    first, rest = slice(0, num_before), slice(num_before, None)
    store.add(scores[first], chosen[first], requests[first], embedding[first])
    scores[num_before, 2, 3], embedding[num_before + 2, 0] = np.nan, np.inf
    known = np.zeros((4, num_before), np.float32)
    store.add(scores[rest], chosen[rest], requests[rest], embedding[rest], known, known)
    stored = store.requests[: store.num_maps]
    assert num_before + 3 in stored
    assert not {num_before, num_before + 2} & set(stored.tolist())
    assert store.num_maps == max(num_before, 2)
    assert all(np.isfinite(array).all() for array in store.state().values())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"capacity": 10**11}, "capacity=100000000000: must be from 1 to 1048576"),
        ({"quota": 0.0}, "quota"),
        ({"semantic_weight": 2}, "weight"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MapStore(SHAPE, **settings)  # type: ignore[arg-type]

"""The fMoE predictor: which layers it answers for, from which maps, which experts, and what it learns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Floats, History, Routed
from expertly.policies import fmoe as fmoe_module
from expertly.policies.fmoe import FMoE, FMoEOptions, by_falling, select
from tests.policies.predictor.naive import cosine, random_scores
from tests.scheduler.drive import geometry

LAYERS, EXPERTS, TOP_K, HIDDEN = 6, 8, 2, 16
SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


class Rows:
    """Random rows: scores [T, L, E], embedding [T, H]."""

    def __init__(self, seed: int, num_rows: int, requests: list[int] | None = None) -> None:
        dice = np.random.default_rng(seed)
        self.scores = random_scores(dice, num_rows, LAYERS, EXPERTS)
        self.embedding: Floats = dice.standard_normal((num_rows, HIDDEN), np.float32)
        self.requests = np.array(range(1000 * seed, 1000 * seed + num_rows) if requests is None else requests)

    def history(self) -> History:
        nothing = np.zeros((len(self.requests), LAYERS, TOP_K), np.int16)
        return History(self.requests, np.zeros(len(self.requests), np.bool_), nothing, self.scores, self.embedding)


def run(
    predictor: FMoE,
    rows: Rows,
    ok: bool = True,
    layers: Sequence[int] | None = None,
    end: bool = True,
    is_prompt: bool = False,
) -> list[Prediction]:
    """One pass of these rows, of which `layers` are seen; all predictions."""
    num_rows = len(rows.requests)
    began = Began(rows.requests, np.full(num_rows, is_prompt), rows.embedding)
    result = list(predictor.begin_iteration(began))
    for layer in range(LAYERS) if layers is None else layers:
        router = RouterRan(layer, [0], [1], [True], num_rows)
        result += predictor.router_ran(Routed(router, None, rows.scores[:, layer]))
    if end:
        predictor.end_iteration(ok)
    return result


def learned(distance: int = 2, num_maps: int = 40, shape: Geometry = SHAPE, **options: object) -> FMoE:
    predictor = FMoE(shape, distance, FMoEOptions(**options))  # type: ignore[arg-type]
    predictor.learn(Rows(1, num_maps).history())
    return predictor


@pytest.mark.parametrize("mode", ["delta", "top-k"])
def test_predictions_of_a_row_are_read_off_the_most_similar_map(mode: str) -> None:
    """By the embedding for the first two layers; then, after layer l, over layers 0..l for all from l + 2 on."""
    predictor = learned(2, select=mode)
    store = predictor.store
    maps, rows = store.maps.copy(), Rows(4, 1)
    assert store.embeddings is not None
    newest: dict[int, Prediction] = {}
    made = iter(run(predictor, rows))
    for layer in range(-1, LAYERS - 2):
        seen = layer + 1
        if layer < 0:
            similar = [cosine(rows.embedding[0], row) for row in store.embeddings[:40]]
        else:
            similar = [cosine(rows.scores[0, :seen], maps[:seen, slot]) for slot in range(40)]
        slot = int(np.argmax(similar))
        for ahead in range(2) if layer < 0 else range(layer + 2, LAYERS):
            wanted = selected_alone(maps[ahead, slot], similar[slot], TOP_K, mode)
            is_farther = layer >= 0 and ahead > layer + 2
            before = newest.get(ahead)
            if (
                is_farther
                and before
                and (before.experts, before.probabilities) == (wanted[0], maps[ahead, slot].tolist())
            ):
                continue  # it still holds
            each = newest[ahead] = next(made)
            assert (each.layer, each.distance) == (ahead, ahead - layer)
            assert each.probabilities == maps[ahead, slot].tolist()
            assert (each.experts, each.scores) == wanted
    assert next(made, None) is None


def layers_of(predictions: list[Prediction]) -> list[int]:
    return [prediction.layer for prediction in predictions]


@pytest.mark.parametrize(("reach", "is_prompt"), [("one", False), ("all", True)])
def test_one_layer_of_a_match_where_that_is_asked_for_and_in_prompts(reach: str, is_prompt: bool) -> None:
    result = run(learned(2, reach=reach), Rows(4, 3), is_prompt=is_prompt)
    assert [(each.layer, each.distance) for each in result] == [(0, 1), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2)]


def test_rows_of_a_batch_are_matched_each_and_united_by_the_highest_probability() -> None:
    rows = Rows(5, 4)
    alone = []
    for row in range(4):
        one_row = Rows(5, 4)
        for name in ("scores", "embedding", "requests"):
            setattr(one_row, name, getattr(rows, name)[row : row + 1])
        alone.append(run(learned(reach="one"), one_row))
    for number, each in enumerate(run(learned(reach="one"), rows)):
        parts = [result[number] for result in alone]
        assert {part.layer for part in parts} == {each.layer}
        highest: dict[int, float] = {}
        for part in parts:
            for expert, score in zip(part.experts, part.scores, strict=True):
                highest[expert] = max(score, highest.get(expert, 0.0))
        order = sorted(highest, key=lambda expert: (-highest[expert], expert))
        assert each.experts == order
        assert each.scores == [highest[expert] for expert in order]
        assert each.probabilities == np.max([part.probabilities for part in parts], axis=0).tolist()


def test_without_embeddings_the_first_layers_go_without() -> None:
    predictor = learned(2, semantic=False, reach="one")
    assert predictor.wants == {"scores"} and predictor.store.embeddings is None
    assert layers_of(run(predictor, Rows(6, 1))) == [2, 3, 4, 5]
    predictor, rows = learned(2, reach="one"), Rows(6, 1)
    rows.embedding = None  # type: ignore[assignment]
    assert predictor.wants == {"scores", "embedding"}
    assert layers_of(run(predictor, rows)) == [2, 3, 4, 5]
    assert predictor.store.num_maps == 41


def state_of(predictor: FMoE) -> list[object]:
    store = predictor.store
    arrays = store.born, store.requests, store.maps, store.squares, store.embeddings
    return [None if array is None else array.tolist() for array in arrays]


@pytest.mark.parametrize("semantic", [True, False])
def test_learning_a_history_equals_having_run_it(semantic: bool) -> None:
    options = FMoEOptions(capacity=25, semantic=semantic)
    online, offline = FMoE(SHAPE, 2, options), FMoE(SHAPE, 2, options)
    for seed, size in enumerate([1, 6, 40, 1, 1, 3, 1, 20]):
        rows = Rows(seed + 10, size, [seed] * size if size == 40 else None)
        run(online, rows)
        offline.learn(rows.history())
    assert online.store.num_maps == 25
    assert state_of(online) == state_of(offline)


def test_a_pass_that_failed_or_lost_a_layer_is_not_learned() -> None:
    predictor = FMoE(SHAPE, 2)
    run(predictor, Rows(1, 1))
    run(predictor, Rows(2, 1), ok=False)
    run(predictor, Rows(3, 2), layers=[0, 1, 2, 4, 5])
    run(predictor, Rows(4, 1), layers=[])
    assert predictor.store.requests[: predictor.store.num_maps].tolist() == [1000]
    run(predictor, Rows(5, 1), end=False)  # its end was left out
    run(predictor, Rows(6, 1))
    assert predictor.store.requests[: predictor.store.num_maps].tolist() == [1000, 6000]


def stored(predictor: FMoE) -> list[tuple[int, list[int]]]:
    """Of each map the request, and the layers of which it has something."""
    store = predictor.store
    return [
        (int(store.requests[slot]), np.flatnonzero(store.maps[:, slot].any(axis=1)).tolist())
        for slot in range(store.num_maps)
    ]


def test_a_map_is_whole_when_all_layers_were_seen() -> None:
    predictor = FMoE(SHAPE, 2)
    run(predictor, Rows(1, 1))
    run(predictor, Rows(2, 1), layers=[0, 1, 3, 4, 5])
    run(predictor, Rows(3, 1), layers=[2, 3, 4, 5])
    assert stored(predictor) == [(1000, [*range(LAYERS)])]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_that_are_not_finite_predict_and_teach_nothing(num_rows: int) -> None:
    predictor = learned(2, num_maps=5, reach="one")
    rows = Rows(8, num_rows)
    rows.scores[0, 2, 0] = rows.embedding[0, 3] = np.nan
    assert layers_of(run(predictor, rows)) == [2, 3]
    assert predictor.store.num_maps == 5 + num_rows - 1


def test_a_long_prefill_is_matched_by_some_of_its_rows_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmoe_module, "MAX_SCORES", 400)
    predictor = FMoE(SHAPE, 2, FMoEOptions(capacity=40, reach="one"))
    predictor.store.max_of_request = 40
    predictor.learn(Rows(1, 20).history())
    prefill = Rows(2, 31, [77] * 31)
    found = run(predictor, prefill)
    assert layers_of(found) == list(range(LAYERS))
    store = predictor.store
    assert store.num_maps == 30
    assert (store.maps[:, 20] == prefill.scores[0]).all()
    assert (store.maps[:, 29] == prefill.scores[30]).all()
    assert (store.requests == 77).sum() == 10
    assert predictor.facts()["trajectory_searches"] == 10 * (LAYERS - 2)


def brute(probabilities: np.ndarray, score: float, top_k: int) -> int:
    """The size of the smallest set that meets equations 6 to 8 among experts with p > 0; all of those if none does."""
    positive = [float(p) for p in probabilities if p > 0]
    threshold = max(0.0, min(1 - score, 1.0))
    for size in range(min(top_k, len(positive)), len(positive) + 1):
        if any(sum(sorted(some, reverse=True)) >= threshold for some in combinations(positive, size)):
            return size
    return len(positive)


def selected_alone(p: np.ndarray, score: float, top_k: int, mode: Any = "delta") -> tuple[list[int], list[float]]:
    return by_falling(np.where(select(p, np.array(score), top_k, mode), p, 0)[None])[0]


def test_it_is_the_smallest_set_that_reaches_the_threshold() -> None:
    dice = np.random.default_rng(0)
    for _ in range(400):
        p = dice.dirichlet(np.full(7, 0.5)).astype(np.float16).astype(np.float32)
        p[dice.random(7) < 0.2] = 0
        score, top_k = float(dice.uniform(-1, 1)), int(dice.integers(1, 8))
        experts, likely = selected_alone(p, score, top_k)
        assert len(experts) == brute(p, score, top_k)
        assert likely == [float(p[expert]) for expert in experts]
        order = sorted(range(7), key=lambda expert: (-p[expert], expert))
        assert experts == order[: len(experts)]  # by falling p: no other set of this size has more
        assert selected_alone(p, score, top_k, "top-k")[0] == [expert for expert in order[:top_k] if p[expert] > 0]

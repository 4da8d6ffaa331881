"""MoE-Infinity: collections of activation matrices, the matrices nearest to a pass, and what is read off them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from expertly.core.geometry import ModelShape
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, History, Routed
from expertly.policies.moe_infinity import EAM, Collection, EAMOptions, Match
from tests.policies.predictor.naive import EXPERTS, LAYERS, TOP_K, NaiveCollection, choices, cosine, matrix_of
from tests.scheduler.drive import geometry

SHAPE = geometry(layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
MODEL = ModelShape.of(SHAPE)


def matrices_of(collection: Collection) -> np.ndarray:
    """[n, L, E]"""
    return collection.columns.transpose(2, 0, 1)[: collection.num_matrices]


def end_all(eam: EAM) -> None:
    """All requests are over: none of them is in what is learned next."""
    rows = np.zeros((0, LAYERS, EXPERTS), np.float32)
    eam.learn(History(np.zeros(0, np.int64), np.zeros(0, np.bool_), rows.astype(np.int64), rows))


# -- collections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [range(5), [0, 1, 3, 4], [2, 3], [4]])
@pytest.mark.parametrize(("capacity", "num_tokens"), [(1, 2), (6, 1), (6, 40), (60, 2)])
def test_in_lock_step_with_the_formulas(capacity: int, num_tokens: int, layers: list[int]) -> None:
    """Requests come, replace each other and are matched, m at a time, layer by layer, with what they ran before and
    without; some layers are left out.
    """
    dice = np.random.default_rng(capacity)
    collection, naive = Collection(MODEL, capacity), NaiveCollection(capacity)
    recent = []
    for number in range(24):
        matrix = matrix_of(choices(dice, int(dice.integers(1, 4))))
        if number % 7 == 3:
            matrix = recent[-2]  # the same again
        recent.append(matrix)
        collection.add(matrix)
        naive.add(matrix)
        assert collection.num_matrices == len(naive.matrices)
        by_age = np.argsort(collection.born[: collection.num_matrices])
        np.testing.assert_array_equal(matrices_of(collection)[by_age], naive.matrices)
        np.testing.assert_array_equal(collection.total, np.sum(naive.matrices, axis=0))
        if number % 5 != 3:
            continue
        running = matrix_of(choices(dice, num_tokens))
        earlier = [np.zeros_like(running), matrix_of(choices(dice, 5))]
        for num, before in product((1, 3, 100), earlier):
            match, seen = Match(collection, before), sorted({*np.flatnonzero(before.any(axis=1)).tolist()})
            total = before.copy()
            assert (match.nearest(num) is None) == (not naive.nearest(total, seen, num)), "nothing has been seen"
            for layer in layers:
                match.observe(layer, running[layer])
                total[layer] += running[layer]
                seen = sorted({*seen, layer})
                actual = match.nearest(num)
                wanted = naive.nearest(total, seen, num)
                if not wanted:
                    assert actual is None
                    continue
                assert actual is not None
                slots, nearest = actual
                assert list(slots) == sorted(int(by_age[at]) for at in wanted)
                best = max(cosine(total[seen], matrix[seen]) for matrix in naive.matrices)
                assert nearest == pytest.approx(best, abs=1e-6) and nearest <= 1


# -- the predictor ---------------------------------------------------------------------------------------------------


def routed(layer: int, experts: np.ndarray) -> Routed:
    return Routed(RouterRan(layer, [0], [1], [True], len(experts)), experts)


def one_pass(
    eam: EAM,
    requests: list[int],
    chosen: np.ndarray,
    *,
    is_prefill: bool = False,
    ok: bool | None = True,
    skip: tuple[int, ...] = (),
) -> list[list[Prediction]]:
    """A pass over rows [T, L, K]; what was predicted when it began, then after each layer. `ok` None: no end."""
    began = Began(np.array(requests, np.int64), np.full(len(requests), is_prefill))
    made = [list(eam.begin_iteration(began))]
    for layer in range(LAYERS):
        if layer not in skip:
            made.append(list(eam.router_ran(routed(layer, chosen[:, layer]))))
    if ok is not None:
        eam.end_iteration(ok)
    return made


@pytest.mark.parametrize(
    "harm", [{"ok": False}, {"ok": None}, {"skip": (2,)}, {"skip": (0, 1)}, {"skip": (4,)}], ids=str
)
def test_an_iteration_that_failed_or_was_not_seen_whole_is_left_out(harm: dict) -> None:
    dice, eam = np.random.default_rng(2), EAM(SHAPE)
    kept = [choices(dice, 1) for _ in range(3)]
    one_pass(eam, [5], kept[0])
    one_pass(eam, [5], choices(dice, 1), **harm)
    for chosen in kept[1:]:
        one_pass(eam, [5], chosen)
    end_all(eam)
    np.testing.assert_array_equal(matrices_of(eam.decoding)[0], sum(matrix_of(chosen) for chosen in kept))


def test_every_request_of_a_batch_is_counted_and_matched_on_its_own() -> None:
    """What two requests would find alone, they find together; the union is by the highest p."""
    dice = np.random.default_rng(3)
    past = [choices(dice, 3) for _ in range(20)]
    now = choices(dice, 2)

    def filled() -> EAM:
        eam = EAM(SHAPE, 2, EAMOptions(width=3))
        for number, chosen in enumerate(past):
            one_pass(eam, [100 + number] * 3, chosen)
        end_all(eam)
        return eam

    alone = [one_pass(filled(), [7 + row], now[row : row + 1]) for row in range(2)]
    eam = filled()
    together = one_pass(eam, [7, 8], now)
    for step, predictions in enumerate(together):
        assert [prediction.layer for prediction in predictions] == [each.layer for each in alone[0][step]]
        for at, both in enumerate(predictions):
            first, second = alone[0][step][at], alone[1][step][at]
            assert both.probabilities == np.maximum(first.probabilities, second.probabilities).tolist()
            assert set(both.experts) == {*first.experts, *second.experts}
    end_all(eam)
    newest = np.argsort(eam.decoding.born[:22])[-2:]
    np.testing.assert_array_equal(matrices_of(eam.decoding)[newest], [matrix_of(now[:1]), matrix_of(now[1:])])


@pytest.mark.parametrize(("distance", "matches"), [(1, 3), (3, 1), (3, 3), (99, 3)])
@pytest.mark.parametrize("matrix", ["request", "pass"])
def test_predictions_are_the_papers(distance: int, matches: int, matrix: Any) -> None:
    """Section 4.5, of a request's first and second iteration: the m matrices nearest by the cosine to all that the
    request has run (`pass`: to what its iteration has), summed, rows scaled to sum 1, times 1 - (i - l) / L.
    """
    dice, naive = np.random.default_rng(4), NaiveCollection(120)
    eam = EAM(SHAPE, distance, EAMOptions(matrix=matrix, matches=matches, width=TOP_K))
    for number in range(40):
        chosen = choices(dice, 3)
        one_pass(eam, [number] * 3, chosen)
        naive.add(matrix_of(chosen))
    end_all(eam)
    reach = min(distance, LAYERS - 1)
    popular = np.sum(naive.matrices, axis=0)
    total, said, before = np.zeros((LAYERS, EXPERTS), np.int64), None, None
    for _ in range(2):
        chosen = choices(dice, 1)
        if matrix == "pass":
            total[:] = 0
        seen = range(LAYERS if total.any() else 0)
        for layer, predictions in enumerate(one_pass(eam, [99], chosen), -1):
            if layer >= 0:
                total[layer] += matrix_of(chosen)[layer]
                seen = range(max(layer + 1, len(seen)))
            nearest = naive.nearest(total, list(seen), matches) if seen else []
            added = np.sum([naive.matrices[at] for at in nearest], axis=0) if nearest else popular
            p = added / added.sum(axis=1, keepdims=True)
            ahead = list(range(layer + 1, min(layer + reach, LAYERS - 1) + 1))
            if layer >= 0 and nearest == before:
                ahead = [each for each in ahead if each in (layer + 1, layer + reach)]
            before = nearest
            assert [prediction.layer for prediction in predictions] == ahead
            for prediction in predictions:
                assert prediction.distance == prediction.layer - layer and len(prediction.experts) <= TOP_K
                assert prediction.probabilities == pytest.approx(p[prediction.layer].tolist())
                near = 1 - prediction.distance / LAYERS
                assert prediction.scores == pytest.approx(
                    [near * p[prediction.layer, expert] for expert in prediction.experts]
                )
                assert prediction.scores[-1] >= near * np.sort(p[prediction.layer])[-TOP_K] - 1e-6, "the likeliest"
            assert all(other.outlook is None for other in predictions[1:])
            outlook = predictions[0].outlook if predictions else None
            assert outlook is None or outlook != said, "it is said when it has changed"
            said = outlook or said
            if predictions:
                assert said == pytest.approx(p.ravel().tolist(), abs=1e-6)


def test_what_is_learned_is_what_running_shows() -> None:
    """Requests over several blocks, in both phases, with choices that are none."""
    dice = np.random.default_rng(6)
    history, eam, other = [], EAM(SHAPE, 2), EAM(SHAPE, 2)
    for request in range(9):
        for step in range(4):
            chosen = choices(dice, 5 if step == 0 else 1)
            chosen[0, 1, 0] = -1
            history += [(request, step == 0, row) for row in chosen]
            one_pass(other, [request] * len(chosen), chosen, is_prefill=step == 0)
    end_all(other)
    for first in range(0, len(history), 5):
        block = history[first : first + 5]
        requests, is_prefill = np.array([row[0] for row in block]), np.array([row[1] for row in block])
        experts = np.stack([row[2] for row in block])
        eam.learn(History(requests, is_prefill, experts, np.zeros((len(block), LAYERS, EXPERTS), np.float32)))
    end_all(eam)
    for learned, shown in ((eam.prompts, other.prompts), (eam.decoding, other.decoding)):
        np.testing.assert_array_equal(learned.columns, shown.columns)
        np.testing.assert_array_equal(learned.born, shown.born)
    assert eam.prompts.num_matrices == eam.decoding.num_matrices == 9

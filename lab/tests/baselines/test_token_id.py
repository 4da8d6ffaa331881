"""What a token id has asked for before, and experts by their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.observation import Began, History
from expertly.policies.known import Known
from expertly.policies.prediction import Predictor
from expertly.policies.registry import PREDICTORS
from expertly.scheduler.systems import get_system
from expertly_lab.baselines.token_id import IdCounts
from tests.policies.predictor.test_observing import chose, said
from tests.scheduler.drive import geometry

SHAPE = geometry(layers=3, experts=6, top_k=2)
ALL = 1 << 30


def token_id(distance: int = ALL, known: Known | None = None, **options: str) -> Predictor:
    return PREDICTORS["token-id"].make(SHAPE, known or Known(), distance, options)


def began(*tokens: int, layers: range | None = None) -> Began:
    num = len(tokens)
    return Began(np.zeros(num, np.int64), np.zeros(num, np.bool_), None, layers, np.array(tokens, np.int32))


def run(predictor: Predictor, tokens: list[int], *by_layer: list[list[int]], ok: bool = True):
    """A pass; what was said when it began."""
    found = said(predictor.begin_iteration(began(*tokens)))
    for layer, rows in enumerate(by_layer):
        assert list(predictor.router_ran(chose(layer, *rows))) == [], "all was said at once"
    predictor.end_iteration(ok)
    return found


def test_an_id_asks_again_for_what_it_has_asked_for_most() -> None:
    one = token_id()
    assert run(one, [7], [[0, 1]], [[2, 3]], [[4, 5]]) == {}, "nothing was seen"
    run(one, [7], [[0, 2]], [[2, 3]], [[4, 1]])
    run(one, [8], [[5, 3]], [[5, 0]], [[0, 1]])
    assert run(one, [7], [[0, 1]], [[2, 3]], [[4, 5]]) == {(0, 1): [0, 1], (1, 2): [2, 3], (2, 3): [4, 1]}
    assert run(one, [8], [[5, 3]], [[5, 0]], [[0, 1]]) == {(0, 1): [3, 5], (1, 2): [0, 5], (2, 3): [0, 1]}
    (first, *_) = one.begin_iteration(began(7))
    assert first.scores == pytest.approx([3 / 6, 2 / 6]) and first.probabilities == pytest.approx(
        [3 / 6, 2 / 6, 1 / 6, 0, 0, 0]
    )
    assert one.facts() == {"token_ids": 2, "known": 4 / 6}


@pytest.mark.parametrize("token", [9, -1])
def test_for_an_unknown_id_the_most_popular_experts_are_named(token: int) -> None:
    one = token_id()
    for _ in range(2):
        run(one, [7], [[0, 1]], [[2, 3]], [[4, 5]])
    run(one, [8], [[5, 3]], [[5, 3]], [[5, 3]])
    assert said(one.begin_iteration(began(token))) == {(0, 1): [0, 1], (1, 2): [3, 2], (2, 3): [5, 4]}


@pytest.mark.parametrize(("distance", "when_it_begins", "later"), [(1, [(0, 1)], {0: (1, 1), 1: (2, 1)}),
                                                                  (2, [(0, 1), (1, 2)], {0: (2, 2)})])  # fmt: skip
def test_with_a_distance_a_layer_is_named_when_it_is_so_far_ahead(distance: int, when_it_begins, later) -> None:
    one = token_id(distance)
    for _ in range(2):
        found = [list(said(one.begin_iteration(began(7))))]
        found += [list(said(one.router_ran(chose(layer, [layer, layer + 1])))) for layer in range(3)]
        one.end_iteration(True)
    assert found == [when_it_begins, *([later[layer]] if layer in later else [] for layer in range(3))]


@pytest.mark.parametrize("what", ["failed", "a layer is missing", "without ids", "other rows", "no end", "no choices"])
def test_only_a_pass_that_was_seen_whole_and_ended_well_teaches(what: str) -> None:
    one = token_id(known=Known(popularity={5: 1}))
    list(
        one.begin_iteration(Began(np.zeros(1, np.int64), np.zeros(1, np.bool_)) if what == "without ids" else began(7))
    )
    for layer in range(3):
        routed = chose(layer, [3, 4], [3, 4]) if what == "other rows" and layer == 1 else chose(layer, [3, 4])
        if what == "no choices" and layer == 2:
            routed = type(routed)(routed.router)
        if not (what == "a layer is missing" and layer == 1):
            list(one.router_ran(routed))
    if what == "no end":  # nor a beginning: these rows are not of 7
        for layer in range(3):
            list(one.router_ran(chose(layer, [0, 1])))
    one.end_iteration(what != "failed")
    assert one.facts()["token_ids"] == 0
    assert said(one.begin_iteration(began(7))) == {(0, 1): [5]}, "the popularity that was given"


def test_a_decoder_behind_an_encoder_learns_from_its_own_layers() -> None:
    one = token_id()
    for _ in range(2):
        found = said(one.begin_iteration(began(7, layers=range(1, 3))))
        for layer in (1, 2):
            list(one.router_ran(chose(layer, [layer, 5])))
        one.end_iteration(True)
    assert found == {(1, 2): [1, 5], (2, 3): [2, 5]}


def test_it_is_filled_from_a_training_part_and_learns_on() -> None:
    chosen = np.array([[[0, 1], [2, 3], [4, 5]], [[0, 2], [2, 1], [5, 0xFFFF]]], np.uint16)  # [T, L, K]
    one = token_id()
    scores = np.full((2, 3, 6), 1 / 6, np.float32)
    tokens = np.array([7, -1], np.int32)
    one.learn(History(np.zeros(2, np.int64), np.zeros(2, np.bool_), chosen, scores, None, tokens))
    assert said(one.begin_iteration(began(7))) == {(0, 1): [0, 1], (1, 2): [2, 3], (2, 3): [4, 5]}
    assert said(one.begin_iteration(began(8)))[2, 3] == [5, 4], "popular in the training part"
    for _ in range(2):
        run(one, [7], [[3, 4]], [[2, 3]], [[4, 5]])
    assert said(one.begin_iteration(began(7)))[0, 1] == [3, 4]


# -- memory ----------------------------------------------------------------------------------------------------


def test_of_too_many_ids_those_seen_last_are_kept() -> None:
    """Against a dict of counts that is cut by hand, over prompts longer than the capacity, too."""
    dice = np.random.default_rng(3)
    counts, naive = IdCounts(SHAPE, capacity=5), dict[int, np.ndarray]()
    for step in range(400):
        tokens = dice.integers(-1, 12, dice.choice([1, 2, 9]), np.int32)
        chosen = {layer: dice.integers(-1, 8, (len(tokens), 2)) for layer in range(3)}
        counts.add(tokens, chosen)
        last = list(dict.fromkeys(token for token in tokens.tolist()[::-1] if token >= 0))[:5][::-1]
        naive = {token: naive.pop(token) for token in list(naive) if token not in last} | {
            token: naive.get(token, np.zeros((3, 6), np.int64)) for token in last
        }
        naive = dict(list(naive.items())[-5:])
        for row, token in enumerate(tokens.tolist()):
            for layer, experts in chosen.items():
                for expert in experts[row].tolist():
                    if token in naive and 0 <= expert < 6:
                        naive[token][layer, expert] += 1
        slots = counts.slots(np.arange(12, dtype=np.int32))
        assert np.flatnonzero(slots >= 0).tolist() == sorted(naive) and len(counts) == len(naive), step
        if step % 5:
            continue
        expected = np.array([naive[token] for token in sorted(naive)])  # [n, L, E]
        for layer in range(3) if naive else ():
            total = np.maximum(1, expected[:, layer].sum(axis=1, keepdims=True))
            np.testing.assert_allclose(counts.shares(layer, slots[slots >= 0]), expected[:, layer] / total, rtol=1e-6)


# -- a system --------------------------------------------------------------------------------------------------


def test_a_system_that_takes_it_looks_ahead_over_all_layers_unless_it_says_how_far() -> None:
    assert get_system("lru:prediction=token-id").distance >= 1 << 20
    assert get_system("lru:prediction=token-id:distance=2").distance == 2
    assert get_system("lru:prediction=counts").distance == 1
    assert get_system("lru:prediction=token-id").needs == ("token",)


# -- index -----------------------------------------------------------------------------------------------------


def test_index_names_layers_by_number_and_finishes_a_nearer_one_first() -> None:
    one = PREDICTORS["index"].make(SHAPE, Known(), 2, {"width": "3"})
    near, far = one.begin_iteration(began(7))
    assert near.experts == far.experts == [0, 1, 2] and near.probabilities is None
    assert (near.distance, far.distance) == (1, 2) and near.scores[-1] > far.scores[0]
    (whole, _) = PREDICTORS["index"].make(SHAPE, Known(), 2).begin_iteration(began(7))
    assert whole.experts == [0, 1, 2, 3, 4, 5]

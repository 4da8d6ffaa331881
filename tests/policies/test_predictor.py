"""What every predictor promises, and what each of them means."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.core.observation import Began, Routed, Want
from expertly.policies.known import Known
from expertly.policies.predictor import PREDICTORS
from expertly.policies.predictor.modelled import ModelledLookahead, accuracy_at
from expertly.policies.predictor.perfect import Perfect
from tests.control.drive import geometry
from tests.policies.futures import ListFuture

SHAPE = geometry(layers=6, experts=12, top_k=3)


def some_future(shape: Geometry, iterations: int, seed: int = 0) -> ListFuture:
    dice = random.Random(seed)
    return ListFuture(
        shape,
        [
            (layer, dice.sample(range(one.num_experts), one.top_k))
            for _ in range(iterations)
            for layer, one in enumerate(shape.layers)
        ],
    )


def made_up(dice: np.random.Generator, *shape: int) -> np.ndarray:
    """Scores that sum to 1 over the last axis."""
    scores = dice.random(shape, np.float32) ** 4
    return scores / scores.sum(axis=-1, keepdims=True)


class MadeUp:
    """What a forward pass would show: of the demands what they say, of what they do not say anything at all. The rows
    are of requests that last for four iterations each.
    """

    def __init__(self, shape: Geometry, wants: frozenset[Want], num_rows: int, seed: int) -> None:
        self._shape, self._wants, self._num_rows = shape, wants, num_rows
        self._dice = np.random.default_rng(seed)

    def began(self, iteration: int) -> Began:
        embedding = None
        if "embedding" in self._wants:
            embedding = self._dice.standard_normal((self._num_rows, 16), np.float32)
        requests = np.arange(self._num_rows, dtype=np.int64) + iteration // 4 * self._num_rows
        return Began(requests, np.full(self._num_rows, iteration % 4 == 0), embedding)

    def routed(self, layer: int, experts: list[int]) -> Routed:
        """The first row chose `experts`, and scores say so; the others chose any."""
        one, dice, num_rows = self._shape.layers[layer], self._dice, self._num_rows
        chosen = np.stack([dice.permutation(one.num_experts)[: one.top_k] for _ in range(num_rows)])
        chosen[0] = experts
        scores = made_up(dice, num_rows, one.num_experts)
        np.put_along_axis(scores, chosen, np.take_along_axis(scores, chosen, 1) + 1, 1)
        scores /= scores.sum(axis=1, keepdims=True)
        union = list(dict.fromkeys(chosen.ravel().tolist()))
        return Routed(
            RouterRan(layer, union, [1] * len(union), [True] * len(union), num_rows),
            chosen if "experts" in self._wants else None,
            scores if "scores" in self._wants else None,
            made_up(dice, num_rows, 4, one.num_experts) if "lookahead" in self._wants else None,
        )


def watched(
    name: str, distance: int, iterations: int = 40, seed: int = 0, shape: Geometry = SHAPE, num_rows: int = 1
) -> tuple[ListFuture, list[tuple[int, Prediction]]]:
    """The future, and every prediction with the step at which it was made (-1: before the first)."""
    future = some_future(shape, iterations)
    predictor = PREDICTORS[name](shape, Known(future=future, seed=seed), distance)
    shown = MadeUp(shape, predictor.wants, num_rows, seed)
    made: list[tuple[int, Prediction]] = []
    for step, (layer, experts) in enumerate(future.demands):
        if layer == 0:
            began = shown.began(step // shape.num_layers)
            made += [(step - 1, prediction) for prediction in predictor.begin_iteration(began)]
        future.step = step
        made += [(step, prediction) for prediction in predictor.router_ran(shown.routed(layer, experts))]
        if layer == shape.num_layers - 1:
            predictor.end_iteration(True)
    return future, made


@pytest.mark.parametrize("distance", [1, 2, 5, 9, 1 << 30])
@pytest.mark.parametrize("name", PREDICTORS)
class TestConformance:
    """A new predictor inherits these by being in PREDICTORS."""

    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_a_prediction_is_of_a_layer_that_has_not_run(self, name: str, distance: int, num_rows: int) -> None:
        future, made = watched(name, distance, num_rows=num_rows)
        assert made
        for step, prediction in made:
            target = step + prediction.distance
            assert 1 <= prediction.distance <= distance
            assert step < target < len(future.demands), "nothing is past the end"
            assert future.demands[target][0] == prediction.layer, "the distance is right"
            assert prediction.layer != future.demands[step][0], "never the running layer"

    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_experts_exist_are_named_once_and_fall_in_score(self, name: str, distance: int, num_rows: int) -> None:
        for _, prediction in watched(name, distance, num_rows=num_rows)[1]:
            assert len(set(prediction.experts)) == len(prediction.experts) == len(prediction.scores) > 0
            assert all(type(e) is int for e in prediction.experts)
            assert all(0 <= e < SHAPE.layers[prediction.layer].num_experts for e in prediction.experts)
            assert prediction.scores == sorted(prediction.scores, reverse=True)
            assert all(type(score) is float for score in prediction.scores)
            assert prediction.confidence is None or type(prediction.confidence) is float
            assert prediction.confidence is None or -1 <= prediction.confidence <= 1

    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_probabilities_are_of_every_expert_and_scores_are_among_them(
        self, name: str, distance: int, num_rows: int
    ) -> None:
        for _, prediction in watched(name, distance, num_rows=num_rows)[1]:
            if not PREDICTORS[name].gives_probabilities:
                assert prediction.probabilities is None
                continue
            assert prediction.probabilities is not None
            assert len(prediction.probabilities) == SHAPE.layers[prediction.layer].num_experts
            assert all(type(p) is float and 0 <= p <= 1 for p in prediction.probabilities)
            for expert, score in zip(prediction.experts, prediction.scores, strict=True):
                assert 0 < score <= prediction.probabilities[expert]
                assert num_rows > 1 or score == prediction.probabilities[expert]

    def test_a_nearer_layer_comes_first(self, name: str, distance: int) -> None:
        """Where scores are no probabilities, which prefetch=proximity weighs, they say so themselves."""
        if PREDICTORS[name].gives_probabilities:
            return
        by_step = defaultdict(list)
        for step, prediction in watched(name, distance)[1]:
            by_step[step].append(prediction)
        for predictions in by_step.values():
            tops = [prediction.scores[0] for prediction in sorted(predictions, key=lambda p: p.distance)]
            assert tops == sorted(tops, reverse=True)

    def test_equal_seeds_give_equal_predictions(self, name: str, distance: int) -> None:
        assert watched(name, distance, seed=3)[1] == watched(name, distance, seed=3)[1]

    def test_a_model_of_one_layer_is_predicted_when_it_begins_if_at_all(self, name: str, distance: int) -> None:
        future, made = watched(name, distance, shape=geometry(layers=1, experts=8, top_k=2))
        assert [(p.layer, p.distance) for _, p in made] == [(0, 1)] * len(made)
        assert len({step for step, _ in made}) == len(made) < len(future.demands)

    def test_without_the_future_it_says_so_or_needs_none(self, name: str, distance: int) -> None:
        if "future" in PREDICTORS[name].needs:
            with pytest.raises(ConfigError, match=f"prediction '{name}'.*only a simulation"):
                PREDICTORS[name](SHAPE, Known(), distance)
        else:
            PREDICTORS[name](SHAPE, Known(), distance)

    def test_observations_may_be_left_out_and_say_nothing(self, name: str, distance: int) -> None:
        """A pass without its beginning, with other rows, without layers, without an end, and of demands alone."""
        future = some_future(SHAPE, 80)
        predictor = PREDICTORS[name](SHAPE, Known(future=future), distance)
        dice = random.Random(5)
        shown = [MadeUp(SHAPE, predictor.wants, num_rows, num_rows) for num_rows in (1, 1, 1, 3)]
        for step, (layer, experts) in enumerate(future.demands):
            future.step = step
            if layer == 0 and dice.random() < 0.7:
                list(predictor.begin_iteration(dice.choice(shown).began(step // 6)))
            if dice.random() < 0.8:
                routed = dice.choice(shown).routed(layer, experts)
                for prediction in predictor.router_ran(routed if dice.random() < 0.8 else Routed(routed.demand)):
                    assert prediction.experts
            if layer == 5 and dice.random() < 0.7:
                predictor.end_iteration(dice.random() < 0.7)

    def test_what_it_costs_is_counted_and_what_it_knows_is_told(self, name: str, distance: int) -> None:
        predictor = PREDICTORS[name](SHAPE, Known(future=some_future(SHAPE, 1)), distance)
        assert predictor.work.num_calls == 0
        assert all(value is None or isinstance(value, int | float) for value in predictor.facts().values())


@pytest.mark.parametrize("name", PREDICTORS)
def test_an_option_it_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"prediction='{name}': option 'colour': unknown"):
        PREDICTORS[name](SHAPE, Known(future=some_future(SHAPE, 1)), 1, {"colour": "red"})


@pytest.mark.parametrize(("distance", "reach"), [(1, 1), (3, 3), (5, 5), (6, 5), (1 << 30, 5)])
def test_perfect_names_every_demand_in_reach_once_as_soon_as_it_is(distance: int, reach: int) -> None:
    future, made = watched("perfect", distance, iterations=4)
    targets = [step + prediction.distance for step, prediction in made]
    assert targets == list(range(1, len(future.demands))), "all but the first, in order"
    for step, prediction in made:
        target = step + prediction.distance
        assert prediction.experts == future.demands[target][1]
        assert step == max(0, target - reach)


def test_perfect_says_again_what_it_had_not_said_when_steps_are_skipped() -> None:
    """An iteration that failed half-way: the next steps in reach are named, the past ones are not."""
    future = some_future(SHAPE, 3)
    predictor = Perfect(SHAPE.num_layers, Known(future=future), 2)
    router = RouterRan(0, [0], [1], [True], 1)
    assert [p.distance for p in predictor.router_ran(Routed(router))] == [1, 2]
    future.step = 7
    assert [(p.layer, p.distance) for p in predictor.router_ran(Routed(router))] == [(2, 1), (3, 2)]


@pytest.mark.parametrize("distance", [1, 2, 4, 5])
def test_the_modelled_lookahead_is_as_right_as_it_says(distance: int) -> None:
    """Within five standard errors, at every distance; after the first layer it fills the layers up to its own."""
    future, made = watched("modelled", distance, iterations=1500)
    right, total = defaultdict(int), defaultdict(int)
    for step, prediction in made:
        needed = future.demands[step + prediction.distance][1]
        total[prediction.distance] += len(prediction.experts)
        right[prediction.distance] += len(set(needed) & set(prediction.experts))
        assert prediction.distance == distance or future.demands[step][0] == 0
        assert step // SHAPE.num_layers == (step + prediction.distance) // SHAPE.num_layers, "within the iteration"
    assert sorted(total) == list(range(1, distance + 1))
    for d, num in total.items():
        expected = accuracy_at(d)
        assert abs(right[d] / num - expected) < 5 * (expected * (1 - expected) / num) ** 0.5


def test_the_accuracies_are_those_of_promoe() -> None:
    assert accuracy_at(1) == pytest.approx(0.905) and accuracy_at(8) == pytest.approx(0.545)
    assert accuracy_at(100) == accuracy_at(8)
    assert [accuracy_at(d) for d in range(1, 9)] == sorted([accuracy_at(d) for d in range(1, 9)], reverse=True)


def test_wrong_guesses_of_the_modelled_lookahead_are_spread_over_all_others() -> None:
    future, made = watched("modelled", 5, iterations=1500)
    wrong: dict[int, int] = defaultdict(int)
    for step, prediction in made:
        for expert in set(prediction.experts) - set(future.demands[step + prediction.distance][1]):
            wrong[expert] += 1
    assert len(wrong) == 12 and max(wrong.values()) < 1.3 * min(wrong.values())


def test_a_layer_that_needs_everything_cannot_be_guessed_wrong() -> None:
    future = ListFuture(geometry(2, 3, 3), [(0, [0, 1, 2]), (1, [2, 0, 1])])
    predictor = ModelledLookahead([3, 3], Known(future=future))
    (prediction,) = predictor.router_ran(Routed(RouterRan(0, [0], [1], [True], 1)))
    assert prediction.experts == [2, 0, 1]


def test_another_seed_guesses_otherwise() -> None:
    assert watched("modelled", 3, seed=1)[1] != watched("modelled", 3, seed=2)[1]

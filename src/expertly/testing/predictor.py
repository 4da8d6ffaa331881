"""What every predictor promises (policies/prediction.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

from expertly.core.messages import Prediction
from expertly.core.observation import Routed
from expertly.policies.prediction import Predictor
from expertly.testing.made_up import SHAPE, MadeUp, MakeKnown, expect, seed_alone, small_model, some_demands, watched

DISTANCES = (1, 2, 5, 1 << 30)
"""Of which the last is farther than the model is deep."""
ITERATIONS = 24
"""Of requests that last for four: enough that whoever learns has learned from some that are over."""


def check_predictor(
    policy: type[Predictor], known: MakeKnown = seed_alone, distances: Sequence[int] = DISTANCES
) -> None:
    """Run all of PREDICTOR_CHECKS at these distances. Raises AssertionError naming the promise that is not kept.

    `known` makes what the predictor is told, where that is more than a seed.
    """
    for check in PREDICTOR_CHECKS:
        for distance in distances:
            check(policy, distance, known)


def predictions_are_of_layers_to_come_and_well_formed(policy: type[Predictor], distance: int, known: MakeKnown) -> None:
    for num_rows in (1, 3):
        demands, made = watched(policy, distance, known=known, iterations=ITERATIONS, num_rows=num_rows)
        expect(bool(made), f"in {ITERATIONS} iterations something is predicted")
        tops: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for step, prediction in made:
            _check_form(prediction, demands.steps[step][0])  # before the first step the last layer ran
            tops[step].append((prediction.distance, -prediction.scores[0]))
            if policy.gives_probabilities:
                _check_probabilities(prediction, num_rows)
            else:
                is_none = prediction.probabilities is None
                expect(is_none, "one that gives no probabilities gives none", prediction.probabilities)
        for pairs in () if policy.gives_probabilities else tops.values():
            scores = [score for _, score in sorted(pairs, key=lambda pair: pair[0])]
            expect(scores == sorted(scores), "scores that are no probabilities fall with the distance", scores)


def _check_form(prediction: Prediction, running: int) -> None:
    num_layers, ahead = SHAPE.num_layers, prediction.distance
    experts, scores, layer = prediction.experts, prediction.scores, prediction.layer
    num_experts = SHAPE.layers[layer].num_experts
    itself = "the running layer is not predicted; the last one may be when the next pass begins"
    expect(1 <= ahead <= num_layers, f"a distance is from 1 to {num_layers}", ahead)
    expect((running + ahead) % num_layers == layer, "a layer is `distance` ahead", prediction)
    expect(running != layer or ahead == num_layers, itself, prediction)
    expect(len(set(experts)) == len(experts) == len(scores) > 0, "experts are named once, each with a score")
    expect(all(type(expert) is int for expert in experts), "experts are Python's ints", experts)
    expect(all(0 <= expert < num_experts for expert in experts), "experts are of the layer", experts)
    expect(scores == sorted(scores, reverse=True), "scores fall", scores)
    expect(all(type(score) is float for score in scores), "scores are Python's floats", scores)


def _check_probabilities(prediction: Prediction, num_rows: int) -> None:
    likely, scores = prediction.probabilities or [], prediction.scores
    expect(prediction.probabilities is not None, "one that gives probabilities gives them with each prediction")
    expect(len(likely) == SHAPE.layers[prediction.layer].num_experts, "probabilities are of every expert", likely)
    expect(all(type(p) is float and 0 <= p <= 1 for p in likely), "probabilities are from 0 to 1", likely)
    pairs = [(score, likely[expert]) for expert, score in zip(prediction.experts, scores, strict=True)]
    below = "a score is above 0 and at most the expert's probability"
    expect(all(0 < score <= p for score, p in pairs), below, scores)
    factors = [score / p for score, p in pairs]
    is_one = num_rows > 1 or max(factors) - min(factors) < 1e-6
    expect(is_one, "of one row a score is the probability times one factor for all of the layer", factors)


def equal_seeds_give_equal_predictions(policy: type[Predictor], distance: int, known: MakeKnown) -> None:
    first, second = (watched(policy, distance, known=known, iterations=ITERATIONS, seed=3)[1] for _ in range(2))
    expect(first == second, "of two that saw the same, with one seed, predictions are the same")


def a_model_of_one_layer_is_predicted_when_it_begins_if_at_all(
    policy: type[Predictor], distance: int, known: MakeKnown
) -> None:
    made = watched(policy, distance, known=known, shape=small_model(layers=1, experts=8, top_k=2))[1]
    expect(all((said.layer, said.distance) == (0, 1) for _, said in made), "there is only layer 0, one ahead", made)
    expect(len({step for step, _ in made}) == len(made), "it is predicted once an iteration", made)


def observations_may_be_left_out_and_say_nothing(policy: type[Predictor], distance: int, known: MakeKnown) -> None:
    """A pass without its beginning, with other rows, without layers, without an end, and of demands alone. What the
    predictor says of itself then are numbers.
    """
    demands, dice = some_demands(SHAPE, 2 * ITERATIONS), Random(5)
    predictor = policy.make(SHAPE, known(SHAPE, demands, 0), distance)
    shown = [MadeUp(SHAPE, predictor.wants, num_rows, num_rows) for num_rows in (1, 1, 1, 3)]
    for step, (layer, experts) in enumerate(demands.steps):
        demands.step = step
        if layer == 0 and dice.random() < 0.7:
            list(predictor.begin_iteration(dice.choice(shown).began(step // SHAPE.num_layers)))
        if dice.random() < 0.8:
            routed = dice.choice(shown).routed(layer, experts)
            for prediction in predictor.router_ran(routed if dice.random() < 0.8 else Routed(routed.router)):
                expect(bool(prediction.experts), "a prediction names experts")
        if layer == SHAPE.num_layers - 1 and dice.random() < 0.7:
            predictor.end_iteration(dice.random() < 0.7)
    facts = predictor.facts()
    are_numbers = all(value is None or isinstance(value, int | float) for value in facts.values())
    expect(are_numbers, "facts are numbers by name", facts)


PREDICTOR_CHECKS = (
    predictions_are_of_layers_to_come_and_well_formed,
    equal_seeds_give_equal_predictions,
    a_model_of_one_layer_is_predicted_when_it_begins_if_at_all,
    observations_may_be_left_out_and_say_nothing,
)

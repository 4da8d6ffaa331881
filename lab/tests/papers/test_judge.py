"""A claim's verdict follows from the numbers: what says the opposite fails each claim, and noise decides none."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
import pytest

from expertly_lab.papers.experiment import Experiment
from expertly_lab.papers.judge import (
    HITS,
    HOLDS,
    IN_PART,
    OPPOSITE,
    TPOT,
    UNTOLD,
    Better,
    Cell,
    Claim,
    Lowest,
    Metric,
    Order,
    Sample,
    Trend,
    Within,
    in_words,
    verdict_of,
)
from expertly_lab.papers.runner import experiments, judged, shuffled

N = 24


def sample(mean: float, noise: float = 0.02, num: int = N, seed: int = 0) -> Sample:
    """Requests around a mean; those of the same seed are as hard for every system."""
    return Sample.of(mean * (1 + noise * np.random.default_rng(seed).standard_normal(num)))


def cells(metric: Metric, values: Mapping[tuple[str, str], float], **how: float) -> dict[tuple[str, str], Cell]:
    return {key: Cell({metric.name: sample(value, **how)}) for key, value in values.items()}  # type: ignore[arg-type]


def times(**values: float) -> dict[tuple[str, str], Cell]:
    return cells(TPOT, {("", name): value for name, value in values.items()})


def kind(claim: Claim, of: Mapping[tuple[str, str], Cell]) -> str:
    return verdict_of(claim.effects(of)).kind


BEST = Better("a is fastest", TPOT, "a", {"b": 0.5})


def test_the_better_of_all_holds_and_its_size_is_said_beside_the_papers() -> None:
    verdict = verdict_of(BEST.effects(times(a=1.0, b=1.2, c=3.0)))
    assert verdict.words == "holds, a third of the paper's effect"
    assert verdict.deciding.label == "b" and verdict.deciding.value == pytest.approx(1 / 6)
    assert verdict_of(BEST.effects(times(a=1.0, b=2.0))).words == HOLDS
    assert kind(BEST, times(a=1.0, b=0.9, c=0.8)) == OPPOSITE
    assert kind(BEST, times(a=1.0, b=0.9, c=1.8)) == IN_PART
    hits = Better("a hits most", HITS, "a", {"b": 1.0})
    assert verdict_of(hits.effects(cells(HITS, {("", "a"): 0.8, ("", "b"): 0.4}))).words == HOLDS


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.9, ""),
        (0.5, ", half of the paper's effect"),
        (0.1, ", a tenth of the paper's effect"),
        (0.01, ", less than a tenth of the paper's effect"),
        (3.0, ", 3.0 times the paper's effect"),
        (float("inf"), ""),
    ],
)
def test_a_size_is_said_in_words(share: float, words: str) -> None:
    assert in_words(share) == words


def test_noise_decides_nothing() -> None:
    """Two systems alike but for each request's own chance, and any two of too few requests."""
    alike = {("", name): Cell({TPOT.name: sample(1.0, 0.2, seed=seed)}) for seed, name in enumerate("ab")}
    assert kind(BEST, alike) == UNTOLD
    assert kind(BEST, cells(TPOT, {("", "a"): 1.0, ("", "b"): 2.0}, num=4)) == UNTOLD


def test_what_all_requests_have_in_common_cancels() -> None:
    """Of requests that differ by half, a difference of a hundredth is told, because they are drawn together."""
    assert kind(BEST, cells(TPOT, {("", "a"): 0.99, ("", "b"): 1.0}, noise=0.5)) == HOLDS


def test_an_order_a_trend_a_valley_and_a_range() -> None:
    order = Order("a, then b, then c", TPOT, ("a", "b", "c"))
    assert kind(order, times(a=1.0, b=2.0, c=3.0)) == HOLDS and kind(order, times(a=1.0, b=3.0, c=2.0)) == IN_PART

    def over(*values: float) -> dict[tuple[str, str], Cell]:
        return cells(TPOT, {(str(point), "a"): value for point, value in enumerate(values)})

    rises, valley = Trend("it rises", TPOT, "a", rises=True), Lowest("a U", TPOT, "a")
    assert kind(rises, over(1, 2, 3)) == HOLDS and kind(rises, over(3, 2, 1)) == OPPOSITE
    assert kind(rises, over(1, 4, 3)) == IN_PART, "it goes back on the way"
    assert kind(valley, over(3, 1, 2)) == HOLDS and kind(valley, over(1, 2, 3)) != HOLDS
    within = Within("as there", TPOT, "a", 0.9, 1.1)
    assert (
        kind(within, over(1.0)) == HOLDS and kind(within, over(1.3)) == OPPOSITE and kind(within, over(0.9)) == UNTOLD
    )


def test_a_percentile_is_of_requests() -> None:
    tail = Sample.of(np.arange(1.0, 101.0), percent=90)
    assert tail.value == 90.0 and tail.interval is not None and tail.interval[0] < 90 < tail.interval[1]


def test_a_mean_counts_tokens_not_requests() -> None:
    """A request of nine tokens counts nine times as much as one of one."""
    assert Sample(np.array([9.0, 2.0]), np.array([9.0, 1.0])).value == pytest.approx(1.1)


def test_a_claim_of_what_was_not_measured_is_not_judged() -> None:
    assert judged([Better("faster", HITS, "a")], times(a=1.0, b=2.0)) == []


def test_modelled_predictions_are_said() -> None:
    result = times(a=1.0, b=2.0)
    result["", "b"] = Cell(result["", "b"].samples, is_modelled=True)
    assert verdict_of(BEST.effects(result)).words == "holds (modelled)"


# -- of every claim that ships -------------------------------------------------------------------------------------

CLAIMS = [(experiment, claim) for experiment in experiments() for claim in experiment.claims]


def supporting(experiment: Experiment, claim: Claim) -> dict[tuple[str, str], Cell]:
    """Numbers with which the claim holds."""
    points = [str(point) for point in experiment.sweep.points] if experiment.sweep else [""]
    points = list(getattr(claim, "at", None) or points)
    sign = 1 if claim.metric.lower_is_better else -1
    if isinstance(claim, Better | Order):
        systems = [*claim.systems] if isinstance(claim, Order) else [claim.system]
        systems += [*(claim.than or (*experiment.systems, "another"))] if isinstance(claim, Better) else []
        ranks = {name: rank for rank, name in enumerate(dict.fromkeys(systems))}
        values = {(point, name): 2.0 ** (sign * rank) for point in points for name, rank in ranks.items()}
    elif isinstance(claim, Within):
        middle = claim.low * 2 if claim.high == float("inf") else (claim.low + claim.high) / 2
        values = {(point, claim.system): middle for point in points}
        return cells(claim.metric, values, noise=1e-4)
    else:
        assert isinstance(claim, Trend | Lowest)
        points = points if len(points) > 2 else ["1", "2", "3"]
        heights = range(len(points)) if isinstance(claim, Trend) else [abs(at - 1) for at in range(len(points))]
        up = 1 if isinstance(claim, Lowest) or claim.rises else -1
        values = {(at, claim.system): 2.0 ** (up * height) for at, height in zip(points, heights, strict=True)}
    return cells(claim.metric, values)


def doctored(claim: Claim, given: dict[tuple[str, str], Cell]) -> dict[tuple[str, str], Cell]:
    """The same numbers under other names."""
    if isinstance(claim, Within):
        scale = 2 * claim.high if claim.high != float("inf") else claim.low / 2
        values = {key: cell.samples[claim.metric.name] for key, cell in given.items()}
        moved = {key: Sample(each.sums * scale / each.value, each.counts) for key, each in values.items()}
        return {key: Cell({claim.metric.name: moved[key]}) for key in given}
    keys = list(given)
    if isinstance(claim, Lowest):
        return dict(zip(keys, [given[key] for key in (keys[1], keys[0], *keys[2:])], strict=True))
    return dict(zip(keys, [given[key] for key in reversed(keys)], strict=True))


@pytest.mark.parametrize(
    ("experiment", "claim"), CLAIMS, ids=[f"{experiment.name}: {claim.text}" for experiment, claim in CLAIMS]
)
def test_every_claim_can_hold_and_has_a_twin_that_does_not(experiment: Experiment, claim: Claim) -> None:
    values = supporting(experiment, claim)
    assert kind(claim, values) == HOLDS
    assert kind(claim, doctored(claim, values)) != HOLDS


def test_shuffled_names_give_every_system_anothers_numbers() -> None:
    values = times(a=1.0, b=2.0, c=3.0)
    for seed in range(20):
        other = shuffled(values, Random(seed))
        assert set(other) == set(values) and all(other[key] is not values[key] for key in values)
    alone = cells(TPOT, {("1", "a"): 1.0, ("2", "a"): 2.0, ("3", "a"): 3.0})
    assert all(shuffled(alone, Random(0))[key] is not alone[key] for key in alone), "of a single system, points move"


def test_a_text_names_one_claim() -> None:
    for experiment in experiments():
        texts = [claim.text for claim in experiment.claims]
        assert len(set(texts)) == len(texts), experiment.name

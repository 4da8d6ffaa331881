"""What the papers' experiments measure without a cache, and inputs that say the opposite."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.geometry import ModelShape
from expertly.core.observation import History
from expertly.policies.fmoe import MapStore
from expertly_lab.papers import fmoe, moe_infinity
from expertly_lab.papers.judge import HOLDS, Cell, Claim, Sample, verdict_of
from expertly_lab.papers.runner import find_experiment

LAYERS, EXPERTS, TOP_K = 6, 8, 2


def claim(experiment: str, text: str) -> Claim:
    return next(each for each in find_experiment(experiment).claims if each.text == text)


def holds(judged: Claim, metric: str, system: str, sample: Sample) -> bool:
    return verdict_of(judged.effects({("", system): Cell({metric: sample})})).kind == HOLDS


def rows(seed: int, num: int) -> History:
    dice = np.random.default_rng(seed)
    scores = dice.dirichlet(np.full(EXPERTS, 0.3), (num, LAYERS)).astype(np.float32)
    chosen = np.argsort(-scores, axis=2)[..., :TOP_K]
    embedding = dice.standard_normal((num, 4)).astype(np.float32)
    return History(np.arange(num), np.zeros(num, np.bool_), chosen, scores, embedding)


@pytest.mark.parametrize("kind", ["trajectory", "semantic"])
def test_a_map_that_was_seen_before_is_found_and_names_what_is_needed(kind: str) -> None:
    seen, other = rows(0, 20), rows(1, 20)
    store = MapStore(ModelShape((EXPERTS,) * LAYERS, (TOP_K,) * LAYERS), 40, quota=1.0)
    store.add(seen.scores, seen.requests, seen.embedding)
    similar, right = fmoe.matched(store, seen, kind)
    assert similar == pytest.approx(np.ones(20), abs=1e-5) and right == pytest.approx(np.ones(20))
    similar, right = fmoe.matched(store, other, kind)
    assert similar.max() < 0.999 and right.mean() < 0.6, "chance is a quarter"


def test_similarity_that_has_nothing_to_do_with_hits_does_not_hold() -> None:
    dice = np.random.default_rng(0)
    pairs = []
    for _ in range(24):
        similar = dice.random(30).astype(np.float32)
        pairs.append((similar, (similar + 0.1 * dice.random(30)).astype(np.float32)))
    x, y = (np.concatenate(values) for values in zip(*pairs, strict=True))
    result = fmoe.pearson(pairs)
    assert result.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-4)
    judged = claim("fmoe:8", "by trajectory, as in the paper")
    assert holds(judged, fmoe.PEARSON.name, "trajectory", result)
    strangers = fmoe.pearson([(similar, dice.permutation(right)) for similar, right in pairs])
    assert not holds(judged, fmoe.PEARSON.name, "trajectory", strangers)


def request(experts: list[int], times: int) -> np.ndarray:
    counts = np.zeros((LAYERS, 100), np.int64)
    counts[:, experts] = times
    return counts


def test_few_experts_used_often_are_few_and_all_of_them_are_not() -> None:
    judged = claim("moe-infinity:4.1", "a request uses fewer than 5 % of the experts repeatedly")
    few = [moe_infinity.used(request([at, at + 1], 9)) for at in range(20)]
    assert few == pytest.approx([0.02] * 20)
    assert moe_infinity.used(request(list(range(100)), 1)) == 0, "once is not repeatedly"
    name = moe_infinity.REUSED.name
    assert holds(judged, name, "a request", Sample.of(few))
    assert not holds(judged, name, "a request", Sample.of([moe_infinity.used(request(list(range(50)), 2))] * 20))


def test_use_is_uniform_where_each_request_uses_others_and_not_where_all_use_the_same() -> None:
    judged = claim("moe-infinity:4.1", "merged over requests use is uniform, to 5 %")
    rest = moe_infinity.evenness([request([at], 9) for at in range(100)])
    same = moe_infinity.evenness([request([at % 3], 9) for at in range(100)])
    assert rest.value == pytest.approx(1.0)
    assert same.value == pytest.approx(np.log2(3) / np.log2(100), abs=1e-3)
    name = moe_infinity.EVEN.name
    assert holds(judged, name, "all requests", rest) and not holds(judged, name, "all requests", same)

"""What is a hit, of which phase, and in how many bytes (docs/conventions.md, Hit)."""

from __future__ import annotations

import random
import statistics

import pytest

from expertly.core.messages import Phase, Prediction, RouterRan
from expertly.scheduler.counters import Correlation, LayerCounters, PhaseCounters
from tests.scheduler.drive import geometry, run_layer, scheduler


def count(router: RouterRan, here: dict[int, int]) -> LayerCounters:
    """Counters after one demand; `here`: segments (of 4, 100 bytes each) of the experts not wholly resident."""
    counters = LayerCounters()
    missing = [position for position, expert in enumerate(router.experts) if expert in here]
    counters.count_demand(router, missing, [here[router.experts[i]] for i in missing], 400, 4)
    return counters


def test_all_some_or_none_of_an_experts_segments() -> None:
    counters = count(RouterRan(0, [7, 2, 5], [1, 1, 1], [True] * 3, 1), {2: 3, 5: 0})
    decode = counters.of(Phase.DECODE)
    assert (decode.hits, decode.partial_hits, decode.misses) == (1, 1, 1)
    assert (decode.demanded_nbytes, decode.hit_nbytes) == (1200, 700)
    rates = {name: rate for name, rate in decode.rates().items() if rate is not None}
    assert rates == {"hit_rate": 1 / 3, "partial_hit_rate": 1 / 3, "byte_hit_rate": 700 / 1200}
    assert counters.of(Phase.PREFILL) == PhaseCounters()


Y, N = True, False


@pytest.mark.parametrize(
    ("tokens", "decode", "batch", "decoded", "prefilled"),
    [
        ([500, 1, 1], [N, N, N], 500, (0, 0, 0), (1, 1, 1)),  # an expert counts once however many tokens chose it
        ([1, 1, 1], [Y, Y, Y], 1, (1, 1, 1), (0, 0, 0)),
        ([5, 1, 2], [N, Y, N], 6, (0, 1, 0), (1, 0, 1)),  # each expert in its own phase
        ([0, 0, 0], [Y, Y, Y], 0, (0, 0, 0), (0, 0, 0)),  # pads demand nothing
        ([0, 3, 0], [N, N, N], 3, (0, 0, 0), (0, 1, 0)),
        ([1, 0, 2], [Y, Y, N], 3, (1, 0, 0), (0, 0, 1)),
    ],
)
def test_counts_by_phase(
    tokens: list[int], decode: list[bool], batch: int, decoded: tuple[int, ...], prefilled: tuple[int, ...]
) -> None:
    """Hits, partial hits and misses of expert 1, here; 2, of which half is here; and 3, which is absent."""
    counters = count(RouterRan(0, [1, 2, 3], tokens, decode, batch), {2: 2, 3: 0})
    for one, expected in ((counters.decode, decoded), (counters.prefill, prefilled)):
        assert (one.hits, one.partial_hits, one.misses) == expected
        assert one.demanded_nbytes == 400 * sum(expected)
        assert one.hit_nbytes == 400 * expected[0] + 200 * expected[1]


def predicted(layer: int, distance: int, experts: list[int], confidence: float | None = None) -> Prediction:
    return Prediction(layer, experts, [1.0 / (1 + i) for i in range(len(experts))], distance, confidence)


def test_goodpred_is_of_each_layer_and_distance() -> None:
    """GOODPRED_i(k) = ACCURACY_i(k) x FETCHRATE_i(k) (ProMoE, section 4), worked out by hand."""
    layer = LayerCounters()
    resident = [expert in (4, 5) for expert in range(8)]
    layer.decode.count_prediction(predicted(3, 10, [4, 1, 6, 2]), {4, 6, 7}, resident, 2)  # 2 of 4 right, 1 there
    layer.decode.count_prediction(predicted(3, 10, [4, 5, 7, 0]), {4, 6, 7}, resident, 2)  # 2 of 4 right, 2 there
    layer.decode.count_prediction(predicted(3, 2, [5, 7]), {4, 6, 7}, resident, 2)  # 1 of 2 right, 1 there
    rates = layer.decode.goodpred()
    assert rates["accuracy_by_distance"] == {"2": 1 / 2, "10": 4 / 8}
    assert rates["fetch_rate_by_distance"] == {"2": 1 / 2, "10": 3 / 8}
    assert rates["goodpred_by_distance"] == {"2": 1 / 4, "10": 4 / 8 * 3 / 8}
    assert list(rates["goodpred_by_distance"]) == ["2", "10"], "by rising distance, not as texts are sorted"
    assert (rates["prediction_accuracy"], rates["fetch_rate"], rates["goodpred"]) == (5 / 10, 4 / 10, 5 / 10 * 4 / 10)
    both = PhaseCounters()
    both.add(layer.decode)
    both.add(layer.decode)
    assert both.by_distance == {10: (16, 8, 6), 2: (4, 2, 2)}
    assert both.rates_by_distance() == layer.decode.rates_by_distance()


def test_confidence_is_correlated_with_the_hit_rate_of_the_surest_experts() -> None:
    """Of layer 1, at distance 2 (when the iteration began) and 1 (later); top-2, so the third does not matter."""
    nowhere = [False] * 8
    says = [(0.9, [1, 2, 7], 1.0), (0.5, [1, 7, 2], 0.5), (0.2, [7, 6, 1], 0.0), (0.6, [2], 0.5), (0.4, [], 0.0)]
    for distance, kind in ((2, "semantic"), (1, "trajectory")):
        counters, other = PhaseCounters(), PhaseCounters()
        for number, (confidence, experts, _) in enumerate(says):
            half = other if number % 2 else counters
            half.count_prediction(predicted(1, distance, experts, confidence), {1, 2}, nowhere, 2)
        counters.count_prediction(predicted(1, distance, [1, 2]), {1, 2}, nowhere, 2)  # does not say how sure
        counters.count_prediction(predicted(1, distance, [1, 2], 0.1), set(), nowhere, 2)  # only pads
        counters.add(other)
        expected = statistics.correlation([sure for sure, _, _ in says], [right for _, _, right in says])
        rates = counters.rates()
        assert rates[f"similarity_correlation_{kind}"] == pytest.approx(expected)
        assert (
            rates["similarity_correlation_trajectory" if kind == "semantic" else "similarity_correlation_semantic"]
            is None
        )


def test_what_prefill_loads_is_counted_as_prefill() -> None:
    shape = geometry(layers=1, experts=8, top_k=2)
    control = scheduler(shape, 6 / 8)
    ran = run_layer(control, 0, list(range(8)), decode=False)
    counters, nbytes = control.counters[0], shape.layers[0].expert_nbytes
    assert counters.decode == PhaseCounters()
    assert counters.prefill.loaded_nbytes == len(ran.loads) * nbytes
    assert counters.prefill.evicted_nbytes == 0


# -- correlations --------------------------------------------------------------------------------------------------


def correlation_of(pairs: list[tuple[float, float]]) -> Correlation:
    correlation = Correlation()
    for x, y in pairs:
        correlation.add(x, y)
    return correlation


@pytest.mark.parametrize("seed", range(5))
def test_a_correlation_is_pearsons_however_it_is_cut(seed: int) -> None:
    dice = random.Random(seed)
    slope = dice.uniform(-2, 2)
    pairs = [(x, slope * x + dice.gauss(0, 0.3)) for x in (dice.random() + 100 * seed for _ in range(500))]
    expected = statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    total, start = Correlation(), 0
    while start < len(pairs):
        stop = start + dice.randint(0, 90)
        total.merge(correlation_of(pairs[start:stop]))
        start = stop
    assert total.pearson() == pytest.approx(expected, abs=1e-9) and total.count == 500


@pytest.mark.parametrize("pairs", [[], [(1, 2)], [(1, 2), (1, 3)], [(1, 2), (3, 2)], [(0.1, 0.3)] * 50])
def test_constant_series_have_no_correlation(pairs: list[tuple[float, float]]) -> None:
    total = correlation_of(pairs)
    total.merge(correlation_of(pairs))
    assert total.pearson() is None

"""What is a hit, of which phase, and in how many bytes (docs/conventions.md, Hit)."""

from __future__ import annotations

from expertly.core.messages import Phase, RouterRan
from expertly.scheduler.counters import LayerCounters, PhaseCounters
from tests.scheduler.drive import geometry, made, one_token, prediction, run, run_layer, scheduler


def count(router: RouterRan, present: dict[int, int]) -> LayerCounters:
    """Counters after one demand; `present`: segments (of 4, 96 bytes each) of the experts not wholly resident."""
    cache = scheduler(geometry(layers=1, top_k=3, segments=4), 1.0).cache
    missing = [position for position, expert in enumerate(router.experts) if expert in present]
    cache.count_demand(router, missing, [present[router.experts[i]] for i in missing])
    return cache.counters[0]


def test_all_some_or_none_of_an_experts_segments() -> None:
    counters = count(RouterRan(0, [7, 2, 5], [1, 1, 1], [True] * 3, 1), {2: 3, 5: 0})
    decode = counters.of(Phase.DECODE)
    assert (decode.hits, decode.partial_hits, decode.misses) == (1, 1, 1)
    assert (decode.demanded_nbytes, decode.hit_nbytes) == (12 * 96, 7 * 96)
    rates = {name: rate for name, rate in decode.rates().items() if rate is not None}
    assert rates == {"hit_rate": 1 / 3, "partial_hit_rate": 1 / 3, "byte_hit_rate": 7 / 12}
    assert counters.of(Phase.PREFILL) == PhaseCounters()
    twice = LayerCounters.from_dict(counters.as_dict())
    twice.add(counters)
    assert (twice.decode.hits, twice.decode.hit_nbytes, twice.prefill) == (2, 14 * 96, PhaseCounters())


def test_goodpred_is_accuracy_times_fetch_rate() -> None:
    """GOODPRED = ACCURACY x FETCHRATE (ProMoE, section 4), worked out by hand: 4 and 5 are resident, 4, 6, 7 needed."""
    control = made(geometry(layers=2, experts=8, top_k=3), [4, 4], 3)
    run(control, one_token(1, [4, 5]))
    control.predict(prediction(1, [4, 1, 6, 2], distance=1))  # 2 of 4 right, 1 there
    control.predict(prediction(1, [5, 7], distance=2))  # 1 of 2 right, 1 there
    run(control, one_token(1, [4, 6, 7]))
    rates = control.counters[1].decode.rates()
    assert (rates["prediction_accuracy"], rates["fetch_rate"], rates["goodpred"]) == (3 / 6, 2 / 6, 3 / 6 * 2 / 6)
    assert rates["recall"] == 3 / 6, "of three needed, for each of two predictions"


def test_evictions_count_in_the_phase_that_needs_the_room() -> None:
    """Four are kept: a prompt evicts two of them, and then a token one."""
    shape = geometry(layers=1, experts=8, top_k=2)
    control = scheduler(shape, 6 / 8, "on-demand")
    for experts, decode in (([0, 1, 2, 3], False), ([4, 5], False), ([6], True)):
        run_layer(control, 0, experts, decode=decode)
    counters, nbytes = control.counters[0], shape.layers[0].expert_nbytes
    assert (counters.prefill.evicted_nbytes, counters.decode.evicted_nbytes) == (2 * nbytes, nbytes)

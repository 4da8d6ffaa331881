"""What the simulator leaves out is measured of each kind of part, and added where it belongs."""

from __future__ import annotations

import pytest

from expertly.lab.playing import RecordedRequest
from expertly.lab.tune.search import Deadline
from expertly.lab.tune.verdict import calibrate, representatives
from tests.lab.tune.toys import REQUESTS, FakeClock, FakePlayer, candidate

LRU, LFU, LCP = candidate("lru"), candidate("lfu"), candidate("lcp")
AHEAD, LCP_AHEAD = candidate("lru:prediction=lookahead"), candidate("lcp:prediction=lookahead")
SPECULATIVE = candidate("lcp:prediction=speculative")


def test_the_best_of_each_kind_is_run_if_it_is_faster() -> None:
    scored = {LRU: 1.0, LFU: 1.1, LCP: 0.9, AHEAD: 0.7, LCP_AHEAD: 0.6, SPECULATIVE: 0.8}
    assert representatives(scored.items(), LRU, 1.0) == [LCP_AHEAD, SPECULATIVE, LCP], "what may win first"


def calibrated(simulated, measured, limit: float = 1e6, others=(LCP_AHEAD, LCP)):
    """By seconds of a step; a request's steps take nine tenths of it."""
    clock = FakeClock()
    steps = len(REQUESTS[0].tokens) - REQUESTS[0].num_prompt
    seconds = {one: None if step is None else step * steps / 0.9 for one, step in measured.items()}
    player = FakePlayer(clock, lambda one, count: seconds[one])
    return calibrate(player, LRU, others, simulated.get, REQUESTS[0], Deadline.after(clock, limit))


@pytest.mark.parametrize("others", [(LCP, LCP_AHEAD), (LCP_AHEAD, LCP)])
def test_a_prediction_has_what_the_eviction_does_not_explain(others) -> None:
    """Whichever of them ran first."""
    simulated = {LRU: 0.10, LCP: 0.09, LCP_AHEAD: 0.05}
    found = calibrated(simulated, {LRU: 0.20, LCP: 0.22, LCP_AHEAD: 0.27}, others=others)
    assert found.overhead_s(LRU) == 0
    assert found.overhead_s(LCP) == pytest.approx(0.03), "20 ms slower, simulated 10 ms faster"
    assert found.overhead_s(AHEAD) == pytest.approx(0.12 - 0.03)
    assert found.overhead_s(LCP_AHEAD) == pytest.approx(0.12)
    assert found.overhead_s(LFU) == 0, "nobody measured it"


def test_a_base_that_was_as_slow_is_noise() -> None:
    clock = FakeClock()
    steps = {LRU: [0.20, 0.40, 0.20], LCP: [0.35], LFU: [0.35]}
    player = FakePlayer(clock, lambda one, count: steps[one][count - 1] * 3 / 0.9)
    found = calibrate(
        player, LRU, [LCP, LFU], {LRU: 0.1, LCP: 0.1, LFU: 0.1}.get, REQUESTS[0], Deadline.after(clock, 1e6)
    )
    assert (found.overhead_s(LCP), found.overhead_s(LFU)) == (0, 0)


def test_nothing_is_made_faster() -> None:
    found = calibrated({LRU: 0.10, LCP: 0.09}, {LRU: 0.20, LCP: 0.10}, others=[LCP])
    assert found.overhead_s(LCP) == 0


def test_what_fails_is_named_and_the_rest_goes_on() -> None:
    found = calibrated({LRU: 0.1, LCP: 0.1, LCP_AHEAD: 0.1}, {LRU: 0.2, LCP: None, LCP_AHEAD: 0.3})
    assert "cannot run here" in found.failed[LCP]
    assert found.overhead_s(LCP_AHEAD) == pytest.approx(0.1)


def test_it_ends_when_time_is_up() -> None:
    simulated, measured = {LRU: 0.1, LCP: 0.1, LCP_AHEAD: 0.1}, {LRU: 0.2, LCP: 0.3, LCP_AHEAD: 0.3}
    found = calibrated(simulated, measured, limit=1.0, others=[LCP, LCP_AHEAD])
    assert set(found.overheads_s) == {("eviction", "lcp")}


def test_with_little_time_it_is_the_predictor_that_is_measured() -> None:
    """What predicts looks best in the simulator, and takes most of what that leaves out."""
    scored = {LRU: 1.0, LCP: 0.9, LCP_AHEAD: 0.6}
    order = representatives(scored.items(), LRU, 1.0)
    measured = {LRU: 0.2, LCP: 0.2, LCP_AHEAD: 0.3}
    found = calibrated({LRU: 0.1, LCP: 0.09, LCP_AHEAD: 0.06}, measured, limit=1.0, others=order)
    assert set(found.overheads_s) == {("prediction", "lookahead")}
    assert found.overhead_s(LCP_AHEAD) == pytest.approx(0.14) == found.overhead_s(AHEAD)
    assert found.unmeasured(AHEAD) == [] == found.unmeasured(LRU)
    assert found.unmeasured(LCP_AHEAD) == [("eviction", "lcp")] == found.unmeasured(LCP)
    gated = candidate("lru:prediction=lookahead:gate=confidence")
    assert found.unmeasured(gated) == [("prediction", "lookahead, gate confidence")], (
        "a gate may spare it: nobody knows"
    )


def test_a_request_without_a_step_tells_nothing() -> None:
    clock = FakeClock()
    player = FakePlayer(clock, lambda one, count: 1.0)
    found = calibrate(
        player, LRU, [LCP], {LRU: 0.1, LCP: 0.1}.get, RecordedRequest((1, 2), 2), Deadline.after(clock, 1e6)
    )
    assert found.overheads_s == {} and player.played == []

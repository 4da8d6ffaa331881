"""Which of the best few is taken: by turns measured side by side, never on luck, and only as far as time goes."""

from __future__ import annotations

from random import Random

import pytest

from expertly.core.errors import ConfigError
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.tune.search import Candidate, Deadline
from expertly.lab.tune.verdict import (
    MAX_TURNS,
    MIN_TURNS,
    Verdict,
    calibrate,
    decide,
    median_interval,
    representatives,
    take_turns,
)
from tests.lab.tune.toys import REQUESTS, FakeClock, FakePlayer, candidate

LRU, LFU, LCP = candidate("lru"), candidate("lfu"), candidate("lcp")


def decided(seconds, limit: float = 1000.0, default=LRU, found=(LFU, LCP)) -> tuple[Verdict, FakePlayer]:
    clock = FakeClock()
    player = FakePlayer(clock, seconds)
    return decide(player, found, LRU, default, REQUESTS, Deadline.after(clock, limit)), player


def test_the_fastest_is_taken_with_what_it_gained() -> None:
    times = {LRU: 1.0, LFU: 0.8, LCP: 0.9}
    verdict, player = decided(lambda one, count: times[one], default=LCP)
    assert verdict.chosen == LFU and verdict.is_verified
    over_default, over_base = verdict.gains([LCP, LRU])
    assert (over_base.over, over_base.ratio, over_base.high) == ("lru", pytest.approx(0.8), pytest.approx(0.8))
    assert (over_default.over, over_default.ratio) == ("lcp", pytest.approx(0.8 / 0.9))
    assert over_base.num_turns >= MIN_TURNS
    assert {request for _, request in player.played} == set(REQUESTS)


@pytest.mark.parametrize("times", [[1.3], [0.7, 1.4, 0.8, 1.3, 0.9, 1.2]])
def test_where_nothing_is_faster_or_only_now_and_then_the_base_is_taken(times: list[float]) -> None:
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else times[count % len(times)])
    assert verdict.chosen == LRU and verdict.is_verified
    assert "nothing was measurably faster" in verdict.why


def test_a_heat_of_few_turns_is_followed_by_enough_of_one() -> None:
    """All are slower in it, and it is too short to say so: what time is left says it of the best."""
    found = [candidate(f"lfu:segments={number}") for number in (1, 2, 4, 8)]
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else 1.3, limit=60.0, found=found)
    assert verdict.heat is not None and verdict.heat.count < MIN_TURNS
    assert verdict.chosen == LRU and verdict.is_verified
    assert verdict.final is not None and verdict.final.count >= MIN_TURNS


def test_faster_in_most_turns_alone_is_not_sure_enough() -> None:
    """Three of five are: its median is less, and with 95 % confidence it may be more."""
    times = [0.9, 1.3, 0.9, 0.9, 1.3]
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else times[count % len(times)], found=(LFU,))
    assert verdict.final is not None
    gain = verdict.final.gain(LFU, LRU)
    assert gain.ratio < 1 and gain.tpot_ratio < 1 and gain.high > 1
    assert verdict.chosen == LRU and verdict.is_verified


def test_luck_in_the_heat_is_no_reason_to_be_taken() -> None:
    def seconds(one, count):
        if one == LFU:
            return 0.8 if count < 30 else 1.2
        return 1.0 if one == LRU else 1.1

    verdict, _ = decided(seconds, limit=200.0)
    assert verdict.heat is not None and verdict.heat.gain(LFU, LRU).ratio < 0.9
    assert verdict.chosen == LRU


def test_slower_in_decode_is_slower() -> None:
    """A prompt that is read faster does not make up for tokens that come slower."""
    clock = FakeClock()

    class Player(FakePlayer):
        def play(self, candidate, request):
            played = super().play(candidate, request)
            if candidate == LFU:
                return type(played)(0.0, tuple(1.01 * step for step in played.steps_s))
            return played

    player = Player(clock, lambda one, count: 1.0)
    verdict = decide(player, [LFU], LRU, LRU, REQUESTS, Deadline.after(clock, 1000.0))
    assert verdict.final is not None and verdict.final.gain(LFU, LRU).ratio < 1
    assert verdict.chosen == LRU


def test_what_cannot_run_is_left_out_and_named() -> None:
    verdict, _ = decided(lambda one, count: {LRU: 1.0, LFU: None, LCP: 0.9}[one])
    assert verdict.chosen == LCP
    assert "cannot run here" in verdict.failed[LFU]


@pytest.mark.parametrize("found", [(LFU,), (LFU, LCP)])
def test_where_nothing_else_runs_it_is_the_base(found) -> None:
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else None, found=found)
    assert verdict.chosen == LRU and verdict.is_verified and "nothing else could be run" in verdict.why


def test_the_base_must_run() -> None:
    with pytest.raises(ConfigError, match="cannot run here"):
        decided(lambda one, count: None)


def test_in_little_time_fewer_run() -> None:
    times = {LRU: 1.0, LFU: 0.8, LCP: 0.7}
    verdict, player = decided(lambda one, count: times[one], limit=3 + 2 * 3 * MIN_TURNS)
    assert {name for name, _ in player.played} == {"lru", "lfu"}, "the best by the simulator is what time goes to"
    assert verdict.chosen == LFU and verdict.heat is None


def test_without_time_nothing_is_verified() -> None:
    verdict, player = decided(lambda one, count: 1.0, limit=0.0)
    assert (verdict.chosen, verdict.is_verified, player.played) == (LRU, False, [])
    verdict, player = decided(lambda one, count: 1.0 if one == LRU else 0.5, limit=6.0)
    assert (verdict.chosen, verdict.is_verified) == (LRU, False)
    assert "there was time for" in verdict.why


def test_turns_end_in_time_and_take_turns() -> None:
    clock = FakeClock()
    player = FakePlayer(clock, lambda one, count: 1.0)
    turns = take_turns(player, LRU, [LFU, LCP], REQUESTS, Deadline.after(clock, 30.0))
    assert clock.now <= 30.0 and turns.count == 9
    firsts = [name for name, _ in player.played[3::3]]
    assert firsts[:4] == ["lru", "lfu", "lcp", "lru"]
    assert take_turns(player, LRU, [LFU], REQUESTS, Deadline.after(clock, 1e6)).count == MAX_TURNS


def test_answers_of_one_token_have_no_decode_to_be_slower_in() -> None:
    """Where all are, prompts decide; where some are, the others say what a token takes."""
    clock, short = FakeClock(), RecordedRequest((1, 2), 2)

    class Player(FakePlayer):
        def play(self, candidate: Candidate, request: RecordedRequest) -> Played:
            if request != short:
                return super().play(candidate, request)
            self.clock.now += 1.0
            return Played(0.8 if candidate == LFU else 1.0, ())

    player = Player(clock, lambda one, count: 1.0 if one == LRU else 0.9)
    verdict = decide(player, [LFU], LRU, LRU, [short], Deadline.after(clock, 1000.0))
    assert verdict.chosen == LFU
    (gain,) = verdict.gains([LRU])
    assert (gain.ratio, gain.tpot_ratio) == (pytest.approx(0.8), 1.0)
    turns = take_turns(player, LRU, [LFU], [short, REQUESTS[0]], Deadline.after(clock, 50.0))
    assert turns.tpot_s(LRU) == pytest.approx(0.9 / 3) and turns.gain(LFU, LRU).tpot_ratio == pytest.approx(0.9)
    assert turns.gain(LFU, LRU).ratio == pytest.approx((0.8 + 0.9) / 2)


# -- the median, and how sure it is ----------------------------------------------------------------------------------


def test_the_interval_of_a_median() -> None:
    """Few values say from the least to the largest; of many, outliers do not move it."""
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 100.0]
    assert median_interval(values)[1] == median_interval([*values[:-1], 1.9])[1] == 1.8


@pytest.mark.parametrize("count", [5, 8, 20])
def test_each_end_is_on_its_side_in_nineteen_cases_of_twenty(count: int) -> None:
    dice = Random(0)
    intervals = [median_interval([dice.gauss(0, 1) for _ in range(count)]) for _ in range(2000)]
    too_high = sum(low > 0 for low, _ in intervals) / len(intervals)
    too_low = sum(high < 0 for _, high in intervals) / len(intervals)
    assert too_high < 0.06 and too_low < 0.06
    assert too_high > 0.005  # it is no wider than it must be


# -- what the simulator leaves out, of each kind of part -------------------------------------------------------------


AHEAD, LCP_AHEAD = candidate("lru:prediction=lookahead"), candidate("lcp:prediction=lookahead")
SPECULATIVE = candidate("lcp:prediction=speculative")


def test_the_best_of_each_kind_is_run_if_it_is_faster() -> None:
    scored = {LRU: 1.0, LFU: 1.1, LCP: 0.9, AHEAD: 0.7, LCP_AHEAD: 0.6, SPECULATIVE: 0.8}
    assert representatives(scored.items(), LRU, 1.0) == [LCP_AHEAD, SPECULATIVE, LCP], "what may win first"


def calibrated(simulated, measured, limit: float = 1e6, others=(LCP_AHEAD, LCP)):
    """By seconds of a step, or those of each time that it runs; a request's steps take nine tenths of it."""
    steps = len(REQUESTS[0].tokens) - REQUESTS[0].num_prompt

    def seconds(one, count):
        step = measured[one][count - 1] if isinstance(measured[one], list) else measured[one]
        return None if step is None else step * steps / 0.9

    clock = FakeClock()
    player = FakePlayer(clock, seconds)
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


def test_a_base_that_was_as_slow_is_noise_and_nothing_is_made_faster() -> None:
    steps = {LRU: [0.20, 0.40, 0.20], LCP: [0.35], LFU: [0.35]}
    found = calibrated({LRU: 0.1, LCP: 0.1, LFU: 0.1}, steps, others=[LCP, LFU])
    assert (found.overhead_s(LCP), found.overhead_s(LFU)) == (0, 0)
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
    gated = candidate("lru:prediction=lookahead:gate=measured")
    assert found.unmeasured(gated) == [("prediction", "lookahead, gate measured")], "a gate may spare it: nobody knows"


def test_a_request_without_a_step_tells_nothing() -> None:
    clock = FakeClock()
    player, request = FakePlayer(clock, lambda one, count: 1.0), RecordedRequest((1, 2), 2)
    found = calibrate(player, LRU, [LCP], {LRU: 0.1, LCP: 0.1}.get, request, Deadline.after(clock, 1e6))
    assert found.overheads_s == {} and player.played == []

"""Which of the best few is taken: by turns measured side by side, never on luck, and only as far as time goes."""

from __future__ import annotations

import pytest

from expertly.core.errors import ConfigError
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.tune.search import Candidate, Deadline
from expertly.lab.tune.verdict import MAX_TURNS, MIN_TURNS, Verdict, decide, take_turns
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


def test_where_nothing_is_faster_the_base_is_taken_and_it_says_so() -> None:
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else 1.3)
    assert verdict.chosen == LRU and verdict.is_verified
    assert "nothing was measurably faster" in verdict.why


def test_a_heat_of_few_turns_is_followed_by_enough_of_one() -> None:
    """All are slower in it, and it is too short to say so: what time is left says it of the best."""
    found = [candidate(f"lfu:segments={number}") for number in (1, 2, 4, 8)]
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else 1.3, limit=60.0, found=found)
    assert verdict.heat is not None and verdict.heat.count < MIN_TURNS
    assert verdict.chosen == LRU and verdict.is_verified
    assert verdict.final is not None and verdict.final.count >= MIN_TURNS


def test_what_is_faster_now_and_then_is_not_taken() -> None:
    noise = [0.7, 1.4, 0.8, 1.3, 0.9, 1.2]
    verdict, _ = decided(lambda one, count: 1.0 if one == LRU else noise[count % len(noise)])
    assert verdict.chosen == LRU


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

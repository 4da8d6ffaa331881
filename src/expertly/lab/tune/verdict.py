"""Decides which candidate is chosen, by measurements on the engine.

The simulator does not know how much processor time predicting and choosing take: that is measured for each kind of
predictor and eviction first (`Calibration`). Then the best few run the same requests in turn, so that other load on the
machine slows all of them alike (`Turns`). The best of them runs once more against the base, so that a lucky first run
does not decide (`decide`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import comb
from typing import Protocol

from expertly.core.errors import ExpertlyError
from expertly.core.units import format_ratio
from expertly.engine.choice import Gain
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.tune.search import Candidate, Deadline
from expertly.sim.study import Progress

# -- what the simulator leaves out -----------------------------------------------------------------------------------


QUIET = 0.25
"""The share of a request's fastest steps that count as undisturbed; the slowest of these is what a step takes."""

Kind = tuple[str, str]
"""A part ("prediction" or "eviction") and the policy that fills it."""


@dataclass(slots=True)
class Calibration:
    """Seconds that a decode step takes beyond its simulated time, by predictor and eviction, relative to the base."""

    base: Candidate
    overheads_s: dict[Kind, float] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)

    def overhead_s(self, candidate: Candidate) -> float:
        """A candidate's overhead per step. A kind that was not measured counts as 0; running the finalists shows what
        it really costs.
        """
        return sum(self.overheads_s.get(kind, 0.0) for kind in kinds_of(candidate))

    def unmeasured(self, candidate: Candidate) -> list[Kind]:
        """The candidate's kinds without a measured overhead: time ran out, it failed, or no preset has that kind."""
        known = kinds_of(self.base)
        return [kind for kind in kinds_of(candidate) if kind not in known and kind not in self.overheads_s]


def kinds_of(candidate: Candidate) -> list[Kind]:
    system = candidate.system
    if system.keeps_everything:
        return [("eviction", "none")]
    gated = "" if system.gate == "none" else f", gate {system.gate}"  # which may spare some of the predicting
    return [("eviction", system.eviction), ("prediction", system.prediction + gated)]


def representatives(scored: Collection[tuple[Candidate, float]], base: Candidate, base_s: float) -> list[Candidate]:
    """For each kind that the base does not have, the preset with that kind that was simulated to be fastest, if it is
    faster than the base (overheads only make it slower). Evictions are represented by systems that do not predict,
    where there are any. The fastest come first, because time may not suffice for all.
    """
    found: dict[Kind, Candidate] = {}
    known = set(kinds_of(base))
    in_order = sorted(scored, key=lambda pair: (pair[0].system.prediction != "none", pair[1], pair[0].complexity))
    for candidate, seconds in in_order:
        new = [kind for kind in kinds_of(candidate) if kind not in known and kind not in found]
        if new and seconds < base_s:
            found |= dict.fromkeys(new, candidate)
    chosen = set(found.values())
    return [one for one, _ in sorted(scored, key=lambda pair: (pair[1], pair[0].complexity)) if one in chosen]


def calibrate(
    player: CandidatePlayer,
    base: Candidate,
    candidates: Sequence[Candidate],
    simulated_step_s: Callable[[Candidate], float | None],
    request: RecordedRequest,
    deadline: Deadline,
) -> Calibration:
    """Measure each candidate between two runs of the base, of which the slower counts, so that noise does not look like
    overhead. What fails or finds no time left gets no overhead; overheads are never negative. In a candidate of two new
    kinds, prediction is charged with what the eviction's own measurement does not explain, in whatever order they ran.
    A request without decode steps tells nothing.
    """
    calibration = Calibration(base)
    base_s = simulated_step_s(base)
    if len(request.tokens) == request.num_prompt:
        return calibration
    beyond_s: dict[Candidate, float] = {}
    before_s = _quiet_step_s(player.play(base, request))
    for candidate in candidates:
        if deadline.is_over or base_s is None:
            break
        try:
            played = player.play(candidate, request)
        except ExpertlyError as error:
            calibration.failed[candidate] = str(error)
            continue
        simulated = simulated_step_s(candidate)
        if simulated is None:
            continue
        after_s = _quiet_step_s(player.play(base, request))
        measured, before_s = _quiet_step_s(played) - max(before_s, after_s), after_s
        beyond_s[candidate] = measured - (simulated - base_s)
    for candidate in sorted(beyond_s, key=lambda one: one.system.prediction != "none"):
        unknown = calibration.unmeasured(candidate)
        if unknown:
            explained_s = calibration.overhead_s(candidate)
            calibration.overheads_s[unknown[-1]] = max(0.0, beyond_s[candidate] - explained_s)
    return calibration


def _quiet_step_s(played: Played) -> float:
    steps = sorted(played.steps_s)
    return steps[int(QUIET * (len(steps) - 1))]


# -- turns -----------------------------------------------------------------------------------------------------------


CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval around the median of independent values: the true median lies below the first number, or above the
    second, with a probability of at most 1 - CONFIDENCE each. With fewer than five values they are the extremes, and
    less sure. How many of n values lie above the true median is binomial with p = 1/2.
    """
    ordered = sorted(values)
    count = len(ordered)
    sums = accumulate(comb(count, number) for number in range(count))
    place = next((number for number, below in enumerate(sums) if below >= CONFIDENCE * 2**count), count - 1)
    return ordered[count - 1 - place], ordered[place]


MIN_TURNS = 5
"""Fewer turns do not tell which of two is faster."""

MAX_TURNS = 40


class CandidatePlayer(Protocol):
    """Runs requests on candidates. It loads them when they are asked for, with filled caches."""

    def play(self, candidate: Candidate, request: RecordedRequest) -> Played: ...


@dataclass(slots=True)
class Turns:
    """Times of each candidate for the requests of all turns so far."""

    requests: Sequence[RecordedRequest]
    played: dict[Candidate, list[Played]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that failed, and why."""

    @property
    def count(self) -> int:
        return min((len(played) for played in self.played.values()), default=0)

    def gain(self, candidate: Candidate, over: Candidate) -> Gain:
        """Medians over the turns of each request, summed over the requests, relative to another candidate's; and the
        interval of the turns' ratios. Where no answer has a second token the ratio of TPOT is 1.
        """
        pairs = list(zip(self.played[candidate], self.played[over], strict=False))
        low, high = median_interval([one.seconds / other.seconds for one, other in pairs])
        tpot, of_over = self.tpot_s(candidate), self.tpot_s(over)
        return Gain(
            over.label,
            sum(self._typical(candidate, lambda one: one.seconds)) / sum(self._typical(over, lambda one: one.seconds)),
            low,
            high,
            tpot / of_over if tpot is not None and of_over is not None else 1.0,
            len(pairs),
        )

    def tpot_s(self, candidate: Candidate) -> float | None:
        """TPOT of a typical request; None where no answer has a second token."""
        of_requests = self._typical(candidate, lambda one: one.tpot_s)
        return statistics.mean(of_requests) if of_requests else None

    def ttft_s(self, candidate: Candidate) -> float:
        return statistics.mean(self._typical(candidate, lambda one: one.ttft_s))

    def _typical(self, candidate: Candidate, of: Callable[[Played], float | None]) -> list[float]:
        """Of each request the median over the turns; requests of which nothing is known are left out."""
        played, num = self.played[candidate][: self.count], len(self.requests)
        found = ([of(one) for one in played[number::num]] for number in range(num))
        known = ([value for value in values if value is not None] for values in found)
        return [statistics.median(values) for values in known if values]


def take_turns(
    player: CandidatePlayer,
    base: Candidate,
    others: Sequence[Candidate],
    requests: Sequence[RecordedRequest],
    deadline: Deadline,
    progress: Progress | None = None,
) -> Turns:
    """Run one request a turn on every candidate, in another order each turn. No turn begins that could not end in time,
    except the first. Each candidate is run once before, uncounted, which loads it. Candidates that fail are left out.
    Raises what running `base` raises.
    """
    turns = Turns(requests)
    player.play(base, requests[-1])
    running = [base]
    for candidate in others:
        try:
            player.play(candidate, requests[-1])
        except ExpertlyError as error:
            turns.failed[candidate] = str(error)
        else:
            running.append(candidate)
    begin, left = deadline.clock(), deadline.left_s
    for turn in range(MAX_TURNS if len(running) > 1 else 0):
        spent = deadline.clock() - begin
        if turn and spent * (turn + 1) / turn > left:
            break
        if progress is not None:
            progress("verifying", turn, MAX_TURNS)
        shift = turn % len(running)
        for candidate in (*running[shift:], *running[:shift]):
            turns.played[candidate].append(player.play(candidate, requests[turn % len(requests)]))
    return turns


def is_faster(gain: Gain) -> bool:
    """Whether a candidate was measurably faster: over all, in nearly all turns, and in decode alone."""
    return gain.num_turns >= MIN_TURNS and gain.ratio < 1 and gain.high < 1 and gain.tpot_ratio <= 1


# -- the verdict -----------------------------------------------------------------------------------------------------


WANTED_PLAYS = 60
"""How many requests should be run; they are cut short to fit that many."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice. `heat` and `final` are the measurements that led to it, None where there was no time. `is_verified`:
    there was time to verify it.
    """

    chosen: Candidate
    why: str
    is_verified: bool
    final: Turns | None = None
    heat: Turns | None = None
    failed: dict[Candidate, str] = field(default_factory=dict)

    def gains(self, over: Sequence[Candidate]) -> tuple[Gain, ...]:
        """The choice's gains over those candidates of `over` that ran beside it."""
        turns = self.final or self.heat
        if turns is None or self.chosen not in turns.played:
            return ()
        others = [one for one in dict.fromkeys(over) if one != self.chosen and one in turns.played]
        return tuple(turns.gain(self.chosen, other) for other in others)


def decide(
    player: CandidatePlayer,
    found: Sequence[Candidate],
    base: Candidate,
    default: Candidate,
    requests: Sequence[RecordedRequest],
    deadline: Deadline,
    progress: Progress | None = None,
) -> Verdict:
    """The fastest of `found` and the default if it is measurably faster than `base`, else `base`. Runs as many of
    `found` as there is time for, from the best on. Candidates that fail are left out; what running `base` raises is
    raised.
    """
    if deadline.is_over:
        return Verdict(base, "there was no time left to verify anything", is_verified=False)
    load_s, turn_s = (_seconds(player, base, requests[-1], deadline) for _ in range(2))
    share = deadline.left_s / max(turn_s * WANTED_PLAYS, 1e-9)
    if share < 1:  # on a slow machine short answers, rather than few
        requests = [request.cut(share) for request in requests]
        turn_s = _seconds(player, base, requests[-1], deadline)
    others = [one for one in dict.fromkeys([*found, default]) if one != base]
    room = int((deadline.left_s - 3 * MIN_TURNS * turn_s) // (load_s + MIN_TURNS * turn_s)) - 1
    if len(others) > max(1, room):
        kept = found[: max(1, room - 1)]
        others = [one for one in dict.fromkeys([*kept, default] if room > 1 else kept or [default]) if one != base]
    heat: Turns | None = None
    failed: dict[Candidate, str] = {}
    if len(others) > 2 or (len(others) == 2 and default not in others):
        heat = take_turns(player, base, others, requests, deadline.share(0.5), progress)
        failed |= heat.failed
        ran = [one for one in others if one not in failed]
        ran.sort(key=lambda one: heat.gain(one, base).ratio)
        if ran and heat.count >= MIN_TURNS and heat.gain(ran[0], base).ratio >= 1:
            return Verdict(base, _why_base(base, heat), heat.count >= MIN_TURNS, heat=heat, failed=failed)
        others = [one for one in dict.fromkeys([*ran[:1], default]) if one != base and one not in failed]
    final: Turns | None = None
    if others:
        final = take_turns(player, base, others, requests, deadline, progress)
        failed |= final.failed
    if final is None or len(failed.keys() & set(others)) == len(others):
        why = "nothing else could be run" if failed else "nothing was simulated to be faster"
        return Verdict(base, f"{base.label}: {why}", is_verified=True, heat=heat, failed=failed)
    ran = sorted((one for one in others if one not in failed), key=lambda one: final.gain(one, base).ratio)
    for one in ran:
        gain = final.gain(one, base)
        if is_faster(gain):
            why = f"{one.label}: {format_ratio(gain.ratio, 3)} the time of {base.label} in {gain.num_turns} turns"
            return Verdict(one, why, True, final, heat, failed)
    return Verdict(base, _why_base(base, final), final.count >= MIN_TURNS, final, heat, failed)


def _seconds(player: CandidatePlayer, candidate: Candidate, request: RecordedRequest, deadline: Deadline) -> float:
    begin = deadline.clock()
    player.play(candidate, request)
    return deadline.clock() - begin


def _why_base(base: Candidate, turns: Turns) -> str:
    if turns.count < MIN_TURNS:
        return f"{base.label}: there was time for too few turns to say anything ({turns.count} of {MIN_TURNS})"
    return f"{base.label}: nothing was measurably faster in {turns.count} turns"

"""Candidates against each other on the engine: the same requests, in turn, so that what else the machine does meanwhile
slows all of them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Protocol

from expertly.core.errors import ExpertlyError
from expertly.engine.choice import Gain
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.tune.candidates import Candidate
from expertly.lab.tune.deadline import Deadline

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` is at most the true median, and `high` at least it, in CONFIDENCE of all cases each; with fewer than five
    values they are the least and the largest, which is less sure.
    """

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Of independent values, by their order: how many of n lie above the median is a fair coin thrown n times."""
    ordered = sorted(values)
    count = len(ordered)
    below = 0.0
    place = count - 1
    for number in range(count):
        below += comb(count, number) / 2**count
        if below >= CONFIDENCE:
            place = number
            break
    return Interval(statistics.median(ordered), ordered[count - 1 - place], ordered[place])


MIN_TURNS = 5
"""Fewer do not say which of two is faster."""

MAX_TURNS = 40

Progress = Callable[[str, int, int], None]


class CandidatePlayer(Protocol):
    """Runs requests with candidates, which it loads as they are asked for; their caches are filled by then."""

    def play(self, candidate: Candidate, request: RecordedRequest) -> Played: ...


@dataclass(slots=True)
class Turns:
    """What every candidate took for the requests of all turns so far."""

    requests: Sequence[RecordedRequest]
    played: dict[Candidate, list[Played]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Those that could not be run, and why."""

    @property
    def count(self) -> int:
        return min((len(played) for played in self.played.values()), default=0)

    def gain(self, candidate: Candidate, over: Candidate) -> Gain:
        """Medians over the turns of each request, summed over the requests; and how the turns' ratios are spread. Where
        no answer has a second token neither is the slower in decode.
        """
        pairs = list(zip(self.played[candidate], self.played[over], strict=False))
        ratios = median_interval([one.seconds / other.seconds for one, other in pairs])
        tpot, of_over = self.tpot_s(candidate), self.tpot_s(over)
        return Gain(
            over.label,
            sum(self._typical(candidate, lambda one: one.seconds)) / sum(self._typical(over, lambda one: one.seconds)),
            ratios.low,
            ratios.high,
            tpot / of_over if tpot is not None and of_over is not None else 1.0,
            len(pairs),
        )

    def tpot_s(self, candidate: Candidate) -> float | None:
        """Of a typical request; None where no answer has a second token."""
        of_requests = self._typical(candidate, lambda one: one.tpot_s)
        return statistics.mean(of_requests) if of_requests else None

    def ttft_s(self, candidate: Candidate) -> float:
        return statistics.mean(self._typical(candidate, lambda one: one.ttft_s))

    def _typical(self, candidate: Candidate, of: Callable[[Played], float | None]) -> list[float]:
        """The median over the turns, of each request of which it is known."""
        found = ([of(one) for one in played] for played in self._by_request(candidate).values())
        known = ([value for value in values if value is not None] for values in found)
        return [statistics.median(values) for values in known if values]

    def _by_request(self, candidate: Candidate) -> Mapping[int, list[Played]]:
        found: dict[int, list[Played]] = defaultdict(list)
        for turn, played in enumerate(self.played[candidate][: self.count]):
            found[turn % len(self.requests)].append(played)
        return found


def take_turns(
    player: CandidatePlayer,
    base: Candidate,
    others: Sequence[Candidate],
    requests: Sequence[RecordedRequest],
    deadline: Deadline,
    progress: Progress | None = None,
) -> Turns:
    """Each turn is one request, which all run, in another order each time; a turn that would not end in time is not
    begun, one is run in any case. What comes before the first counts for nothing: there all are loaded. Of the others,
    those that cannot be are left out. Raises what running `base` raises.
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
    """Whether it was measured to be: on the whole, in nearly all turns, and in decode alone."""
    return gain.num_turns >= MIN_TURNS and gain.ratio < 1 and gain.high < 1 and gain.tpot_ratio <= 1

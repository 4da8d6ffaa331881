"""Candidates against each other on the engine: the same requests, in turn, so that what else the machine does meanwhile
slows all of them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from expertly.choices import Gain
from expertly.core.errors import ExpertlyError
from expertly.tuning.candidates import Candidate
from expertly.tuning.deadline import Deadline
from expertly.tuning.interval import median_interval
from expertly.tuning.playing import Played
from expertly.tuning.workload import Request

MIN_TURNS = 5
"""Fewer do not say which of two is faster."""

MAX_TURNS = 40

Progress = Callable[[str, int, int], None]


class Player(Protocol):
    """Runs requests with candidates, which it loads as they are asked for; their caches are filled by then."""

    def play(self, candidate: Candidate, request: Request) -> Played: ...


@dataclass(slots=True)
class Turns:
    """What every candidate took for the requests of all turns so far."""

    requests: Sequence[Request]
    played: dict[Candidate, list[Played]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Those that could not be run, and why."""

    @property
    def count(self) -> int:
        return min((len(played) for played in self.played.values()), default=0)

    def gain(self, candidate: Candidate, over: Candidate) -> Gain:
        """Medians over the turns of each request, summed over the requests; and how the turns' ratios are spread."""
        pairs = list(zip(self.played[candidate], self.played[over], strict=False))
        ratios = median_interval([one.seconds / other.seconds for one, other in pairs])
        return Gain(
            over.label,
            self._typical(candidate, lambda one: one.seconds) / self._typical(over, lambda one: one.seconds),
            ratios.low,
            ratios.high,
            self._typical(candidate, lambda one: one.tpot_s) / self._typical(over, lambda one: one.tpot_s),
            len(pairs),
        )

    def tpot_s(self, candidate: Candidate) -> float:
        """Of a typical request."""
        return self._typical(candidate, lambda one: one.tpot_s) / len(self._by_request(candidate))

    def ttft_s(self, candidate: Candidate) -> float:
        return self._typical(candidate, lambda one: one.ttft_s) / len(self._by_request(candidate))

    def _typical(self, candidate: Candidate, of: Callable[[Played], float]) -> float:
        return sum(statistics.median(map(of, played)) for played in self._by_request(candidate).values())

    def _by_request(self, candidate: Candidate) -> Mapping[int, list[Played]]:
        found: dict[int, list[Played]] = defaultdict(list)
        for turn, played in enumerate(self.played[candidate][: self.count]):
            found[turn % len(self.requests)].append(played)
        return found


def take_turns(
    player: Player,
    base: Candidate,
    others: Sequence[Candidate],
    requests: Sequence[Request],
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

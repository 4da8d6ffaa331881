"""A clock that is told what time it is, a player that takes the time it is told to, and candidates."""

from __future__ import annotations

from collections.abc import Callable

from expertly.core.errors import ConfigError
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.tune.search import Candidate
from expertly.scheduler.presets import get_system

REQUESTS = (RecordedRequest((1, 2, 3, 4, 5), 2), RecordedRequest((6, 7, 8), 1))


class FakeClock:
    """Seconds; `step` pass each time that it is looked at."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class FakePlayer:
    """Takes `seconds(candidate, how often it was played)` a request, a tenth of it for the prompt."""

    def __init__(self, clock: FakeClock, seconds: Callable[[Candidate, int], float | None]) -> None:
        self.clock = clock
        self.seconds = seconds
        self.played: list[tuple[str, RecordedRequest]] = []
        self._count: dict[Candidate, int] = {}

    def play(self, candidate: Candidate, request: RecordedRequest) -> Played:
        count = self._count[candidate] = self._count.get(candidate, 0) + 1
        seconds = self.seconds(candidate, count)
        if seconds is None:
            raise ConfigError(f"system={candidate.system.name!r}: cannot run here")
        self.clock.now += seconds
        self.played.append((candidate.system.name, request))
        steps = len(request.tokens) - request.num_prompt
        return Played(0.1 * seconds, (0.9 * seconds / steps,) * steps)


def candidate(name: str) -> Candidate:
    return Candidate(get_system(name), "none")

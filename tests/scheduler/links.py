"""Links that bring spans when their dice say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from expertly.core.messages import Span


class Failure(Exception):
    """What a driver's transport or arithmetic may raise."""


class RandomLink:
    """An AheadTransport. Demands begin before guesses; what has begun arrives in any order, `chance` a poll."""

    def __init__(self, dice: random.Random, chance: float = 0.4) -> None:
        self.dice, self.chance = dice, chance
        self.demands: list[Span] = []
        self.ahead: list[Span] = []
        self.begun: list[Span] = []
        self.num_waits = 0
        self.submitted: list[Span] = []
        self.withdrawn: list[Span] = []
        self.fails: Callable[[], bool] = lambda: False

    def submit(self, spans: Sequence[Span]) -> None:
        self.submitted += spans
        self.demands += spans

    def submit_ahead(self, spans: Sequence[Span]) -> None:
        assert all(span.num_segments == 1 for span in spans), "a demand never waits for more than a segment"
        self.submitted += spans
        self.ahead += spans

    def withdraw(self, layer: int, experts: Collection[int] | None = None) -> list[Span]:
        gone = [one for one in self.ahead if one.layer == layer and (experts is None or one.expert in experts)]
        self.ahead = [span for span in self.ahead if span not in gone]
        self.withdrawn += gone
        return gone

    def poll(self) -> Span | None:
        self._may_fail()
        while (self.demands or self.ahead) and self.dice.random() < self.chance:
            self._begin()
        return self._arrive() if self.begun and self.dice.random() < self.chance else None

    def wait(self) -> Span:
        self._may_fail()
        self.num_waits += 1
        while not self.begun or ((self.demands or self.ahead) and self.dice.random() < self.chance):
            self._begin()
        return self._arrive()

    def drop(self) -> None:
        """Nothing is in flight any more."""
        self.demands, self.ahead, self.begun = [], [], []

    def _begin(self) -> None:
        assert self.demands or self.ahead, "waiting for what nobody brings"
        self.begun.append((self.demands or self.ahead).pop(0))

    def _arrive(self) -> Span:
        return self.begun.pop(self.dice.randrange(len(self.begun)))

    def _may_fail(self) -> None:
        if self.fails():
            raise Failure


class InstantLink(RandomLink):
    """Everything arrives at once."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), 1.0)

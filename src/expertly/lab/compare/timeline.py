"""What device, link and predictor did while one token was decoded: the events of a simulation around one iteration."""

from __future__ import annotations

from typing import Any

from expertly.core.messages import Span


class TokenTimeline:
    """The events of one run that overlap its iteration number `iteration`. A Watcher of the simulator and its link.

    `label`: the budget whose runs are watched.
    """

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._num_ended = 0
        self._window_ns: list[int] = []  # the ends of the iteration before, and of this one
        self._events: list[dict[str, Any]] = []
        if iteration == 0:
            self._window_ns.append(0)

    def computed(self, what: str, layer: int, begin_ns: int, end_ns: int) -> None:
        kind, _, number = what.partition(" ")
        found: dict[str, Any] = {"kind": kind, "layer": layer}
        if number:
            found["expert"] = int(number)
        self._add("device", begin_ns, end_ns, found)
        if what == "head":
            self._num_ended += 1
            if self._num_ended in (self._iteration, self._iteration + 1):
                self._window_ns.append(end_ns)

    def moved(self, where: str, piece: Span, begin_ns: int, end_ns: int) -> None:
        found = {"kind": "load", "layer": piece.layer, "expert": piece.expert}
        self._add(where, begin_ns, end_ns, found | {"segment": piece.segment, "num_segments": piece.num_segments})

    def spent(self, what: str, begin_ns: int, end_ns: int) -> None:
        self._add("device", begin_ns, end_ns, {"kind": what, "layer": -1})

    def predicted(self, what: str, begin_ns: int, end_ns: int) -> None:
        self._add("predictor", begin_ns, end_ns, {"kind": what, "layer": -1})

    def _add(self, lane: str, begin_ns: int, end_ns: int, found: dict[str, Any]) -> None:
        # A transfer may be noted an iteration before or after the one that it overlaps.
        if self._iteration - 2 <= self._num_ended <= self._iteration + 2:
            self._events.append({"lane": lane, "begin_ns": begin_ns, "end_ns": end_ns} | found)

    def as_dict(self) -> dict[str, Any] | None:
        """Its length and events, times from its begin; None where the run was over before."""
        if len(self._window_ns) < 2:
            return None
        begin, end = self._window_ns
        events = [
            event | {"begin_ns": event["begin_ns"] - begin, "end_ns": event["end_ns"] - begin}
            for event in self._events
            if event["begin_ns"] < end and event["end_ns"] > begin
        ]
        return {"length_ns": end - begin, "events": sorted(events, key=lambda event: event["begin_ns"])}


class TokenTimelines:
    """A TokenTimeline of each run under one budget."""

    def __init__(self, iteration: int | None, label: str) -> None:
        self._iteration = iteration
        self._label = label
        self._runs: dict[str, TokenTimeline] = {}

    def begin_run(self, name: str) -> TokenTimeline | None:
        """Runs are called "SYSTEM, BUDGET", or "SYSTEM, BUDGET, P = 4" where systems differ in P."""
        system, _, budget = name.partition(", ")
        if self._iteration is None or budget.partition(", ")[0] != self._label:
            return None
        watcher = self._runs[f"{system}, {budget}"] = TokenTimeline(self._iteration)
        return watcher

    def of(self, system: str, segments: int) -> dict[str, Any] | None:
        """What was seen of a system that ran with so many segments."""
        for name in (f"{system}, {self._label}, P = {segments}", f"{system}, {self._label}"):
            if name in self._runs:
                return self._runs[name].as_dict()
        return None

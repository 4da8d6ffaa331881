"""Whether what is predicted is loaded ahead: where it should pay, by what was measured while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan, Span
from expertly.scheduler.calibration import Calibration, Guess
from expertly.scheduler.ghost import Ghost
from expertly.scheduler.pace import Pace

GATES = ("none", "confidence")
"""All that is predicted is loaded; what should pay by itself."""


class Moment(str, Enum):
    """What a driver tells the time of."""

    PASS_BEGAN = "pass began"
    ALL_CAME = "all came"  # what the running layer waited for first
    NOW = "now"  # a router has spoken, or something is about to be loaded ahead


class Gate:
    """Sees demands, what came of guesses, and times as a driver tells them; it reads no clock.

    A guess is loaded where p x saved > (1 - p) x lost, in nanoseconds. p: how often such guesses were needed
    (Calibration). saved: what of its load fits into the time that the link is free before its layer's router speaks,
    after what is queued (Pace). lost: what then still is to come of it, where that keeps the layer's own demands
    waiting, and what it evicts for nothing, as an LRU cache would miss it (Ghost); less what guesses make good. Until
    these times are known everything is loaded.
    """

    def __init__(self, geometry: Geometry, layer_shares: Sequence[int]) -> None:
        self.num_let = self.num_refused = 0
        """Guesses that were not here, in experts."""
        self._geometry = geometry
        self._calibration = Calibration()
        self._pace = Pace()
        self._ghost = Ghost([share // geometry.segments_per_expert for share in layer_shares])
        self._now_ns = 0
        self._size = 0  # of the running pass, in powers of two

    # -- what it sees ------------------------------------------------------------------------------------------

    def at(self, moment: Moment, now_ns: int) -> None:
        """It is that late."""
        self._now_ns = now_ns
        if moment is Moment.ALL_CAME:
            self._pace.came(now_ns)
        elif moment is Moment.PASS_BEGAN:
            self._pace.begin_pass()

    def router_ran(self, router: RouterRan) -> None:
        """A layer of the pass begins, now."""
        self._size = router.batch_tokens.bit_length()
        self._pace.router_ran(self._now_ns, self._size)
        is_decode = router.batch_tokens and False not in router.is_decode
        misses = self._ghost.ran(router) if is_decode else None
        self._calibration.settle(router.layer, frozenset(router.experts), misses)

    def asked(self, layer: int, spans: Iterable[Span]) -> None:
        """The running layer waits for these."""
        nbytes = self._geometry.segment_nbytes(layer)
        self._pace.asked(sum(span.num_segments for span in spans) * nbytes)

    def abandon(self) -> None:
        """The pass failed."""
        self._calibration.clear()
        self._pace.begin_pass()

    # -- what it says ------------------------------------------------------------------------------------------

    def lets(
        self, layer: int, eid: int, guess: Guess, now: int, num_segments: int, num_queued: int, *, evicts: bool
    ) -> bool:
        """Whether so many segments of an expert that was guessed are loaded ahead. `now`: the layer whose router spoke
        last. `num_queued`: segments that come before. `evicts`: others go for it.
        """
        pays = self._pays(layer, eid, guess, now, num_segments, num_queued, evicts=evicts)
        if pays:
            self.num_let += 1
        else:
            self.num_refused += 1
        return pays

    def _pays(
        self, layer: int, eid: int, guess: Guess, now: int, num_segments: int, num_queued: int, *, evicts: bool
    ) -> bool:
        geometry, pace = self._geometry, self._pace
        p = self._calibration.probability(layer, eid - geometry.first_expert_id(layer), guess, self._size)
        segment_ns = pace.load_ns(geometry.segment_nbytes(layer))
        free_ns = pace.free_ns(self._now_ns, (layer - now) % geometry.num_layers or geometry.num_layers)
        if segment_ns is None or free_ns is None:
            return True
        free_ns -= num_queued * segment_ns
        takes_ns = num_segments * segment_ns
        if free_ns <= 0:
            return False  # it would be taken back before it began
        saved_ns = min(free_ns, takes_ns)
        left_ns = segment_ns - free_ns % segment_ns if free_ns < takes_ns else 0.0
        unguessed = 1 - self._calibration.coverage
        lost_ns = left_ns * min(1.0, self._ghost.misses_a_pass(layer) * unguessed)
        if evicts:
            lost_ns += self._ghost.worth_of_place(layer) * (takes_ns - saved_ns * (1 - unguessed))
        return p * saved_ns > (1 - p) * lost_ns

    def facts(self) -> dict[str, Any]:
        """What it has come to, as plain data (docs/conventions.md)."""
        return {
            "kind": "confidence",
            "state": "on",
            "let": self.num_let,
            "refused": self.num_refused,
            "accuracy": self._calibration.accuracy(),
            "says": f"{self.num_let} guesses loaded, {self.num_refused} not worth it",
        }

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
from expertly.scheduler.trial import Trial

GATES = ("none", "confidence", "measured")
"""All that is predicted is loaded; what should pay by itself; that, while it makes tokens faster."""
WAYS = ("on", "off")
"""Of `measured`, in the order in which they are tried first."""


class Moment(str, Enum):
    """What a driver tells the time of."""

    PASS_BEGAN = "pass began"
    PASS_ENDED = "pass ended"
    ALL_CAME = "all came"  # what the running layer waited for first
    NOW = "now"  # a router has spoken, or something is about to be loaded ahead


class Gate:
    """Sees demands, what came of guesses, and times as a driver tells them; it reads no clock.

    A guess is loaded where p x saved > (1 - p) x lost, in nanoseconds. p: how often such guesses were needed
    (Calibration). saved: what of its load fits into the time that the link is free before its layer's router speaks,
    after what is queued (Pace). lost: what then still is to come of it, where that keeps the layer's own demands
    waiting, and what it evicts for nothing, as an LRU cache would miss it (Ghost); less what guesses make good. Until
    these times are known everything is loaded.

    `measured`: besides, decode steps are run with and without loading ahead in turns (Trial), apart for each number of
    rows in powers of two; a prompt runs as the last decode step says. While it is off nothing is loaded ahead, and
    where `can_pause` nobody predicts.
    """

    def __init__(self, geometry: Geometry, layer_shares: Sequence[int], kind: str, *, can_pause: bool) -> None:
        assert kind in GATES[1:]
        self.kind = kind
        self.can_pause = can_pause
        """Whether who predicts may be left alone while nothing is loaded ahead."""
        self.num_let = self.num_refused = 0
        """Guesses that were not here, in experts."""
        self.num_open = 0
        """Passes that ended, in which anything was to be loaded ahead."""
        self._geometry = geometry
        self._is_measured = kind == "measured"
        self._calibration = Calibration()
        self._pace = Pace()
        self._ghost = Ghost([share // geometry.segments_per_expert for share in layer_shares])
        self._trials: dict[int, Trial] = {}  # by the size of a pass
        self._way = 0  # of the running pass, and of the next until one has ended
        self._now_ns = 0
        self._began_ns: int | None = None
        self._size = 0  # of the running pass, in powers of two
        self._decode_size = 0  # of the last decode step
        self._is_decode = True  # all that ran of the pass
        self._difficulty = 0

    @property
    def is_open(self) -> bool:
        """Whether anything is loaded ahead in this pass."""
        return WAYS[self._way] == "on"

    @property
    def is_asking(self) -> bool:
        """Whether who predicts should see this pass."""
        return self.is_open or not self.can_pause

    # -- what it sees ------------------------------------------------------------------------------------------

    def at(self, moment: Moment, now_ns: int) -> None:
        """It is that late."""
        self._now_ns = now_ns
        if moment is Moment.ALL_CAME:
            self._pace.came(now_ns)
        elif moment is Moment.PASS_BEGAN:
            self._began_ns = now_ns
            self._pace.begin_pass()
            self._is_decode, self._difficulty = True, 0
        elif moment is Moment.PASS_ENDED:
            self._pass_ended()

    def router_ran(self, router: RouterRan) -> None:
        """A layer of the pass begins, now."""
        self._size = router.batch_tokens.bit_length()
        self._pace.router_ran(self._now_ns, self._size)
        misses = None
        if False in router.is_decode or not router.batch_tokens:
            self._is_decode = False
        else:
            misses = self._ghost.ran(router)
            self._difficulty += misses
        self._calibration.settle(router.layer, frozenset(router.experts), misses)

    def asked(self, layer: int, spans: Iterable[Span]) -> None:
        """The running layer waits for these."""
        nbytes = self._geometry.segment_nbytes(layer)
        self._pace.asked(sum(span.num_segments for span in spans) * nbytes)

    def abandon(self) -> None:
        """The pass failed."""
        self._began_ns = None
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
        accuracy = self._calibration.accuracy()
        told: dict[str, Any] = {
            "kind": self.kind,
            "state": "on" if self.is_open else "off",
            "let": self.num_let,
            "refused": self.num_refused,
            "accuracy": accuracy,
        }
        trial = self._trials.get(self._decode_size)
        if trial is not None:
            told["state"] = WAYS[trial.best]
            told |= {
                "other_ratio": trial.ratio,
                "measured_tokens": trial.num_measured,
                "tokens": trial.num_passes,
                "changes": trial.num_changes,
            }
        return told | {"says": says(told)}

    def _pass_ended(self) -> None:
        began, self._began_ns = self._began_ns, None
        self.num_open += self.is_open
        if not self._is_measured or began is None or not self._is_decode or not self._size:
            return
        trial = self._trials.get(self._size)
        if trial is None:
            trial = self._trials[self._size] = Trial()
        trial.ran(self._way, self._now_ns - began, self._difficulty)
        self._decode_size, self._way = self._size, trial.way


def says(told: dict[str, Any]) -> str:
    """The same in a sentence."""
    ratio = told.get("other_ratio")
    if told["kind"] == "confidence":
        return f"{told['let']} guesses loaded, {told['refused']} not worth it"
    if ratio is None:
        return f"{told['state']}, not measured yet"
    other = WAYS[1 - WAYS.index(told["state"])]
    return f"{told['state']}; {other} costs {ratio:.2f}x a token, measured over {told['measured_tokens']} tokens"

"""Turns prefetching on and off by an A/B test of decode steps with and without it, while the model runs."""

from __future__ import annotations

from enum import Enum
from math import inf, sqrt
from typing import Any

from expertly.core.messages import RouterRan

GATES = ("none", "measured")
"""none: everything predicted is prefetched. measured: nothing is where steps with prefetching are slower."""

_LEAST_PAIRS, _MOST_PAIRS = 6, 16
"""Least pairs of steps (one with, one without prefetching) before a choice, and most where they hardly differ."""
_FEW_PAIRS, _LARGE, _ALIKE = 2, 0.25, 0.8
"""So few pairs are enough where the difference is at least this share of a step's time and they agree so far."""
_CLEAR = 3.0
"""A difference is clear from so many standard errors on."""
_KEPT = 15 / 16
"""The weight that earlier pairs keep when another one is added."""
_COST = 0.01
"""The share of all steps' time that trying the slower way again may cost; it says how often that happens."""
_LEAST_STEPS, _MOST_STEPS = 8, 128
"""Least and most steps of the chosen way between two pairs."""
_CHANGED = 1.5
"""Where steps become so many times slower or faster (another link, another load), the test starts again."""
_SHORT, _LONG = 8, 64
"""Steps over which the times "now" and "before" are averaged."""
_LONGEST = 2.0
"""A step counts as at most so many average steps, so that a pause of the machine does not decide."""


class Moment(str, Enum):
    """The moments of which a driver tells the time."""

    PASS_BEGAN = "pass began"
    PASS_ENDED = "pass ended"


class PrefetchGate:
    """Compares decode steps of similar batch size (in powers of two) with and without prefetching. It is told when
    passes begin and end and what their layers lacked; it reads no clock.

    Every pass, also of a prompt, does what the comparison of the last decode step's batch size wants next.
    """

    def __init__(self, *, always_observes: bool = False) -> None:
        """`always_observes`: the predictor sees every pass, because it learns from them or evictions depend on it."""
        self.is_open = True
        """Whether this pass prefetches."""
        self._always_observes = always_observes
        self._comparisons: dict[int, _Comparison] = {}  # by tokens of a step, in powers of two
        self._latest: _Comparison | None = None
        self._running: _Comparison | None = None  # the one that this pass is a step of
        self._began_ns: int | None = None
        self._is_begun = False  # its first router ran
        self._absent_nbytes = 0

    @property
    def observes(self) -> bool:
        """Whether the predictor sees this pass."""
        return self.is_open or self._always_observes

    def at(self, moment: Moment, now_ns: int) -> None:
        """A pass began or ended at this time."""
        if moment is Moment.PASS_BEGAN:
            self._began_ns, self._running, self._is_begun, self._absent_nbytes = now_ns, None, False, 0
            self.is_open = self._latest is None or self._latest.tries
        elif self._began_ns is not None:
            if self._running is not None:
                self._running.add(now_ns - self._began_ns, self._absent_nbytes)
            self._began_ns = None

    def router_ran(self, router: RouterRan, absent_nbytes: int) -> None:
        """A layer's router ran; without prefetching, so many bytes of its experts would be absent."""
        if self._began_ns is None:
            return
        is_decode = bool(router.batch_tokens) and False not in router.is_decode
        if not self._is_begun:
            self._is_begun = True
            if is_decode:
                self._latest = self._comparisons.setdefault(router.batch_tokens.bit_length(), _Comparison())
                self.is_open = self.is_open and self._latest.tries  # a pass that began closed was not predicted
                self._running = self._latest if self.is_open == self._latest.tries else None
        if not is_decode:
            self._running = None
        self._absent_nbytes += absent_nbytes

    def abandon(self) -> None:
        self._began_ns = None

    def facts(self) -> dict[str, Any]:
        """The state of the last decode step's comparison, as plain data (docs/conventions.md)."""
        every, latest = self._comparisons.values(), self._latest
        steps = [sum(one.num_steps[is_open] for one in every) for is_open in (True, False)]
        relative = None if latest is None else latest.difference
        state = "trying" if latest is None or not latest.is_decided else "on" if latest.chosen else "off"
        measured = "" if relative is None else f"; with it a step takes {1 + relative:.2f} of the time without"
        return {
            "kind": "measured",
            "state": state,
            "steps_with": steps[0],
            "steps_without": steps[1],
            "difference": relative,
            "says": f"{state}, {steps[0]} decode steps with prefetching and {steps[1]} without{measured}",
        }


class _Comparison:
    """Steps with and without prefetching, in pairs of neighbouring steps.

    At first all steps form pairs, until the difference is clear or known to be small. Then the better way is chosen,
    and now and then a pair is run again. How many bytes a step lacks varies more than the effect of prefetching does.
    So times are compared at an equal number of lacking bytes, on a line fitted through the pairs.
    """

    def __init__(self) -> None:
        self.is_decided = False
        self.chosen = True
        """Whether prefetching is the better way."""
        self.num_steps = {True: 0, False: 0}
        self._now_ns = self._before_ns = 0.0  # of the chosen way's steps
        self._num_chosen = 0
        self._average_ns = 0.0  # of all steps
        self._num_to_go = 0  # steps of the chosen way before the next pair
        self._first: tuple[float, int] | None = None  # time and lacking bytes of the first step of the running pair
        self._begins_open = True  # whether the running or next pair begins with prefetching
        self._clear()

    def _clear(self) -> None:
        self.is_decided = False
        self._num = self._time = 0.0  # pairs, and the sum of their mean times
        self._y = self._yy = self._x = self._xx = self._xy = 0.0  # y: time with - without, x: the same of bytes

    @property
    def tries(self) -> bool:
        """Whether the next step prefetches."""
        if self._num_to_go:
            return self.chosen
        return self._begins_open == (self._first is None)

    @property
    def difference(self) -> float | None:
        """The share of a step's time that prefetching adds; None before the first pair."""
        return None if not self._num else self._estimate()[0] * self._num / self._time

    def add(self, step_ns: int, absent_nbytes: int) -> None:
        """A step ended that did what `tries` said."""
        is_open = self.tries
        self.num_steps[is_open] += 1
        num = sum(self.num_steps.values())
        taken_ns = float(step_ns) if num == 1 else min(step_ns, _LONGEST * self._average_ns)
        self._average_ns += (taken_ns - self._average_ns) / min(num, _SHORT)
        if self._num_to_go:
            self._num_to_go -= 1
            self._watch(taken_ns)
        elif self._first is None:
            self._first = taken_ns, absent_nbytes
        else:
            (first_ns, first_nbytes), self._first = self._first, None
            sign = -1 if self._begins_open else 1  # whether the second step is the one with prefetching
            self._add_pair(
                sign * (taken_ns - first_ns), sign * (absent_nbytes - first_nbytes), (taken_ns + first_ns) / 2
            )
            self._begins_open = not self._begins_open
            self._decide()

    def _add_pair(self, y: float, x: float, mean_ns: float) -> None:
        for name, value in (("_num", 1), ("_time", mean_ns), ("_y", y), ("_x", x), ("_yy", y * y), ("_xx", x * x)):
            setattr(self, name, getattr(self, name) * _KEPT + value)
        self._xy = self._xy * _KEPT + x * y

    def _estimate(self) -> tuple[float, float]:
        """The nanoseconds that prefetching adds to a step, and their standard error."""
        num = self._num
        mean_x, mean_y = self._x / num, self._y / num
        spread = self._xx - self._x * mean_x
        has_slope = spread > 0 and num > _FEW_PAIRS + 1
        slope = max(0.0, self._xy - self._x * mean_y) / spread if has_slope else 0.0
        left = max(0.0, self._yy - self._y * mean_y - slope * (2 * (self._xy - self._x * mean_y) - slope * spread))
        error = sqrt(left / (num - 2) * (1 / num + (mean_x**2 / spread if has_slope else 0.0))) if num > 2 else inf
        return mean_y - slope * mean_x, error

    def _decide(self) -> None:
        added_ns, error_ns = self._estimate()
        num, share = self._num, abs(added_ns) * self._num / self._time
        if not self.is_decided:
            is_large = num > _counted(_FEW_PAIRS) and share > _LARGE and self._y**2 > _ALIKE * num * self._yy
            is_clear = num > _counted(_LEAST_PAIRS) and abs(added_ns) > _CLEAR * error_ns
            if not (is_large or is_clear or num > _counted(_MOST_PAIRS)):
                return
            self.is_decided, self._num_chosen = True, 0
        if self.chosen != (added_ns < 0):
            self.chosen, self._num_chosen = added_ns < 0, 0
        self._num_to_go = max(_LEAST_STEPS, min(_MOST_STEPS, round(share / _COST)))

    def _watch(self, step_ns: float) -> None:
        """Start the test again where steps of the chosen way take another time than before."""
        self._num_chosen += 1
        self._now_ns += (step_ns - self._now_ns) / min(self._num_chosen, _SHORT)
        self._before_ns += (step_ns - self._before_ns) / min(self._num_chosen, _LONG)
        if self._num_chosen >= 2 * _SHORT and not 1 / _CHANGED < self._now_ns / self._before_ns < _CHANGED:
            self._num_to_go = 0
            self._clear()


def _counted(num_pairs: int) -> float:
    """The weight of so many pairs, less a margin for rounding."""
    return (1 - _KEPT**num_pairs) / (1 - _KEPT) - 0.01

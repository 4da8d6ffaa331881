"""Two ways to run a decode step, in turns while the model runs: the better is taken, the other tried rarely."""

from __future__ import annotations

from collections import deque
from math import exp, expm1

from expertly.scheduler.trial_passes import Contrast, Pass, contrast, slope_of, together

EXPLORING = 0.01
"""Of the time, in the long run, what trying the worse way may cost."""
_EPOCH = 16  # passes
_WASHED_OUT = 4  # at the beginning of one, at most: what is kept is still what the way before kept
_COMPARED = 12  # passes on either side of a switch
_LEAST_EPOCH = 4
_MOST_EPOCHS = 8  # between two tries of ways that cost the same
_FIRST = 3  # switches before one way is called better
_LONGEST = 512  # passes between two tries: a change is noticed within so many
_REMEMBERED = 32  # switches
_CLEAR = 0.1  # by which one way must be worse than the other to be clearly so, or another than itself
_ERRORS = 4.0  # standard errors, by which it must


class Trial:
    """Of ways 0 and 1, 0 first. Passes tell how long they took and how hard they were: a number to which time is about
    linear, in either way. Where one way follows the other, up to 12 passes on both sides are compared, as if they had
    been equally hard: so what slows both down, for seconds or for ever, says nothing.

    First the ways take turns, 16 passes each, four times, or until one is clearly worse. From then on the better is
    taken, and the other in between: so rarely that it costs 1 % of the time (EXPLORING), but for 4 passes at least
    after 512, and sooner where the better way takes another time than it did (ever later, if that changes often and
    means nothing), or was the worse one in the last try.
    """

    def __init__(self) -> None:
        self.way = 0
        """Of the next pass."""
        self.best = 0
        """The way that is taken where none is tried."""
        self.num_passes = 0
        self.num_changes = 0
        """How often the other way became the best."""
        self._contrasts: deque[Contrast] = deque(maxlen=_REMEMBERED)  # of way 1 to way 0
        self._epochs: deque[list[Pass]] = deque(maxlen=_REMEMBERED)  # the last passes of each that ended
        self._passes: list[Pass] = []  # of this epoch, without those washed out
        self._length = _EPOCH
        self._done = 0  # passes of the epoch
        self._is_compared = True  # with the epoch before
        self._is_first = True  # they take turns
        self._num_tries = 0  # since the best way was the other
        self._patience = 3 * _EPOCH  # passes after a try before a change brings another
        self._is_early = False  # the try, because of a change

    def ran(self, way: int, took_ns: int, difficulty: float) -> None:
        """A pass took so long, in `way`: where that is not `way` of this, others decided, and it is not counted."""
        self.num_passes += 1
        self._done += 1
        if way == self.way and self._done > min(_WASHED_OUT, self._length // 4):
            self._passes.append(Pass(took_ns, difficulty))
        is_over = self._done >= self._length
        if not self._is_compared and (is_over or len(self._passes) >= _COMPARED):
            self._compare()
        if is_over or self._is_hopeless() or self._has_changed():
            self._next()

    @property
    def result(self) -> Contrast | None:
        """How much longer the other way takes than the best; None: not known yet."""
        if not self._contrasts:
            return None
        found = together(self._contrasts)
        return found if self.best == 0 else found.reversed()

    @property
    def ratio(self) -> float | None:
        """Time of a pass in the other way, as a multiple of the best one's; None: not known yet."""
        result = self.result
        return None if result is None else exp(result.log_ratio)

    @property
    def num_measured(self) -> int:
        """Passes by which they were compared, of those remembered."""
        return sum(one.num_passes for one in self._contrasts)

    def _compare(self) -> None:
        """This epoch with the one before."""
        self._is_compared = True
        found = self._contrast()
        if found is not None:
            self._contrasts.append(found if self.way == 1 else found.reversed())

    def _contrast(self) -> Contrast | None:
        """This way to the other; None where too little was seen."""
        before, now = self._epochs[-1] if self._epochs else [], self._passes[:_COMPARED]
        if min(len(before), len(now)) < 2:
            return None
        return contrast(now, before, slope_of([*self._epochs, now]))

    def _is_hopeless(self) -> bool:
        """Is this way clearly worse, as it began?"""
        if self._done < _LEAST_EPOCH or self._is_compared:
            return False
        found = self._contrast()
        if found is None or found.log_ratio < 0 or not found.is_clear(_CLEAR, _ERRORS):
            return False
        self._compare()
        return True

    def _has_changed(self) -> bool:
        """Does the best way take another time than when this epoch began, for passes as hard?"""
        if self._is_first or self._done % _EPOCH or len(self._passes) < self._patience:
            return False
        before, now = self._passes[:_EPOCH], self._passes[-_EPOCH:]
        self._is_early = contrast(now, before, slope_of([before, now])).is_clear(2 * _CLEAR, _ERRORS)
        return self._is_early

    def _next(self) -> None:
        """The epoch has ended: which way is next, and for how long."""
        if len(self._passes) >= 2:
            self._epochs.append(self._passes[-_COMPARED:])
        self._passes, self._done, self._length = [], 0, _EPOCH
        if self._is_first and not self._knows():
            self._switch()
            return
        self._is_first = False
        result, was_best = self.result, self.way == self.best
        assert result is not None
        if result.log_ratio < 0:
            self.best, result = 1 - self.best, result.reversed()
            self.num_changes += 1
            self._num_tries = 0
            was_best = self.way == self.best
            if was_best:
                self._length, self._is_compared = _EPOCH, True
                return
        excess = max(0.0, expm1(result.log_ratio - result.error))
        length = round(max(_LEAST_EPOCH, min(_EPOCH, EXPLORING * _LONGEST / max(excess, 1e-9))))
        if was_best:
            self._num_tries += 1
            self._length = length
        else:
            pause = _EPOCH * min(1 + self._num_tries, _MOST_EPOCHS)
            is_surprised = self._was_surprised()
            if not is_surprised:
                pause = round(max(pause, length * excess / EXPLORING))
            self._length = min(_LONGEST, pause)
            self._patience = min(_LONGEST, 2 * self._patience) if self._is_early and not is_surprised else 3 * _EPOCH
            self._is_early = False
        self._switch()

    def _knows(self) -> bool:
        if len(self._contrasts) >= _FIRST:
            return True
        return bool(self._contrasts) and self._contrasts[-1].is_clear(_CLEAR, _ERRORS)

    def _was_surprised(self) -> bool:
        """Was the best way the worse one, the last time?"""
        last = self._contrasts[-1]
        return (last.log_ratio if self.best == 0 else -last.log_ratio) < 0

    def _switch(self) -> None:
        self.way = 1 - self.way
        self._is_compared = False

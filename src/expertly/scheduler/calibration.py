"""How often a guess that was not here was needed: what a predictor's ranks and scores have come to, measured online."""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

_MOST = 256.0
"""Guesses of one kind that are remembered; of more, all count half."""
_BELIEVED = 4.0
"""Guesses that the more general kind weighs in one that has been seen little."""
_FADE = 0.999
"""Of what was counted, what is left after another layer."""
_MAX_RANK = 31
_MAX_HALVINGS = 15


class Guess(NamedTuple):
    """One expert of a prediction."""

    rank: int  # from 0: the one with the highest score
    score: float
    distance: int  # layers ahead of what the predictor had seen


_Kind = tuple[int, ...]


class Calibration:
    """Counts by (tokens of the pass, layers ahead, rank, score), the last two in steps; a kind that was hardly seen is
    believed to be as its rank is, and a rank as the distance.
    """

    def __init__(self) -> None:
        self._seen: dict[_Kind, list[float]] = {}  # kind -> [guesses, right ones]
        self._asked: dict[int, dict[int, _Kind]] = {}  # layer -> expert -> kind: not settled
        self._num_right = self._num_misses = 0.0

    def probability(self, layer: int, expert: int, guess: Guess, size: int) -> float:
        """That the expert is needed. It is noted: `settle` tells. `size`: of the pass, tokens in powers of two."""
        score = frexp(guess.score)[1] if guess.score > 0 else -_MAX_HALVINGS
        kind = (size, guess.distance, min(guess.rank, _MAX_RANK), max(-_MAX_HALVINGS, min(_MAX_HALVINGS, score)))
        self._asked.setdefault(layer, {})[expert] = kind
        believed = 0.5
        for general in (kind[:2], kind[:3], kind):
            seen, right = self._seen.get(general, (0.0, 0.0))
            believed = (right + _BELIEVED * believed) / (seen + _BELIEVED)
        return believed

    @property
    def coverage(self) -> float:
        """Of what is missed in decode, the share that is guessed."""
        return min(1.0, self._num_right / self._num_misses) if self._num_misses else 0.0

    def settle(self, layer: int, needed: frozenset[int], misses: int | None = None) -> None:
        """The layer's router has spoken: of the experts that were asked about, these are needed. `misses`: experts that
        it would have missed if nothing was loaded ahead; None: it is no decode's.
        """
        asked = self._asked.pop(layer, None)
        if misses is not None and asked is not None:
            self._num_misses = self._num_misses * _FADE + misses
            self._num_right = self._num_right * _FADE + sum(expert in needed for expert in asked)
        if asked is None:
            return
        for expert, kind in asked.items():
            is_right = expert in needed
            for general in (kind[:2], kind[:3], kind):
                counts = self._seen.setdefault(general, [0.0, 0.0])
                if counts[0] >= _MOST:
                    counts[0], counts[1] = counts[0] / 2, counts[1] / 2
                counts[0] += 1
                counts[1] += is_right

    def clear(self) -> None:
        """What was asked about will not be settled."""
        self._asked.clear()

    def accuracy(self) -> float | None:
        """Of the guesses remembered, the share that was needed; None where there are none."""
        pairs = [counts for kind, counts in self._seen.items() if len(kind) == 2]
        seen = sum(pair[0] for pair in pairs)
        return sum(pair[1] for pair in pairs) / seen if seen else None

"""Which memory could move from one layer to another, the most promising first (lines 15-19 of MoEpic's algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from expertly.policies.moepic.forecast import Forecast
from expertly.policies.moepic.statistics import Doubles

_MAX_OTHERS = 64
"""Moves between other layers than the best, tried before giving up."""


class Move(NamedTuple):
    """Segments given (above 0) to layers and taken from them, by layer; in all as many."""

    net_ns: float  # exposed time that goes if nothing else changes
    segments: dict[int, int]


class Changes(NamedTuple):
    """[steps, layers] of exposed time."""

    gains_ns: Doubles  # less of it with a step more; -inf: the layer has all its experts
    losses_ns: Doubles  # more of it with a step less; inf: the layer has no step to give


class Pool:
    """The layers of one size class, `layers`: they share their slots, so that memory moves among them only."""

    def __init__(self, layers: Sequence[int], budgets: Sequence[int], zeta: float) -> None:
        self._layers = layers
        total = sum(budgets[layer] for layer in layers)
        self._least = {layer: min(1, budgets[layer]) for layer in layers}  # V > 0, where it can be
        self.unit = max(1, round(zeta * total))
        powers = [self.unit << i for i in range((total // self.unit).bit_length())]
        powers += [self.unit >> i for i in range(1, self.unit.bit_length())]
        self._steps = np.array(sorted(powers), np.intp)

    def best_moves(self, changes: Changes) -> list[Move]:
        """Those that promise to gain: one for each step, that of zeta first, then by falling promise.

        As the paper has it, a step's move goes to the layer that gains most, from the one, of the rest, that loses
        least. Ties go to the lowest layer, and the smallest step.
        """
        found = []
        for number, step in enumerate(self._steps.tolist()):
            gains, losses = changes.gains_ns[number], changes.losses_ns[number].copy()
            to = int(np.argmax(gains))
            losses[to] = np.inf
            fro = int(np.argmin(losses))
            net = float(gains[to] - losses[fro])
            if net > 0:
                found.append((step != self.unit, self._pair(net, step, to, fro)))
        return [move for _, move in sorted(found, key=lambda one: (one[0], -one[1].net_ns))]

    def leftover_moves(self, now: Forecast) -> Iterator[Move]:
        """Of what layers have and cannot use, a part of an expert or what their windows make needless: all of it that
        one layer gains by, for each layer, by falling gain.
        """
        free = {}
        for layer in self._layers:
            loaded, exposed, budget = now.curves[layer].loaded, now.curves[layer].exposed_ns, now.budgets[layer]
            is_as_good = (loaded[: budget + 1] == loaded[budget]) & (exposed[: budget + 1] == exposed[budget])
            enough = int(np.argmax(is_as_good))
            free[layer] = budget - max(enough, self._least[layer])
        donors = sorted(self._layers, key=lambda layer: -free[layer])
        found = []
        for layer in self._layers:
            exposed, budget = now.curves[layer].exposed_ns, now.budgets[layer]
            offered = exposed[budget : budget + sum(free.values()) - free[layer] + 1]
            gain = float(offered[0] - offered[-1])
            if gain > 0:
                segments = {layer: int(np.argmin(offered))}
                missing = segments[layer]
                for donor in donors:
                    if donor != layer and (given := min(free[donor], missing)):
                        segments[donor] = -given
                        missing -= given
                found.append(Move(gain, segments))
        yield from sorted(found, key=lambda move: -move.net_ns)

    def other_moves(self, changes: Changes) -> Iterator[Move]:
        """The best of all, by any step from any layer to any other, whatever they promise: the windows of layers that
        follow may make up for it.
        """
        net = changes.gains_ns[:, :, None] - changes.losses_ns[:, None, :]  # [steps, to, from]
        themselves = range(len(self._layers))
        net[:, themselves, themselves] = -np.inf
        for place in np.argsort(-net, axis=None, kind="stable")[:_MAX_OTHERS]:
            step, to, fro = (int(index) for index in np.unravel_index(int(place), net.shape))
            if net[step, to, fro] == -np.inf:
                return
            yield self._pair(float(net[step, to, fro]), int(self._steps[step]), to, fro)

    def _pair(self, net_ns: float, num_segments: int, to: int, fro: int) -> Move:
        return Move(net_ns, {self._layers[to]: num_segments, self._layers[fro]: -num_segments})

    def changes(self, now: Forecast) -> Changes:
        """What each step does to each layer, as long as its window stays."""
        shape = (len(self._steps), len(self._layers))
        gains, losses = np.full(shape, -np.inf), np.full(shape, np.inf)
        for place, layer in enumerate(self._layers):
            exposed, budget = now.curves[layer].exposed_ns, now.budgets[layer]
            num_more = int(np.searchsorted(self._steps, len(exposed) - 1 - budget, side="right"))
            num_less = int(np.searchsorted(self._steps, budget - self._least[layer], side="right"))
            gains[:num_more, place] = exposed[budget] - exposed[budget + self._steps[:num_more]]
            losses[:num_less, place] = exposed[budget - self._steps[:num_less]] - exposed[budget]
        return Changes(gains, losses)

"""Gives memory to the layers that wait longest without it (MoEpic's algorithm 1, section 3.4.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.allocation.moepic.plan import LayerSplit, SplitPlan
from expertly.policies.allocation.moepic.statistics import Doubles, LayerRates
from expertly.policies.allocation.moepic.subproblem import Curve, LayerProblem, Splits
from expertly.policies.allocation.moepic.timing import Timing
from expertly.policies.allocation.uniform import equal_quotas

DEFAULT_ZETA = 0.01

_LEAST_GAIN = 1e-4
"""The least gain of a move, as a share of the exposed time: smaller ones are not worth the thousands of trials."""

_MAX_OTHERS = 64
"""Moves between other pairs of layers that are tried before giving up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is expected of a layer's split in a decode step."""

    window_ns: float  # T_wind: how long prefetching for the layer takes place
    loaded: float  # m: experts' worth of what is needed that is there when its router has run
    exposed_ns: float  # what the layer waits for loads


@dataclass(frozen=True, slots=True)
class Configuration:
    """What to keep, and what is expected of it, by layer."""

    plan: SplitPlan
    outcomes: tuple[Outcome, ...]
    uniform_exposed_ns: tuple[float, ...]  # with equal budgets, best splits; in sum never less
    start_exposed_ns: tuple[float, ...]  # with equal budgets, half of each expert, `uniform_plan`; in sum never less
    num_moves: int  # of memory from one layer to another

    @property
    def exposed_ns(self) -> tuple[float, ...]:
        return tuple(one.exposed_ns for one in self.outcomes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Every layer's best split for its budget, in segments."""

    budgets: tuple[int, ...]
    windows_ns: tuple[float, ...]
    curves: tuple[Curve, ...]  # of each layer with its window
    exposed_ns: tuple[float, ...]
    total_ns: float

    def splits(self) -> tuple[LayerSplit, ...]:
        return tuple(curve.best(budget) for budget, curve in zip(self.budgets, self.curves, strict=True))


class Forecaster:
    """Forecasts what a decode step waits for: each layer's window follows from the layer before (ExpertSplit of
    algorithm 1).
    """

    def __init__(self, geometry: Geometry, rates: Sequence[LayerRates], timing: Timing) -> None:
        self._first_window_ns = timing.first_window_ns()
        num_segments = geometry.segments_per_expert
        splits = {num: Splits(num, num_segments) for num in {layer.num_experts for layer in geometry.layers}}
        self._problems = [LayerProblem(one, layer, timing, splits[one.num_experts]) for layer, one in enumerate(rates)]

    def forecast(self, budgets: Sequence[int], near: Forecast | None = None) -> Forecast:
        """The forecast for these budgets. Layers whose window is as in `near` cost nothing: a forecast of similar
        budgets is the best to give.
        """
        windows, curves, exposed = [], [], []
        window = self._first_window_ns
        for layer, (problem, budget) in enumerate(zip(self._problems, budgets, strict=True)):
            is_as_before = near is not None and near.windows_ns[layer] == window
            curve = near.curves[layer] if near is not None and is_as_before else problem.curve(window)
            windows.append(window)
            curves.append(curve)
            exposed.append(float(curve.exposed_ns[budget]))
            window = float(curve.next_window_ns[budget])
        return Forecast(tuple(budgets), tuple(windows), tuple(curves), tuple(exposed), sum(exposed))

    def outcomes(self, splits: Sequence[LayerSplit]) -> tuple[Outcome, ...]:
        """The outcomes of these splits, whether or not they are the best."""
        found = []
        window = self._first_window_ns
        for problem, split in zip(self._problems, splits, strict=True):
            of_all, number = problem.outcomes(window), problem.splits.number[split.kept_experts, split.kept_segments]
            found.append(Outcome(window, float(of_all.loaded[number]), float(of_all.exposed_ns[number])))
            window = float(of_all.next_window_ns[number])
        return tuple(found)


def configure(
    geometry: Geometry,
    kept_segments: Sequence[int],
    rates: Sequence[LayerRates],
    timing: Timing,
    zeta: float = DEFAULT_ZETA,
    *,
    as_printed: bool = False,
) -> Configuration:
    """The best budgets and splits found for so many kept segments in each size class, without staging slots.

    Starts from equal budgets and moves memory, a share zeta of a class's at a time, from the layer that loses least to
    the one that gains most, as long as the sum of exposed time falls. It ends, since every move lowers that sum. No
    layer that had memory is left without any. Memory that no layer gains by stays free in its budget
    (`SplitPlan.free_segments`). A layer of which nothing was observed counts as one whose experts are all alike. Ours,
    not the paper's:

    - a layer's gain and loss are computed with the window that it has now, not with that of a model all of whose layers
      have more or less; effects on other windows show when the move is tried, in the sum;
    - a move that gains less than a ten-thousandth ends it;
    - where no move of zeta helps, steps of zeta times powers of two, up and down to one segment, are tried, the most
      promising first; then what several layers cannot use goes to one together; then other pairs of layers. After each
      that helps zeta is tried again.

    `as_printed`: algorithm 1, lines 15 to 25, without any of this, and the budgets that it ends with.

    Raises ConfigError where the sizes do not fit, or `zeta` is not between 0 and 1.
    """
    num_layers = geometry.num_layers
    if len(rates) != num_layers or timing.num_layers != num_layers:
        raise ConfigError(f"rates of {len(rates)} and times of {timing.num_layers} layers: must be of all {num_layers}")
    for layer, (one, shape) in enumerate(zip(rates, geometry.layers, strict=True)):
        if one.num_experts != shape.num_experts or timing.top_k[layer] != shape.top_k:
            found = f"{one.num_experts} experts, top_k={timing.top_k[layer]}"
            raise ConfigError(f"layer {layer}: rates and times of {found}: must be {shape.num_experts}, {shape.top_k}")
    if not 0 < zeta < 1:
        raise ConfigError(f"zeta={zeta}: must be above 0 and below 1")
    known = [one if one.hits[-1] else LayerRates.alike(one.num_experts) for one in rates]
    forecaster = Forecaster(geometry, known, timing)
    uniform = forecaster.forecast(equal_quotas(geometry, kept_segments))
    pools = [
        _Pool(geometry.layers_of_class(size_class), uniform.budgets, zeta)
        for size_class in range(geometry.num_size_classes)
    ]
    now, num_moves = uniform, 0
    improved = _improved_as_printed if as_printed else _improved
    while (better := improved(forecaster, pools, now)) is not None:
        now = better
        num_moves += 1
    plan, start = SplitPlan(geometry, now.splits()), uniform_plan(geometry, kept_segments)
    start_exposed = tuple(one.exposed_ns for one in forecaster.outcomes(start.layers))
    if (
        sum(start_exposed) < now.total_ns and not as_printed
    ):  # a layer's best split may cost the next layer's window more than it gains
        plan, num_moves = start, 0
    return Configuration(plan, forecaster.outcomes(plan.layers), uniform.exposed_ns, start_exposed, num_moves)


def uniform_plan(geometry: Geometry, kept_segments: Sequence[int]) -> SplitPlan:
    """Equal budgets and half of each expert: MoEpic without its configurator (algorithm 1, line 4). A half is rounded
    down to segments, but not to none; a smaller budget keeps less of one expert, a larger one more than half of all.
    """
    num_segments, layers = geometry.segments_per_expert, []
    for budget, shape in zip(equal_quotas(geometry, kept_segments), geometry.layers, strict=True):
        top = min(max(num_segments // 2, budget // shape.num_experts, 1), num_segments, budget)
        layers.append(LayerSplit(min(budget // top, shape.num_experts) if budget else 0, top, budget))
    return SplitPlan(geometry, tuple(layers))


def _improved(forecaster: Forecaster, pools: Sequence[_Pool], now: Forecast) -> Forecast | None:
    """The forecast after the first move that lowers the sum; None: no move does."""
    if not now.total_ns:
        return None
    changes = [(pool, pool.changes(now)) for pool in pools]
    best = (move for pool, change in changes for move in pool.best_moves(change))
    leftovers = (move for pool in pools for move in pool.leftover_moves(now))
    others = (move for pool, change in changes for move in pool.other_moves(change))
    for move in chain(best, leftovers, others):
        budgets = list(now.budgets)
        for layer, num_segments in move.items():
            budgets[layer] += num_segments
        then = forecaster.forecast(budgets, now)
        if then.total_ns < now.total_ns * (1 - _LEAST_GAIN):
            return then
    return None


def _improved_as_printed(forecaster: Forecaster, pools: Sequence[_Pool], now: Forecast) -> Forecast | None:
    """The forecast after the one move that algorithm 1 tries, in the first pool where it lowers the sum; None: it rolls
    back. A layer's gain and loss are those in a model all of whose layers have zeta more, or less.
    """
    for pool in pools:
        more, less = ([budget + sign * pool.unit for budget in now.budgets] for sign in (1, -1))
        can_take = [layer for layer in pool.layers if more[layer] < len(now.curves[layer].exposed_ns)]
        can_give = [layer for layer in pool.layers if less[layer] >= pool.least[layer]]
        if not can_take or not can_give:
            continue
        with_more = forecaster.forecast(
            [min(one, len(c.exposed_ns) - 1) for one, c in zip(more, now.curves, strict=True)]
        )
        with_less = forecaster.forecast([max(one, 0) for one in less])
        to = max(can_take, key=lambda layer: now.exposed_ns[layer] - with_more.exposed_ns[layer])
        givers = [layer for layer in can_give if layer != to]
        if not givers:
            continue
        fro = min(givers, key=lambda layer: with_less.exposed_ns[layer] - now.exposed_ns[layer])
        budgets = list(now.budgets)
        budgets[to] += pool.unit
        budgets[fro] -= pool.unit
        then = forecaster.forecast(budgets, now)
        if then.total_ns < now.total_ns:
            return then
    return None


_Move = dict[int, int]
"""Segments given (above 0) to layers and taken from them, by layer; in all as many."""

_Changes = tuple[Doubles, Doubles]
"""Exposed time gained with a step more (-inf: the layer has all its experts) and lost with a step less (inf: the layer
has no step to give), [steps, layers] each.
"""


class _Pool:
    """Layers of one size class, which share their slots, and the moves of memory among them, the most promising first
    (algorithm 1, lines 15-19).
    """

    def __init__(self, layers: Sequence[int], budgets: Sequence[int], zeta: float) -> None:
        self.layers = layers
        total = sum(budgets[layer] for layer in layers)
        self.least = {layer: min(1, budgets[layer]) for layer in layers}  # V > 0, where it can be
        self.unit = max(1, round(zeta * total))
        powers = [self.unit << i for i in range((total // self.unit).bit_length())]
        powers += [self.unit >> i for i in range(1, self.unit.bit_length())]
        self._steps = np.array(sorted(powers), np.intp)

    def changes(self, now: Forecast) -> _Changes:
        """What each step changes for each layer, if its window stays the same."""
        shape = (len(self._steps), len(self.layers))
        gains, losses = np.full(shape, -np.inf), np.full(shape, np.inf)
        for place, layer in enumerate(self.layers):
            exposed, budget = now.curves[layer].exposed_ns, now.budgets[layer]
            num_more = int(np.searchsorted(self._steps, len(exposed) - 1 - budget, side="right"))
            num_less = int(np.searchsorted(self._steps, budget - self.least[layer], side="right"))
            gains[:num_more, place] = exposed[budget] - exposed[budget + self._steps[:num_more]]
            losses[:num_less, place] = exposed[budget - self._steps[:num_less]] - exposed[budget]
        return gains, losses

    def best_moves(self, changes: _Changes) -> list[_Move]:
        """The moves that promise to gain: one for each step, that of zeta first, then by falling promise.

        As in the paper, memory goes to the layer that gains most, from the one of the others that loses least. Ties go
        to the lowest layer, and to the smallest step.
        """
        found = []
        for step, gains, losses in zip(self._steps.tolist(), *changes, strict=True):
            to = int(np.argmax(gains))
            of_others = losses.copy()
            of_others[to] = np.inf
            fro = int(np.argmin(of_others))
            net = float(gains[to] - of_others[fro])
            if net > 0:
                found.append((step != self.unit, -net, self._pair(step, to, fro)))
        return [move for *_, move in sorted(found, key=lambda one: one[:2])]

    def leftover_moves(self, now: Forecast) -> list[_Move]:
        """Moves of what layers have and cannot use (a part of an expert, or what their windows make needless): for each
        layer, all of it that the layer gains by; by falling gain.
        """
        free = {}
        for layer in self.layers:
            loaded, exposed, budget = now.curves[layer].loaded, now.curves[layer].exposed_ns, now.budgets[layer]
            is_as_good = (loaded[: budget + 1] == loaded[budget]) & (exposed[: budget + 1] == exposed[budget])
            free[layer] = budget - max(int(np.argmax(is_as_good)), self.least[layer])
        donors = sorted(self.layers, key=lambda layer: -free[layer])
        found = []
        for layer in self.layers:
            exposed, budget = now.curves[layer].exposed_ns, now.budgets[layer]
            offered = exposed[budget : budget + sum(free.values()) - free[layer] + 1]
            gain = float(offered[0] - offered[-1])
            if gain > 0:
                missing = int(np.argmin(offered))
                move = {layer: missing}
                for donor in donors:
                    if donor != layer and (given := min(free[donor], missing)):
                        move[donor] = -given
                        missing -= given
                found.append((-gain, move))
        return [move for _, move in sorted(found, key=lambda one: one[0])]

    def other_moves(self, changes: _Changes) -> Iterator[_Move]:
        """The best moves by any step from any layer to any other, even if they promise a loss: the windows of later
        layers may make up for it.
        """
        gains, losses = changes
        net = gains[:, :, None] - losses[:, None, :]  # [steps, to, from]
        themselves = range(len(self.layers))
        net[:, themselves, themselves] = -np.inf
        for place in np.argsort(-net, axis=None, kind="stable")[:_MAX_OTHERS]:
            step, to, fro = (int(index) for index in np.unravel_index(int(place), net.shape))
            if net[step, to, fro] == -np.inf:
                return
            yield self._pair(int(self._steps[step]), to, fro)

    def _pair(self, num_segments: int, to: int, fro: int) -> _Move:
        return {self.layers[to]: num_segments, self.layers[fro]: -num_segments}

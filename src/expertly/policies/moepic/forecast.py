"""What a decode step would wait for with given budgets: every layer's best split, one window leading to the next
(ExpertSplit of MoEpic's algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertly.core.geometry import Geometry
from expertly.policies.moepic.plan import LayerSplit
from expertly.policies.moepic.statistics import LayerRates
from expertly.policies.moepic.subproblem import Curve, LayerProblem, Splits
from expertly.policies.moepic.timing import Timing


@dataclass(frozen=True, slots=True)
class Forecast:
    """With these budgets, in segments a layer."""

    budgets: tuple[int, ...]
    windows_ns: tuple[float, ...]
    curves: tuple[Curve, ...]  # of each layer with its window
    exposed_ns: tuple[float, ...]
    total_ns: float

    def splits(self) -> tuple[LayerSplit, ...]:
        return tuple(
            LayerSplit(curve.kept_experts(budget), curve.kept_segments(budget), budget)
            for budget, curve in zip(self.budgets, self.curves, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comes of a layer's split."""

    window_ns: float  # T_wind: how long prefetching for the layer takes place
    loaded: float  # m: experts' worth of what is needed that is there when its router speaks
    exposed_ns: float


class Forecaster:
    """Answers for one model, its rates and its times."""

    def __init__(self, geometry: Geometry, rates: Sequence[LayerRates], timing: Timing) -> None:
        self._timing = timing
        num_segments = geometry.segments_per_expert
        splits = {num: Splits(num, num_segments) for num in {layer.num_experts for layer in geometry.layers}}
        self._problems = [LayerProblem(one, layer, timing, splits[one.num_experts]) for layer, one in enumerate(rates)]

    def forecast(self, budgets: Sequence[int], near: Forecast | None = None) -> Forecast:
        """Each layer's best split for its budget. A layer whose window is that of `near` costs nothing anew: one that
        differs in few budgets is the cheapest.
        """
        timing = self._timing
        windows, curves, exposed = [], [], []
        window = timing.first_window_ns()
        for layer, (problem, budget) in enumerate(zip(self._problems, budgets, strict=True)):
            is_as_before = near is not None and near.windows_ns[layer] == window
            curve = near.curves[layer] if near is not None and is_as_before else problem.curve(window)
            windows.append(window)
            curves.append(curve)
            exposed.append(float(curve.exposed_ns[budget]))
            if layer + 1 < timing.num_layers:
                window = timing.next_window_ns(layer, float(curve.loaded[budget]), curve.parts_with(budget))
        return Forecast(tuple(budgets), tuple(windows), tuple(curves), tuple(exposed), sum(exposed))

    def outcomes_with(self, splits: Sequence[LayerSplit]) -> tuple[Outcome, ...]:
        """Of each layer with these splits, good or bad."""
        timing, outcomes = self._timing, []
        window = timing.first_window_ns()
        for layer, (problem, split) in enumerate(zip(self._problems, splits, strict=True)):
            loaded, parts = problem.loaded_with(split.kept_experts, split.kept_segments, window)
            outcomes.append(Outcome(window, loaded, timing.exposed_ns(layer, loaded, parts)))
            if layer + 1 < timing.num_layers:
                window = timing.next_window_ns(layer, loaded, parts)
        return tuple(outcomes)

    def exposed_with(self, splits: Sequence[LayerSplit]) -> tuple[float, ...]:
        """Exposed nanoseconds of each layer with these splits, good or bad."""
        return tuple(one.exposed_ns for one in self.outcomes_with(splits))

"""Memory to the layers that wait longest without it (VramAllocation of MoEpic's algorithm 1, section 3.4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.moepic.forecast import Forecast, Forecaster, Outcome
from expertly.policies.moepic.moves import Pool
from expertly.policies.moepic.plan import SplitPlan
from expertly.policies.moepic.statistics import LayerRates
from expertly.policies.moepic.timing import Timing
from expertly.policies.moepic.uniform import uniform_budgets, uniform_plan

DEFAULT_ZETA = 0.01

_LEAST_GAIN = 1e-4  # of the sum: moves of less are not worth the thousands of trials that they take


@dataclass(frozen=True, slots=True)
class Configuration:
    """What to keep, and what a decode step is expected to wait for loads, of each layer."""

    plan: SplitPlan
    exposed_ns: tuple[float, ...]
    uniform_exposed_ns: tuple[float, ...]  # with equal budgets, best splits; in sum never less
    start_exposed_ns: tuple[float, ...]  # with equal budgets, half of each expert, `uniform_plan`; in sum never less
    num_moves: int  # of memory from one layer to another
    outcomes: tuple[Outcome, ...]  # what comes of `plan`, layer by layer


def configure(
    geometry: Geometry,
    kept_segments: Sequence[int],
    rates: Sequence[LayerRates],
    timing: Timing,
    zeta: float = DEFAULT_ZETA,
) -> Configuration:
    """The best budgets and splits found for so many kept segments in each size class; the buffer is not among them.

    Starts with equal budgets and moves memory, zeta of a class's at a time, from the layer that loses least to the one
    that gains most, while the sum of exposed time falls. It ends, as every move lowers that sum; no layer that had
    some is left without any. What is left that no layer gains by stays in the budget it is in, free
    (`SplitPlan.free_segments`). A layer of which nothing was observed counts as one whose experts are all alike. Ours,
    not the paper's:

    - a layer's gain and loss are taken with the window it has now, not with that of a model all of whose layers
      have more or less; what the move does to other windows is seen when it is tried, in the sum;
    - where no move of zeta helps, steps of zeta times powers of two, up and down to one segment, are tried, the most
      promising first; then what several layers cannot use goes to one together; then other pairs of layers. After each
      that helps zeta's turn comes again.

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
    uniform = forecaster.forecast(uniform_budgets(geometry, kept_segments))
    pools = [
        Pool([layer for layer, one in enumerate(geometry.size_classes) if one == size_class], uniform.budgets, zeta)
        for size_class in range(geometry.num_size_classes)
    ]
    now, num_moves = uniform, 0
    while (better := _improved(forecaster, pools, now)) is not None:
        now = better
        num_moves += 1
    plan, exposed = SplitPlan(geometry, now.splits()), now.exposed_ns
    start = uniform_plan(geometry, kept_segments)
    start_exposed = forecaster.exposed_with(start.layers)
    if sum(start_exposed) < now.total_ns:  # a layer's best split may cost the next layer's window more than it gains
        plan, exposed, num_moves = start, start_exposed, 0
    outcomes = forecaster.outcomes_with(plan.layers)
    return Configuration(plan, exposed, uniform.exposed_ns, start_exposed, num_moves, outcomes)


def _improved(forecaster: Forecaster, pools: Sequence[Pool], now: Forecast) -> Forecast | None:
    """After the first move that lowers the sum, as tried; None: no move does."""
    if not now.total_ns:
        return None
    changes = [(pool, pool.changes(now)) for pool in pools]
    best = (move for pool, change in changes for move in pool.best_moves(change))
    leftovers = (move for pool in pools for move in pool.leftover_moves(now))
    others = (move for pool, change in changes for move in pool.other_moves(change))
    for move in chain(best, leftovers, others):
        budgets = list(now.budgets)
        for layer, num_segments in move.segments.items():
            budgets[layer] += num_segments
        then = forecaster.forecast(budgets, now)
        if then.total_ns < now.total_ns * (1 - _LEAST_GAIN):
            return then
    return None

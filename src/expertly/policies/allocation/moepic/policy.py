"""The allocations `split` and `moepic`: layers keep a part of many experts instead of few whole ones (MoEpic, sections
3.1 and 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation.base import Allocation
from expertly.policies.allocation.moepic.configurator import DEFAULT_ZETA, Configuration, Forecaster, configure
from expertly.policies.allocation.moepic.plan import LayerSplit, SplitPlan
from expertly.policies.allocation.moepic.statistics import LayerRates, LayerStatistics
from expertly.policies.allocation.moepic.timing import Timing
from expertly.policies.allocation.uniform import equal_quotas, uniform_quotas
from expertly.policies.base import PolicyOptions, option
from expertly.policies.eviction.lcp import LCPOptions
from expertly.policies.known import NOTHING, Known

if TYPE_CHECKING:
    from expertly.policies.allocation.base import Job

_FIRST = (64, 256)
"""Tokens before the first configurations, where tau is larger (our choice)."""

_RIGHT = 0.8
"""The expected share of the first K predicted experts that are needed: about what a lookahead of one layer reaches."""


@dataclass(frozen=True)
class SplitOptions(PolicyOptions):
    """Options of `split`."""

    theta: float = option(0.5, "the part of an expert that is kept of it, from its top", above=0, most=1)


class SplitExperts(Allocation):
    """Equal quotas; of each kept expert the first segments, theta of it: rounded to the nearest number, a half down, at
    least one. Layers that keep some of every expert and have more room keep more of each.

    With a plan for the model and budget, layers keep what that says.
    """

    name = "split"
    options: ClassVar[type[Any]] = SplitOptions
    needs_layers = True
    splits = True

    def __init__(self, geometry: Geometry, options: Any = SplitOptions(), known: Known = NOTHING) -> None:
        super().__init__(geometry)
        self._plan = known.get(SplitPlan)
        self._top = max(1, math.ceil(options.theta * geometry.segments_per_expert - 0.5))

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        """Whole tops, as equal as can be; the rest of one goes to the lowest layers that have room."""
        geometry, top = self.geometry, self._top
        if self._plan is not None:
            return [layer.budget_segments for layer in self._plan.layers]
        if top == geometry.segments_per_expert:
            return uniform_quotas(geometry, kept_slots)
        quotas = equal_quotas(geometry, kept_slots)
        num_tops = [slots // top for slots in kept_slots]
        experts = equal_quotas(geometry, num_tops, 1)
        for size_class, slots in enumerate(kept_slots):
            layers = geometry.layers_of_class(size_class)
            if sum(experts[layer] for layer in layers) < num_tops[size_class]:
                continue  # some of every expert is kept, and there is more
            rest = slots % top
            for layer in layers:
                most = geometry.layers[layer].num_experts * geometry.segments_per_expert
                quotas[layer] = min(experts[layer] * top + rest, most)
                rest -= quotas[layer] - experts[layer] * top
        return quotas

    def tops(self, quotas: Sequence[int]) -> list[int] | None:
        geometry = self.geometry
        if self._plan is not None:
            return [layer.kept_segments or geometry.segments_per_expert for layer in self._plan.layers]
        if self._top == geometry.segments_per_expert:
            return None
        pairs = zip(quotas, geometry.layers, strict=True)
        return [max(self._top, quota // layer.num_experts) for quota, layer in pairs]


@dataclass(frozen=True)
class MoEpicOptions(PolicyOptions):
    """Options of `moepic`."""

    tau: int = option(5000, "decoded tokens between two configurations", least=1)
    zeta: float = option(DEFAULT_ZETA, "share of what is kept that moves at a time", above=0, below=1)
    pieces: bool = option(True, "count what computing experts in parts costs, as far as it is known (ours)")
    start: Literal["timed", "half"] = option("timed", "begin with what is best by times alone (ours), or with halves")
    moves: Literal["ours", "printed"] = option("ours", "how memory moves between layers: see `configure`")


class MoEpic(SplitExperts):
    """Starts as `split` with theta 0.5. As soon as times are known, the split that is best by times alone is due
    (`start`). After 64 and 256 tokens, as far as these are below tau, and after every tau, a configuration is due. It
    is made from what decode needed of each layer and what had been predicted of it by then (sections 3.3 and 3.4).

    A pass over several tokens counts as one that needs the experts of all of them, since who chose which is not known
    here. Prompts do not count, since they evict nothing.

    With a plan it starts with that, and the first configuration is due after tau tokens.
    """

    name = "moepic"
    options = MoEpicOptions
    is_configured = True
    is_online = True

    def __init__(self, geometry: Geometry, options: MoEpicOptions = MoEpicOptions(), known: Known = NOTHING) -> None:
        super().__init__(geometry, SplitOptions(), known)
        self._options = options
        self._seen = [
            LayerStatistics(layer.num_experts, options.tau, number, known.get(LCPOptions))
            for number, layer in enumerate(geometry.layers)
        ]
        self._predicted: list[Prediction | None] = [None] * geometry.num_layers  # the newest of each layer
        self._kept_slots: list[int] = []
        self._num_tokens = 0
        self._early = [] if self._plan is not None else [num for num in _FIRST if num < options.tau]
        """Before tau, numbers of tokens after which configurations are due."""
        self._least = min([*self._early, options.tau])
        self._due: int | None = 0 if self._plan is None and options.start == "timed" else self._least
        """Tokens after which a configuration is due; None: one is being worked out."""
        self._num_configurations = 0

    def begin(self, quotas: Sequence[int]) -> None:
        if self._plan is not None:  # what its tops leave of a budget is staged now, and may be kept later
            quotas = [layer.budget_segments for layer in self._plan.layers]
        self._kept_slots = self.geometry.class_sums(quotas)

    def predicted(self, prediction: Prediction) -> None:
        self._predicted[prediction.layer] = prediction

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        layer = router.layer
        prediction, self._predicted[layer] = self._predicted[layer], None
        if not router.serves_decode:
            return None
        needed = router.experts
        if False in router.is_decode or 0 in router.num_tokens:
            every = zip(needed, router.num_tokens, router.is_decode, strict=True)
            needed = [expert for expert, num, is_decode in every if num and is_decode]
        self._seen[layer].note(needed, None if prediction is None else prediction.experts)
        if layer == self.geometry.num_layers - 1:
            self._num_tokens += router.batch_tokens if False not in router.is_decode else 1  # a prompt's do not count
        return None

    def due(self) -> Job | None:
        if self._due is None or self._num_tokens < self._due:
            return None
        self._due = None
        rates = [seen.rates() for seen in self._seen] if self._num_tokens >= self._least else None
        return partial(_work_out, self.geometry, list(self._kept_slots), rates, self._options)

    def configured(self, plan: SplitPlan) -> tuple[list[int], list[int]]:
        kept = plan.kept(self.geometry)
        following = [num for num in self._early if num > self._num_tokens]
        self._due = following[0] if following else self._num_tokens + self._options.tau
        self._num_configurations += 1
        return kept

    def facts(self) -> dict[str, object]:
        """`learned`: from how much; `configurations`: how often what is kept was worked out anew."""
        learned = f"online, from {self._num_tokens} decoded tokens"
        return {"learned": learned, "configurations": self._num_configurations}


def _work_out(
    geometry: Geometry, kept: Sequence[int], rates: Sequence[LayerRates] | None, options: MoEpicOptions, timing: Timing
) -> Configuration:
    """A configuration from rates or, without them, from times alone."""
    if not options.pieces:
        timing = replace(timing, span_ns=(), ask_ns=())
    if rates is None:
        return timed_split(geometry, kept, timing)
    return configure(geometry, kept, rates, timing, options.zeta, as_printed=options.moves == "printed")


def timed_split(geometry: Geometry, kept_segments: Sequence[int], timing: Timing) -> Configuration:
    """The split to start with when only times are known (ours): the theta of least exposed time, the same for all
    layers, where experts are needed alike and 80 % of the first K predicted experts are needed. Of equal ones the
    nearest to 0.5, which is also the choice where parts cost nothing of their own: there it is the paper's start.
    """
    forecaster = Forecaster(geometry, [_expected(layer) for layer in geometry.layers], timing)
    most = geometry.segments_per_expert
    plan = _plan(geometry, kept_segments, 0.5)
    outcomes = start = forecaster.outcomes(plan.layers)
    if any(timing.counts_parts(layer) for layer in range(geometry.num_layers)):
        for top in sorted(range(1, most + 1), key=lambda top: (abs(2 * top - most), top)):
            other = _plan(geometry, kept_segments, top / most)
            then = forecaster.outcomes(other.layers)
            if sum(one.exposed_ns for one in then) < sum(one.exposed_ns for one in outcomes):
                plan, outcomes = other, then
    start_exposed = tuple(one.exposed_ns for one in start)
    return Configuration(plan, outcomes, start_exposed, start_exposed, num_moves=0)


def _plan(geometry: Geometry, kept_segments: Sequence[int], theta: float) -> SplitPlan:
    split = SplitExperts(geometry, SplitOptions(theta))
    quotas = split.quotas(kept_segments)
    tops = split.tops(quotas) or [geometry.segments_per_expert] * geometry.num_layers
    layers = []
    for quota, top, layer in zip(quotas, tops, geometry.layers, strict=True):
        kept = min(quota // top, layer.num_experts)
        layers.append(LayerSplit(kept, top if kept else 0, quota))
    return SplitPlan(geometry, tuple(layers))


def _expected(layer: LayerGeometry) -> LayerRates:
    """The rates expected of a layer of which nothing has been seen."""
    num, top_k = layer.num_experts, layer.top_k
    hits = 1 - (1 - np.linspace(0, 1, num + 1)) ** 2
    accuracy, predicted_hits = np.full(num, _RIGHT if num > top_k else 1.0), np.tile(hits, (num, 1))
    if num > top_k:  # of all experts, C are among the C hottest
        accuracy[top_k:] = top_k * (1 - _RIGHT) / (num - top_k)
        predicted_hits[top_k:] = (np.arange(num + 1) - top_k * hits) / (num - top_k)
    return LayerRates(hits, accuracy, predicted_hits)

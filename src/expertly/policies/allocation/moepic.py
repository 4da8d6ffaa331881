"""What each layer keeps of how many experts, worked out from what it was asked for (MoEpic, sections 3.3 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation.base import Job
from expertly.policies.allocation.split import Split
from expertly.policies.allocation.timed_split import timed_split
from expertly.policies.moepic.configurator import DEFAULT_ZETA, Configuration, configure
from expertly.policies.moepic.plan import SplitPlan
from expertly.policies.moepic.statistics import LayerRates, LayerStatistics
from expertly.policies.moepic.timing import Timing

_FIRST = (64, 256)
"""Tokens before the first configurations, where tau is more (our choice)."""


@dataclass(frozen=True, slots=True)
class MoEpicOptions:
    """Options of `moepic`."""

    tau: int = 5000  # decoded tokens between two configurations
    zeta: float = DEFAULT_ZETA  # share of what is kept that moves at a time
    pieces: bool = True  # what computing experts in pieces costs is counted (ours), as far as it is known
    start: Literal["timed", "half"] = "timed"  # what is best by times alone, once these are known (ours); theta 0.5

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise ConfigError(f"tau={self.tau}: must be at least 1 token")
        if not 0 < self.zeta < 1:
            raise ConfigError(f"zeta={self.zeta}: must be above 0 and below 1")


class MoEpic(Split):
    """Begins as `split` with theta 0.5. As soon as times are known, and nothing else is, the split is due that is best
    by these (`start`). After 64 and 256 tokens, as far as tau is more, and every tau, a configuration is due, made from
    what decode needed of each layer and what had been predicted of it by then.

    A pass over several tokens counts as one that needs what all of them need: nobody says here which asked for what.
    Prompts are left out: they fill what is empty and evict nothing.

    With a plan it begins with that, and the first configuration is due after tau tokens.
    """

    is_online = True
    is_configured = True

    def __init__(
        self, geometry: Geometry, options: MoEpicOptions = MoEpicOptions(), plan: SplitPlan | None = None
    ) -> None:
        super().__init__(geometry, plan=plan)
        self._options = options
        self._seen = [
            LayerStatistics(layer.num_experts, options.tau, early=number)
            for number, layer in enumerate(geometry.layers)
        ]
        self._predicted: list[Prediction | None] = [None] * geometry.num_layers  # the newest of each layer
        self._kept_slots: list[int] = []
        self._num_tokens = 0
        self._early = [] if plan is not None else [num for num in _FIRST if num < options.tau]
        """Before tau, numbers of tokens after which configurations are due."""
        self._least = min([*self._early, options.tau])
        self._due: int | None = 0 if plan is None and options.start == "timed" else self._least
        """None: something is being worked out."""
        self._num_configurations = 0

    def begin(self, shares: Sequence[int]) -> None:
        if self._plan is not None:  # what its tops leave of a budget is the ring's, but may be kept later
            shares = [layer.budget_segments for layer in self._plan.layers]
        self._kept_slots = [0] * self._geometry.num_size_classes
        for size_class, share in zip(self._geometry.size_classes, shares, strict=True):
            self._kept_slots[size_class] += share

    def predicted(self, prediction: Prediction) -> None:
        self._predicted[prediction.layer] = prediction

    def ran(self, demand: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        layer = demand.layer
        prediction, self._predicted[layer] = self._predicted[layer], None
        if not demand.serves_decode:
            return None
        needed = demand.experts
        if False in demand.is_decode or 0 in demand.num_tokens:
            every = zip(needed, demand.num_tokens, demand.is_decode, strict=True)
            needed = [expert for expert, num, is_decode in every if num and is_decode]
        self._seen[layer].note(needed, None if prediction is None else prediction.experts)
        if layer == self._geometry.num_layers - 1:
            self._num_tokens += demand.batch_tokens if False not in demand.is_decode else 1  # a prompt's do not count
        return None

    def due(self) -> Job | None:
        if self._due is None or self._num_tokens < self._due:
            return None
        self._due = None
        rates = [seen.rates() for seen in self._seen] if self._num_tokens >= self._least else None
        return partial(_work_out, self._geometry, list(self._kept_slots), rates, self._options)

    def configured(self, plan: SplitPlan) -> None:
        following = [num for num in self._early if num > self._num_tokens]
        self._due = following[0] if following else self._num_tokens + self._options.tau
        self._num_configurations += 1

    def facts(self) -> dict[str, object]:
        """`learned`: from how much; `configurations`: how often what is kept was worked out anew."""
        learned = f"online, from {self._num_tokens} decoded tokens"
        return {"learned": learned, "configurations": self._num_configurations}


def _work_out(
    geometry: Geometry, kept: Sequence[int], rates: Sequence[LayerRates] | None, options: MoEpicOptions, timing: Timing
) -> Configuration:
    """From rates; without, from times alone."""
    if not options.pieces:
        timing = timing.without_parts()
    if rates is None:
        return timed_split(geometry, kept, timing)
    return configure(geometry, kept, rates, timing, options.zeta)

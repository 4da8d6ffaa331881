"""A system: a choice of policies and of how layers run (docs/conventions.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.policies.admission import ADMISSIONS
from expertly.policies.allocation import ALLOCATIONS, Allocation
from expertly.policies.allocation.moepic import SplitPlan
from expertly.policies.base import option_names
from expertly.policies.eviction import EVICTIONS, EvictionPolicy
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import LearnedState
from expertly.policies.predictor import PREDICTORS, Predictor
from expertly.policies.prefetch import PREFETCHES
from expertly.policies.registry import OrNone, Registry
from expertly.scheduler.budget import Budget, allocate
from expertly.scheduler.misses import MissSplit
from expertly.scheduler.prefetch_gate import GATES, PrefetchGate
from expertly.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class System:
    """A named choice of parts. Raises ConfigError where they do not fit together."""

    name: str
    summary: str
    eviction: str  # a key of EVICTIONS, or "none": nothing ever goes
    scope: str  # "layer": one cache a layer; "global": one cache over all layers
    allocation: str = "uniform"  # a key of ALLOCATIONS: how many slots each layer keeps
    prediction: str = "none"  # a key of PREDICTORS, or "none"
    prefetch: str = "score"  # a key of PREFETCHES: which prediction is loaded first
    transfer: str = "demand"  # where it predicts, see Prefetcher; "at load" where it keeps everything
    preemption: str = "early"  # see Scheduler.__init__
    order: str = "resident"  # see Scheduler.__init__
    admission: str = "always"  # see Scheduler.__init__
    prefill: str = "stream"  # see Scheduler.__init__
    ahead: str = "cache"  # see Scheduler.__init__
    prefetching: str = "always"  # see Scheduler.__init__
    gate: str = "none"  # see PrefetchGate
    distance: int = 1  # layers that the predictor looks ahead
    window: int | None = None  # see Scheduler.__init__
    segments: int = 1  # P, where nobody asks for another (core.geometry.fitting_segments)
    options: tuple[tuple[str, str], ...] = ()  # of its policies, as they were given
    keeps_everything: bool = False
    needs: tuple[str, ...] = ()  # "future": simulations only; else fields of a trace. With those of its policies

    def __post_init__(self) -> None:
        if self.ahead == "ring":  # what it was called until November 2026
            object.__setattr__(self, "ahead", "staging")
        _check(self)
        of_eviction = ("future",) if self._eviction and self._eviction.needs_future else ()
        of_predictor = self._predictor.needs if self._predictor else ()
        object.__setattr__(self, "needs", tuple(dict.fromkeys((*self.needs, *of_eviction, *of_predictor))))

    @property
    def _predictor(self) -> type[Predictor] | None:
        return None if self.prediction == "none" else PREDICTORS[self.prediction]

    @property
    def _eviction(self) -> type[EvictionPolicy] | None:
        return None if self.keeps_everything else EVICTIONS[self.eviction]

    @property
    def prediction_learns(self) -> str | None:
        """The kind of state that its predictor learns ("maps", ...); None: nothing that a file keeps."""
        return self._predictor.learns.kind if self._predictor and self._predictor.learns else None

    @property
    def eviction_learns(self) -> str | None:
        """The kind of state that its eviction policy learns ("reuse"); None: nothing that a file keeps."""
        return self._eviction.learns.kind if self._eviction and self._eviction.learns else None

    @property
    def learns(self) -> str | None:
        """The kind of state that a file named for it keeps: its predictor's, else its eviction policy's."""
        return self.prediction_learns or self.eviction_learns

    @property
    def weights(self) -> type[LearnedState] | None:
        """Of a predictor that must be trained before: the class of its weights."""
        return None if self._predictor is None else self._predictor.weights

    @property
    def takes_weights(self) -> bool:
        """Whether its predictor needs trained weights: `expertly lab train`."""
        return self.weights is not None

    @property
    def takes_plan(self) -> bool:
        """Whether its allocation can begin with a split plan: `expertly lab configure`."""
        return not self.keeps_everything and ALLOCATIONS[self.allocation].splits

    def check_plan(self, plan: SplitPlan, geometry: Geometry, budget: Budget) -> None:
        """Raises ConfigError where the system does not take a plan, or where the plan is of other experts or segments,
        or keeps more than there are slots for.
        """
        if not self.takes_plan:
            takers = ", ".join(name for name, one in ALLOCATIONS.items() if one.splits) or "there are none"
            raise ConfigError(
                f"plan: system {self.name!r} takes none (allocation={self.allocation}); accepted: allocation={takers}"
            )
        if "theta" in dict(self.options):
            raise ConfigError(
                f"plan: system {self.name!r} says theta, as a plan does of every layer; accepted: one of them"
            )
        plan.check_fits(geometry, budget.kept_slots)

    def scheduler(
        self,
        geometry: Geometry,
        budget: Budget,
        known: Known = NOTHING,
        order: str | None = None,
        split: MissSplit | None = None,
    ) -> Scheduler:
        """The scheduler of this system. `order`: in place of the system's own. `split`: of misses, where the system can
        share them with the host. Raises ConfigError where the system cannot have that order, and where `known` lacks
        what a policy needs.
        """
        order = self.ordered(order)
        eviction = self._eviction or EVICTIONS["lru"]  # never asked where everything is kept
        return Scheduler(
            geometry,
            budget,
            eviction.of_model(geometry, known, self.options_of("eviction")),
            scope=self.scope,
            order=order,
            preemption=self.preemption,
            transfer=self.transfer,
            admission=ADMISSIONS[self.admission].make(self.options_of("admission")),
            prefill=self.prefill,
            ahead=self.ahead,
            prefetching=self.prefetching,
            prefetch=PREFETCHES[self.prefetch].make(self.options_of("prefetch")),
            window=self.window,
            allocation=self._allocation(geometry, known),
            gate=self._gate(),
            split=split if self.can_share_misses(order) else None,
        )

    def budget(self, geometry: Geometry, budget: Budget, known: Known = NOTHING) -> Budget:
        """The budget's slots as this system begins with them: staging slots, and the quota of each layer."""
        if self.keeps_everything:
            return budget
        return allocate(geometry, budget, self._allocation(geometry, known))

    def allocation_facts(self, scheduler: Scheduler) -> dict[str, object] | None:
        """How much each layer of its scheduler keeps now, for results; None where all keep the same.

        `experts`: the quota of each layer, in experts. `split`, where layers keep parts of experts: how many experts,
        and which part of each, from its top. And the facts of the allocation.
        """
        if self.allocation == "uniform" or self.keeps_everything:
            return None
        num_segments, cache = scheduler.geometry.segments_per_expert, scheduler.cache
        numbers = [share / num_segments for share in cache.quotas]
        experts = [int(num) if num.is_integer() else num for num in numbers]
        said: dict[str, object] = {"name": self.allocation, "experts": experts}
        if ALLOCATIONS[self.allocation].splits:
            tops = [top.bit_count() for top in cache.tops]
            said["split"] = [
                {"kept_experts": share // top, "theta": top / num_segments}
                for share, top in zip(cache.quotas, tops, strict=True)
            ]
        return said | scheduler.allocation.facts()

    def ordered(self, order: str | None) -> str:
        """`order`, in which experts are computed; the system's own where it is None. Raises ConfigError for one that
        does not exist or that this system cannot have.
        """
        if order is None:
            return self.order
        if order not in ORDERS:
            raise ConfigError(f"order={order!r:.80}: unknown; accepted: {', '.join(ORDERS)}")
        if order == "id" and ADMISSIONS[self.admission].weighs_scores:
            raise ConfigError(
                f"order='id': one expert at a time leaves system {self.name!r} no choice; accepted: resident"
            )
        return order

    def can_share_misses(self, order: str) -> bool:
        """Whether the host may compute some of a layer's misses: all are known when its router ran, nothing waits for
        what is prefetched, and layers keep whole experts.
        """
        is_known = order != "id" and self.preemption == "early" and self.transfer in ("demand", "asynchronous")
        return is_known and not self.keeps_everything and not ALLOCATIONS[self.allocation].splits

    def predictor(self, geometry: Geometry, known: Known = NOTHING) -> Predictor | None:
        """Its predictor; None where it has none. Raises ConfigError where `known` lacks what it needs."""
        if self._predictor is None:
            return None
        return self._predictor.make(geometry, known, self.distance, self.options_of("prediction"))

    def options_of(self, part: str) -> dict[str, str]:
        """Those of its options that belong to one of its policies, a key of REGISTRIES."""
        names = names_of_options(part, getattr(self, part))
        return {key: value for key, value in self.options if key in names}

    def _gate(self) -> PrefetchGate | None:
        if self.gate == "none" or self._predictor is None:
            return None
        is_told = self._eviction is not None and self._eviction.needs_probabilities
        return PrefetchGate(always_observes=is_told or self._predictor.is_taught())

    def _allocation(self, geometry: Geometry, known: Known) -> Allocation:
        if self._eviction is not None:  # an allocation may rank experts as caches do
            known = known.giving(self._eviction.parse(self.options_of("eviction")))
        return ALLOCATIONS[self.allocation].make(geometry, known, self.options_of("allocation"))


def _check(system: System) -> None:
    """Raise ConfigError where a part is unknown or does not fit the others."""
    where = f"system={system.name!r}"
    for key, accepted in ACCEPTED.items():
        value = getattr(system, key)
        is_given = key != "transfer" and not (key == "eviction" and system.keeps_everything)
        if is_given and value not in accepted:
            raise unknown(where, key, value)
    system.ordered(system.order)
    problem = next(_problems(system), None)
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    if not system.keeps_everything:
        _check_options(system, where)


def _problems(system: System) -> Iterator[str]:
    """Why the parts of a system do not fit together, with what is accepted."""
    predictor = system._predictor
    is_best = ADMISSIONS[system.admission].weighs_scores
    transfers = ("at load",) if system.keeps_everything else ACCEPTED["transfer"] if predictor else ("demand",)
    if system.transfer not in transfers:
        what = "predicts" if predictor else "predicts nothing"
        yield f"transfer={system.transfer!r:.80}: of a system that {what}; accepted: {', '.join(transfers)}"
    if system.gate != "none" and system.transfer == "synchronous":
        yield (
            f"gate={system.gate!r}: times steps with what nobody waits for, and transfer='synchronous' waits for "
            f"all that is predicted; accepted: gate=none, or transfer=asynchronous"
        )
    if system.preemption == "late" and is_best:
        yield (
            f"preemption='late': what is missing is found one expert at a time, which leaves "
            f"admission={system.admission!r} no choice; accepted: preemption=early"
        )
    for key in NUMBERS:
        number = getattr(system, key)
        if number is not None and number < 1:
            yield f"{key}={number}: must be at least 1"
    if not system.keeps_everything:
        yield from _problems_of_keeping(system, predictor, is_best)
    if predictor and system.prefetch != "score" and not predictor.gives_probabilities:
        yield (
            f"prefetch={system.prefetch!r} weighs probabilities, which prediction={system.prediction!r} does not "
            f"give; accepted: score"
        )


def _problems_of_keeping(system: System, predictor: type[Predictor] | None, is_best: bool) -> Iterator[str]:
    """Why its eviction, admission and allocation do not fit together."""
    eviction, allocation = EVICTIONS[system.eviction], ALLOCATIONS[system.allocation]
    if is_best and not eviction.is_scored:
        scored = ", ".join(name for name, one in EVICTIONS.items() if one.is_scored)
        yield (
            f"admission={system.admission!r} compares scores, which eviction={system.eviction!r} does not have; "
            f"accepted: admission=always, or eviction={scored}"
        )
    if is_best and system.prefill != "stream":
        yield (
            f"prefill={system.prefill!r}: with admission={system.admission!r} what a prompt needs is weighed against "
            f"what is kept; accepted: prefill=stream, or admission=always"
        )
    if eviction.needs_best and not is_best:
        yield (
            f"eviction={system.eviction!r} needs to be told what is needed before it is kept; accepted: admission=best"
        )
    if eviction.needs_probabilities and not (predictor and predictor.gives_probabilities):
        predictors = ", ".join(name for name, one in PREDICTORS.items() if one.gives_probabilities)
        yield (
            f"eviction={system.eviction!r} goes by predicted probabilities, which prediction={system.prediction!r} "
            f"does not give; accepted: prediction={predictors}"
        )
    if allocation.needs_layers and system.scope != "layer":
        yield (
            f"allocation={system.allocation!r} shares slots out among layers, scope={system.scope!r} does not; "
            f"accepted: scope=layer"
        )
    if allocation.needs_layers and eviction.is_sized:
        others = ", ".join(name for name, one in EVICTIONS.items() if not one.is_sized)
        yield (
            f"allocation={system.allocation!r} changes the sizes of caches, by which eviction={system.eviction!r} "
            f"goes; accepted: eviction={others}"
        )
    if not allocation.keeps and predictor and system.ahead != "staging":
        yield (
            f"allocation={system.allocation!r} keeps no experts: what is predicted can be loaded into staging slots "
            "only; accepted: ahead=staging"
        )


def _check_options(system: System, where: str) -> None:
    """Raise ConfigError unless each option belongs to one policy, and has a value that the policy takes."""
    owners: dict[str, str] = {}
    for part, registry in REGISTRIES.items():
        name = getattr(system, part)
        for option in names_of_options(part, name):
            taken = "a part" if option in PARTS else f"one of {owners[option]}" if option in owners else None
            if taken:
                raise ConfigError(f"{where}: {part}={name!r}: its option {option!r} is called as {taken} is")
            owners[option] = f"{part}={name!r}"
        if name in registry:
            registry[name].parse(system.options_of(part), where)
    for option, _ in system.options:
        if option not in owners:
            raise ConfigError(f"{where}: option {option!r:.80}: unknown; accepted: {', '.join(owners) or 'none'}")


def names_of_options(part: str, name: str) -> list[str]:
    """The options of the policy of this name; `part` is a key of REGISTRIES."""
    registry = REGISTRIES[part]
    return option_names(registry[name].options) if name in registry else []


def unknown(where: str, key: str, value: str) -> ConfigError:
    accepted = ", ".join(ACCEPTED[key])
    if (key, value) == ("gate", "confidence"):
        return ConfigError(
            f"{where}: gate='confidence': no gate any more, use 'measured' or 'none'; accepted: {accepted}"
        )
    path = ", or the dotted path of one" if key in REGISTRIES else ""
    return ConfigError(f"{where}: {key}={value!r:.80}: unknown; accepted: {accepted}{path}")


ORDERS = ("resident", "id")

ACCEPTED: dict[str, Collection[str]] = {
    "eviction": EVICTIONS,
    "scope": ("layer", "global"),
    "allocation": ALLOCATIONS,
    "prediction": OrNone(PREDICTORS),
    "prefetch": PREFETCHES,
    "transfer": ("asynchronous", "synchronous"),
    "preemption": ("early", "late"),
    "order": ORDERS,
    "admission": ADMISSIONS,
    "prefill": ("stream", "evict"),
    "ahead": ("cache", "staging"),
    "prefetching": ("always", "decode"),
    "gate": GATES,
}
"""For each part that is chosen by name, the names it accepts."""

REGISTRIES: dict[str, Registry[Any]] = {
    "prediction": PREDICTORS,
    "allocation": ALLOCATIONS,
    "eviction": EVICTIONS,
    "prefetch": PREFETCHES,
    "admission": ADMISSIONS,
}
"""Parts that are policies: they have options, which a system's name lists in this order, and may come from outside the
package (docs/extending.md).
"""

NUMBERS = ("distance", "window", "segments")
OF_KEEPING = ("eviction", "scope", "admission", "prefill")
"""Parts that have no effect where nothing is kept."""
OF_PREDICTION = ("prefetch", "transfer", "ahead", "prefetching", "gate", "distance", "window")
"""Parts that have no effect where nothing is predicted."""

PARTS = (*ACCEPTED, *NUMBERS)
"""The keys of `name:key=value` for any system that does not keep everything, beside options."""

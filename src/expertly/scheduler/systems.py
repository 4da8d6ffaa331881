"""Systems: a choice of policies and of how layers run (docs/conventions.md), and the presets, which have names.

Each preset can be taken with other parts: `name:key=value:key=value`. A preset that is added here exists everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation import Allocation
from expertly.policies.base import option_names, option_text, parse_int
from expertly.policies.eviction import EvictionPolicy, ScoredPolicy
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import LearnedState
from expertly.policies.prediction import ALL_LAYERS, Predictor
from expertly.policies.registry import ALLOCATIONS, EVICTIONS, PREDICTORS, PREFETCHES, OrNone, Registry
from expertly.scheduler.budget import Budget, allocate
from expertly.scheduler.scheduler import Scheduler, Split

OVERLAPPED = "overlapped"
"""Loads, prefetches and computing go on at the same time, as in an engine."""

BASE_SYSTEM = "lru"
"""The baseline."""

AUTO_SYSTEM = "auto"
"""The default where a model is loaded: what `expertly bench --save` remembers, else `default_system`."""

LEAST_NBYTES = 3 << 18
"""Least bytes of an expert for `expertly-ahead` to be the default: loading tiny ones is faster than asking routers."""

ACCEPTED: dict[str, Collection[str]] = {
    "eviction": EVICTIONS,
    "scope": ("layer", "global"),
    "allocation": ALLOCATIONS,
    "prediction": OrNone(PREDICTORS),
    "prefetch": PREFETCHES,
    "admission": ("always", "best"),
    "prefill": ("stream", "evict"),
    "ahead": ("cache", "staging"),
    "loop": (OVERLAPPED, "synchronous", "by-id"),
}
"""For each part that is chosen by name, the names it accepts."""

REGISTRIES: dict[str, Registry[Any]] = {
    "prediction": PREDICTORS,
    "allocation": ALLOCATIONS,
    "eviction": EVICTIONS,
    "prefetch": PREFETCHES,
}
"""Parts that are policies: they have options, which a system's name lists in this order, and may come from outside the
package (docs/extending.md).
"""

NUMBERS = ("distance", "segments")
PARTS = (*ACCEPTED, *NUMBERS)
"""The keys of `name:key=value` for any system that does not keep everything, beside options."""
OF_KEEPING = ("eviction", "scope", "admission", "prefill")
"""Parts that have no effect where nothing is kept."""
OF_PREDICTION = ("prefetch", "ahead", "distance")
"""Parts that have no effect where nothing is predicted."""


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
    admission: str = "always"  # see Scheduler.__init__
    prefill: str = "stream"  # see Scheduler.__init__
    ahead: str = "cache"  # see Scheduler.__init__
    distance: int = 1  # layers that the predictor looks ahead
    loop: str = OVERLAPPED  # how a layer runs; another one is for simulation (sim/synchronous.py)
    segments: int = 1  # P, where nobody asks for another (core.geometry.fitting_segments)
    options: tuple[tuple[str, str], ...] = ()  # of its policies, as they were given
    keeps_everything: bool = False
    needs: tuple[str, ...] = ()  # "future": simulations only; else fields of a trace. With those of its policies

    def __post_init__(self) -> None:
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
        """Of a predictor that must be trained before (`expertly lab train`): the class of its weights."""
        return None if self._predictor is None else self._predictor.weights

    @property
    def can_share_misses(self) -> bool:
        """Whether the host may compute some of a layer's misses: layers keep whole experts, but not all."""
        return self.loop == OVERLAPPED and not self.keeps_everything and not ALLOCATIONS[self.allocation].splits

    def scheduler(
        self, geometry: Geometry, budget: Budget, known: Known = NOTHING, split: Split | None = None
    ) -> Scheduler:
        """The scheduler of this system. `split`: of misses, where the system can share them with the host. Raises
        ConfigError where `known` lacks what a policy needs.
        """
        eviction = self._eviction or EVICTIONS["lru"]  # never asked where everything is kept
        return Scheduler(
            geometry,
            budget,
            eviction.of_model(geometry, known, self.options_of("eviction")),
            scope=self.scope,
            admission=self.admission,
            prefill=self.prefill,
            ahead=self.ahead,
            prefetch=PREFETCHES[self.prefetch].make(self.options_of("prefetch")),
            allocation=self._allocation(geometry, known),
            split=split if self.can_share_misses else None,
            predicts=self.prediction != "none",
        )

    def budget(self, geometry: Geometry, budget: Budget, known: Known = NOTHING) -> Budget:
        """The budget's slots as this system begins with them: staging slots, and the quota of each layer."""
        return budget if self.keeps_everything else allocate(geometry, budget, self._allocation(geometry, known))

    def predictor(self, geometry: Geometry, known: Known = NOTHING) -> Predictor | None:
        """Its predictor; None where it has none. Raises ConfigError where `known` lacks what it needs."""
        if self._predictor is None:
            return None
        return self._predictor.make(geometry, known, self.distance, self.options_of("prediction"))

    def options_of(self, part: str) -> dict[str, str]:
        """Those of its options that belong to one of its policies, a key of REGISTRIES."""
        names = names_of_options(part, getattr(self, part))
        return {key: value for key, value in self.options if key in names}

    def allocation_facts(self, scheduler: Scheduler) -> dict[str, object] | None:
        """How much each layer of its scheduler keeps now, for results; None where all keep the same.

        `experts`: the quota of each layer, in experts. `split`, where layers keep parts of experts: how many experts,
        and which part of each, from its top. And the facts of the allocation.
        """
        if self.allocation == "uniform" or self.keeps_everything:
            return None
        num_parts, cache = scheduler.geometry.segments_per_expert, scheduler.cache
        numbers = [quota / num_parts for quota in cache.quotas]
        experts = [int(num) if num.is_integer() else num for num in numbers]
        facts: dict[str, object] = {"name": self.allocation, "experts": experts}
        if ALLOCATIONS[self.allocation].splits:
            pairs = zip(cache.quotas, cache.tops, strict=True)
            facts["split"] = [{"kept_experts": quota // top, "theta": top / num_parts} for quota, top in pairs]
        return facts | scheduler.allocation.facts()

    def _allocation(self, geometry: Geometry, known: Known) -> Allocation:
        if self._eviction is not None:  # an allocation may rank experts as caches do
            known = known.giving(self._eviction.parse(self.options_of("eviction")))
        return ALLOCATIONS[self.allocation].make(geometry, known, self.options_of("allocation"))


# -- which parts fit together --------------------------------------------------------------------------------------


def _check(system: System) -> None:
    """Raise ConfigError where a part is unknown or does not fit the others."""
    where = f"system={system.name!r}"
    for key, accepted in ACCEPTED.items():
        value = getattr(system, key)
        is_stated = not (key == "eviction" and system.keeps_everything)
        if is_stated and value not in accepted:
            raise _unknown(where, key, value)
    problem = next(_problems(system), None)
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    if not system.keeps_everything:
        _check_options(system, where)


def _problems(system: System) -> Iterator[str]:
    """Why the parts of a system do not fit together, with what is accepted."""
    predictor = system._predictor
    is_best = system.admission == "best"
    if system.loop == "synchronous" and not predictor:
        yield "loop='synchronous' waits for what is predicted, which is nothing; accepted: loop=overlapped, by-id"
    if system.loop == "by-id" and (predictor or is_best or system.allocation != "uniform"):
        yield (
            "loop='by-id': one expert at a time; accepted: prediction=none, admission=always, allocation=uniform, or "
            "loop=overlapped"
        )
    for key in NUMBERS:
        number = getattr(system, key)
        if number is not None and number < 1:
            yield f"{key}={number}: must be at least 1"
    if not system.keeps_everything:
        yield from _problems_of_keeping(system, predictor, is_best)
    if predictor and PREFETCHES[system.prefetch].needs_probabilities and not predictor.gives_probabilities:
        yield (
            f"prefetch={system.prefetch!r} weighs probabilities, which prediction={system.prediction!r} does not "
            f"give; accepted: score, fifo"
        )


def _problems_of_keeping(system: System, predictor: type[Predictor] | None, is_best: bool) -> Iterator[str]:
    """Why its eviction, admission and allocation do not fit together."""
    eviction, allocation = EVICTIONS[system.eviction], ALLOCATIONS[system.allocation]
    if is_best and not issubclass(eviction, ScoredPolicy):
        scored = ", ".join(name for name, policy in EVICTIONS.items() if issubclass(policy, ScoredPolicy))
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
        predictors = ", ".join(name for name, policy in PREDICTORS.items() if policy.gives_probabilities)
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
        unsized = ", ".join(name for name, policy in EVICTIONS.items() if not policy.is_sized)
        yield (
            f"allocation={system.allocation!r} changes the sizes of caches, by which eviction={system.eviction!r} "
            f"goes; accepted: eviction={unsized}"
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


def _unknown(where: str, key: str, value: str) -> ConfigError:
    path = ", or the dotted path of one" if key in REGISTRIES else ""
    return ConfigError(f"{where}: {key}={value!r:.80}: unknown; accepted: {', '.join(ACCEPTED[key])}{path}")


# -- the presets ---------------------------------------------------------------------------------------------------

_PRESETS = f"""
on-demand:eviction=lru:scope=global:prefill=evict
    loads what is missing when it is needed (DeepSpeed-Inference, as fMoE builds it)
lru:eviction=lru:scope=layer
    keeps the most recently used experts of each layer
lfu:eviction=lfu:scope=layer
    keeps the most frequently used experts of each layer
lcp:eviction=lcp:scope=layer
    keeps the experts of highest frequency x decayed recency (MoEpic)
static:eviction=static:scope=layer
    pins each layer's most popular experts, with two spare places
expertly:eviction=reuse:scope=global:admission=best
    keeps what is used again soonest, as it learns from nearby layers' routing while it runs (ours)
expertly-ahead:eviction=reuse:scope=global:prediction=lookahead:admission=best:ahead=staging
    the same, and prefetches what the next router, asked early, names (ours)
resident:eviction=none:scope=global
    keeps every expert: the speed of enough memory
fmoe:eviction=fmoe:scope=global:prediction=fmoe:distance=3:prefetch=proximity:prefill=evict
    expert maps of earlier iterations predict, order prefetches and say what is evicted (fMoE)
promoe:eviction=lru:scope=layer:prediction=learned:distance=4:prefetch=fifo:segments=4:prefill=evict
    LRU per layer, and small networks trained beforehand on router inputs, which predict (ProMoE)
moepic:eviction=lcp:scope=layer:allocation=moepic:prediction=speculative:ahead=staging:segments=8:prefill=evict
    keeps tops of experts by cache priority, prefetches the rest; layers get memory by what it hides (MoEpic)
moe-infinity:eviction=eam:scope=global:prediction=eam:distance={ALL_LAYERS}:prefill=evict
    activation matrices of earlier requests predict and say what is evicted (MoE-Infinity)
"""
"""Each preset as a user would write it, and what it does. Other parts have the defaults of System."""


def _presets() -> dict[str, System]:
    lines = _PRESETS.split("\n")[1:-1]
    found = {}
    for spec, summary in zip(lines[::2], lines[1::2], strict=True):
        name, *settings = spec.split(":")
        parts: dict[str, Any] = dict(setting.split("=") for setting in settings)
        parts |= {key: int(parts[key]) for key in NUMBERS if key in parts}
        found[name] = System(name, summary.strip(), **parts, keeps_everything=parts["eviction"] == "none")
    return found


SYSTEMS: Registry[System] = Registry(
    "system",
    "expertly.systems",
    _presets(),
    lambda one: isinstance(one, System),
    "a System",
    adopt=lambda system, name: replace(system, name=name),  # named as users name it
)


def default_system(layers: Sequence[LayerGeometry]) -> tuple[str, float]:
    """The default system where nothing is remembered, and the mean MiB of the model's experts, which decides: loading a
    tiny expert takes less time than working out whether it will be needed.
    """
    nbytes = sum(layer.nbytes for layer in layers) / sum(layer.num_experts for layer in layers)
    return "expertly-ahead" if nbytes >= LEAST_NBYTES else "expertly", nbytes / (1 << 20)


def without_prediction(system: System) -> System:
    """The system without its predictor: a preset if one is equal to that, else one named after it."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(System) if field.name in OF_PREDICTION}
    options = tuple((key, value) for key, value in system.options if key not in system.options_of("prediction"))
    name = f"{system.name} without prediction"
    made = replace(system, **defaults, name=name, prediction="none", loop=OVERLAPPED, options=options, needs=())
    same = (one for one in SYSTEMS.built_in.values() if replace(made, name=one.name, summary=one.summary) == one)
    return next(same, made)


def get_system(spec: str) -> System:
    """The preset of that name, or one with other parts: `name:key=value:key=value`. Keys are those of PARTS and the
    options of its policies. The system's name is the spec with its keys in a fixed order, and gives the same system.

    Raises ConfigError naming the key and what is accepted.
    """
    name, *settings = [part.strip() for part in spec.split(":")]
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r:.200}: unknown; accepted: {', '.join(SYSTEMS)}")
    return _derived(SYSTEMS[name], settings, f"system={spec!r:.200}") if settings else SYSTEMS[name]


def get_runnable(spec: str) -> System:
    """`get_system` for an engine. Raises ConfigError also for a system that is for simulation alone; it names only
    systems that an engine can run.
    """
    accepted = ", ".join([AUTO_SYSTEM, *runnable_systems()])
    name = spec.split(":")[0].strip()
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r:.200}: unknown; accepted: {accepted}")
    system = get_system(spec)
    if "future" in system.needs:
        raise ConfigError(
            f"system={spec!r:.200}: needs to know the demands to come (see `simulate`); accepted: {accepted}"
        )
    if system.loop != OVERLAPPED:
        raise ConfigError(
            f"system={spec!r:.200}: loop={system.loop} is for simulation (`expertly lab simulate`); accepted: "
            f"{accepted}"
        )
    return system


def runnable_systems() -> list[str]:
    """Names of the systems that an engine can run."""
    return [name for name, one in SYSTEMS.items() if "future" not in one.needs and one.loop == OVERLAPPED]


def paths_in(spec: str) -> list[str]:
    """The paths in a spec that `get_system` would import, as KEY=PATH."""
    name, *settings = spec.split(":")
    named = [["system", name], *(setting.split("=", 1) for setting in settings if "=" in setting)]
    registries: dict[str, Registry[Any]] = {"system": SYSTEMS, **REGISTRIES}
    given = [(key.strip(), value.strip()) for key, value in named]
    return [f"{key}={value}" for key, value in given if key in registries and registries[key].is_path(value)]


def _derived(preset: System, settings: list[str], where: str) -> System:
    """The preset with other parts and options, from `key=value` texts."""
    given = _given(preset, settings, where)
    if not given:
        return preset
    parts: dict[str, Any] = {key: given[key] for key in ACCEPTED if key in given}
    parts |= {key: parse_int(given[key], f"{where}: {key}={given[key]!r:.80}") for key in NUMBERS if key in given}
    kept, options = _options(preset, parts, {key: given[key] for key in given if key not in PARTS}, where)
    prediction = parts.get("prediction", preset.prediction)
    allocation = parts.get("allocation", preset.allocation)
    for is_off, keys, why in (
        (not ALLOCATIONS[allocation].keeps, OF_KEEPING, f"nothing is kept (allocation={allocation})"),
        (prediction == "none", OF_PREDICTION, "nothing is predicted (prediction=none)"),
    ):
        for key in keys:
            if is_off and key in parts:
                raise ConfigError(f"{where}: {key}={given[key]}: of no use where {why}")
    said = {**{key: parts[key] for key in PARTS if key in given}, **options}
    text = [f"{key}={value}" for key, value in said.items()]
    if parts.get("admission", preset.admission) == "best":
        parts.setdefault("prefill", "stream")  # prompts are weighed as well
    if prediction == "none":
        parts |= {field.name: field.default for field in fields(System) if field.name in OF_PREDICTION}
        if preset.loop == "synchronous":
            parts.setdefault("loop", OVERLAPPED)
    elif "prediction" in parts and PREDICTORS[prediction].default_distance is not None:
        parts.setdefault("distance", PREDICTORS[prediction].default_distance)
    summary = f"{preset.name} with {', '.join(text)}"
    every = tuple((kept | options).items())
    return replace(preset, name=":".join([preset.name, *text]), summary=summary, options=every, needs=(), **parts)


def _given(preset: System, settings: list[str], where: str) -> dict[str, str]:
    """The settings by key. Raises ConfigError where one is no `key=value`, or is given twice."""
    if preset.keeps_everything:
        raise ConfigError(
            f"{where}: {preset.name!r} keeps every expert, there is nothing to choose; accepted: its name"
        )
    given: dict[str, str] = {}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if not (key and value):
            raise ConfigError(f"{where}: {setting!r:.80}: must be key=value")
        if key in given:
            raise ConfigError(f"{where}: {key!r:.80}: given twice")
        given[key] = value
    return given


def _options(
    preset: System, parts: dict[str, Any], given: dict[str, str], where: str
) -> tuple[dict[str, str], dict[str, str]]:
    """For a preset with other `parts`: the options of policies that stay, and the `given` ones, written as usual."""
    kept: dict[str, str] = {}
    said: dict[str, str] = {}
    accepted, described = list(PARTS), []
    for part, registry in REGISTRIES.items():
        before = getattr(preset, part)
        name = parts.get(part, before)
        if name not in ACCEPTED[part]:
            raise _unknown(where, part, name)
        names = names_of_options(part, name)
        if name == before:
            kept |= preset.options_of(part)
        if name in registry:
            mine = {key: given[key] for key in names if key in given}
            parsed = registry[name].parse(mine, where)
            said |= {key: option_text(getattr(parsed, key)) for key in mine}
        if names or part == "prediction":
            described.append(f"{part}={name}")
        accepted += names
    for key in given:
        if key not in said:
            raise ConfigError(
                f"{where}: {key!r:.80}: unknown; accepted with {', '.join(described)}: {', '.join(accepted)}"
            )
    return kept, said

"""Systems: a choice of policies and of how layers run (docs/conventions.md), and the presets, which have names.

Each preset can be taken with other parts: `name:key=value:key=value`. A preset that is added here exists everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.allocation import Allocation
from expertly.policies.base import Policy, option_names, option_text, parse_int
from expertly.policies.eviction import EvictionPolicy, ScoredPolicy
from expertly.policies.known import NOTHING, Known
from expertly.policies.learned import LearnedState
from expertly.policies.prediction import ALL_LAYERS, Predictor
from expertly.policies.registry import ALLOCATIONS, EVICTIONS, PREDICTORS, OrNone, Registry
from expertly.scheduler.budget import Budget, allocate
from expertly.scheduler.prefetch import PRIORITIES
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.tier import Tier

P = TypeVar("P", bound=Policy)

OVERLAPPED = "overlapped"  # loads, prefetches and computing go on at the same time, as in an engine
BASE_SYSTEM = "lru"  # the baseline
HOST_EVICTION = "lru"  # of the host memory behind an accelerator, unless a system says otherwise
AUTO_SYSTEM = "auto"  # where a model is loaded: `default_system`
LEAST_LACKING_NBYTES = 3 << 19  # of an expert, times the share of experts that memory lacks, for prefetching by default

ACCEPTED: dict[str, Collection[str]] = {
    "eviction": EVICTIONS,
    "scope": ("layer", "global"),
    "allocation": ALLOCATIONS,
    "prediction": OrNone(PREDICTORS),
    "prefetch": PRIORITIES,
    "admission": ("always", "best"),
    "prefill": ("stream", "evict"),
    "ahead": ("cache", "staging"),
    "host": EVICTIONS,
    "loop": (OVERLAPPED, "synchronous", "by-id"),
}
"""For each part that is chosen by name, the names it accepts."""

REGISTRIES: dict[str, Registry[Any]] = {
    "prediction": PREDICTORS,
    "allocation": ALLOCATIONS,
    "eviction": EVICTIONS,
}
"""Parts that are policies: they have options, which a system's name lists in this order, and may come from outside the
package (docs/extending.md).
"""

NUMBERS = ("distance", "segments")
PARTS = (*ACCEPTED, *NUMBERS)
"""The keys of `name:key=value` for any system that does not keep everything, beside options."""
OF_KEEPING = ("eviction", "scope", "admission", "prefill")  # without effect where nothing is kept
OF_PREDICTION = ("prefetch", "ahead", "distance")  # without effect where nothing is predicted


@dataclass(frozen=True, slots=True)
class System:
    """A named choice of parts. Raises ConfigError where they do not fit together."""

    name: str
    summary: str
    eviction: str  # a key of EVICTIONS, or "none": nothing ever goes
    scope: str  # "layer": one cache a layer; "global": one cache over all layers
    allocation: str = "uniform"  # a key of ALLOCATIONS: how many slots each layer keeps
    prediction: str = "none"  # a key of PREDICTORS, or "none"
    prefetch: str = "score"  # a key of PRIORITIES: which prediction is loaded first
    admission: str = "always"  # see Scheduler.__init__
    prefill: str = "stream"  # see Scheduler.__init__
    ahead: str = "cache"  # see Scheduler.__init__
    host: str = HOST_EVICTION  # a key of EVICTIONS: what goes from the host memory behind an accelerator (Tier)
    distance: int = 1  # layers that the predictor looks ahead
    loop: str = OVERLAPPED  # how a layer runs; another one is for simulation (sim/synchronous.py)
    segments: int = 1  # P, where nobody asks for another (core.geometry.fitting_segments)
    options: tuple[tuple[str, str], ...] = ()  # of its policies
    keeps_everything: bool = False
    needs: tuple[str, ...] = ()  # "future": simulations only; else fields of a trace. With those of its policies

    def __post_init__(self) -> None:
        problem = next(_problems(self), None)
        if problem is not None:
            raise _error(self, problem)
        if not self.keeps_everything:
            object.__setattr__(self, "options", _checked_options(self))
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
    def weights(self) -> type[LearnedState] | None:
        """Of a predictor that must be trained before (`expertly lab train`): the class of its weights."""
        return None if self._predictor is None else self._predictor.weights

    def scheduler(self, geometry: Geometry, budget: Budget, known: Known = NOTHING) -> Scheduler:
        """The scheduler of this system. Raises ConfigError where `known` lacks what a policy needs."""
        eviction = self._eviction or EVICTIONS["lru"]  # never asked where everything is kept
        return Scheduler(
            geometry,
            budget,
            eviction.of_model(geometry, known, self.options_of("eviction")),
            scope=self.scope,
            admission=self.admission,
            prefill=self.prefill,
            ahead=self.ahead,
            prefetch=self.prefetch,
            allocation=self._allocation(geometry, known),
            predicts=self.prediction != "none",
        )

    def tier(self, geometry: Geometry, memory_nbytes: int, known: Known = NOTHING) -> Tier:
        """The host memory behind an accelerator. Raises BudgetError if it is too little, ConfigError as `scheduler`."""
        return Tier(geometry, memory_nbytes, EVICTIONS[self.host].of_model(geometry, known))

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
        texts = dict(self.options)
        return {key: texts[key] for key in names_of_options(part, getattr(self, part)) if key in texts}

    def allocation_facts(self, scheduler: Scheduler) -> dict[str, object] | None:
        """How much each layer of its scheduler keeps now, for results; None where all keep the same.

        `experts`: the quota of each layer, in experts. `split`, where layers keep parts of experts: how many experts,
        and which part of each, from its top. And the facts of the allocation.
        """
        if self.allocation == "uniform" or self.keeps_everything:
            return None
        num_parts, cache = scheduler.geometry.segments_per_expert, scheduler.cache
        experts = [quota // num_parts if quota % num_parts == 0 else quota / num_parts for quota in cache.quotas]
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


def _error(system: System, problem: str) -> ConfigError:
    return ConfigError(f"system={system.name!r:.200}: {problem}")


def _problems(system: System) -> Iterator[str]:
    """Why a part is unknown or does not fit the others, with what is accepted."""
    for key, accepted in ACCEPTED.items():
        if key == "host" and system.host not in EVICTIONS:
            accepted = [name for name, policy in EVICTIONS.items() if _goes_by_use(policy)]
        value, is_stated = getattr(system, key), not (key == "eviction" and system.keeps_everything)
        if is_stated and value not in accepted:
            path = ", or the dotted path of one" if key in REGISTRIES else ""
            yield f"{key}={value!r:.80}: unknown; accepted: {', '.join(accepted)}{path}"
    for key in NUMBERS:
        if getattr(system, key) < 1:
            yield f"{key}={getattr(system, key)}: must be at least 1"
    yield from _problems_of_running(system, system._predictor, is_best=system.admission == "best")
    if not system.keeps_everything:
        yield from _problems_of_eviction(f"eviction={system.eviction!r}", EVICTIONS[system.eviction], system)
        if not _goes_by_use(EVICTIONS[system.host]):
            accepted = _names(EVICTIONS, _goes_by_use)
            yield f"host={system.host!r}: the tier behind a device is told of uses alone; accepted: host={accepted}"
        yield from _problems_of_allocation(f"allocation={system.allocation!r}", ALLOCATIONS[system.allocation], system)


def _problems_of_running(system: System, predictor: type[Predictor] | None, *, is_best: bool) -> Iterator[str]:
    if system.loop == "synchronous" and not predictor:
        yield "loop='synchronous' waits for what is predicted, which is nothing; accepted: loop=overlapped, by-id"
    if system.loop == "by-id" and (predictor or is_best or system.allocation != "uniform"):
        parts = "prediction=none, admission=always, allocation=uniform"
        yield f"loop='by-id': one expert at a time; accepted: {parts}, or loop=overlapped"
    if predictor and system.prefetch == "proximity" and not predictor.gives_probabilities:
        lacking = f"prediction={system.prediction!r} does not give"
        yield f"prefetch={system.prefetch!r} weighs probabilities, which {lacking}; accepted: score, fifo"
    if is_best and system.prefill != "stream":
        yield (
            f"prefill={system.prefill!r}: with admission='best' what a prompt needs is weighed against what is kept; "
            "accepted: prefill=stream, or admission=always"
        )


def _problems_of_eviction(name: str, eviction: type[EvictionPolicy], system: System) -> Iterator[str]:
    predictor, is_best = system._predictor, system.admission == "best"
    if is_best and not issubclass(eviction, ScoredPolicy):
        scored = _names(EVICTIONS, lambda policy: issubclass(policy, ScoredPolicy))
        yield (
            f"admission='best' compares scores, which {name} does not have; accepted: admission=always, or "
            f"eviction={scored}"
        )
    if eviction.needs_best and not is_best:
        yield f"{name} needs to be told what is needed before it is kept; accepted: admission=best"
    if eviction.needs_probabilities and not (predictor and predictor.gives_probabilities):
        predictors = _names(PREDICTORS, lambda policy: policy.gives_probabilities)
        lacking = f"prediction={system.prediction!r} does not give"
        yield f"{name} goes by predicted probabilities, which {lacking}; accepted: prediction={predictors}"


def _problems_of_allocation(name: str, allocation: type[Allocation], system: System) -> Iterator[str]:
    if allocation.needs_layers and system.scope != "layer":
        yield f"{name} shares slots out among layers, scope={system.scope!r} does not; accepted: scope=layer"
    if allocation.needs_layers and EVICTIONS[system.eviction].is_sized:
        unsized = _names(EVICTIONS, lambda policy: not policy.is_sized)
        yield f"{name} changes capacities, by which eviction={system.eviction!r} goes; accepted: eviction={unsized}"
    if not allocation.keeps and system._predictor and system.ahead != "staging":
        yield f"{name} keeps no experts: what is predicted can go to staging slots only; accepted: ahead=staging"


def _goes_by_use(eviction: type[EvictionPolicy]) -> bool:
    """Whether it needs no predictions, no admission and no future."""
    hears = (eviction.predicted, eviction.expected) != (EvictionPolicy.predicted, EvictionPolicy.expected)
    return not (hears or eviction.needs_best or eviction.needs_future or eviction.needs_probabilities)


def _names(registry: Registry[type[P]], is_accepted: Callable[[type[P]], bool]) -> str:
    return ", ".join(name for name, policy in registry.items() if is_accepted(policy))


def _checked_options(system: System) -> tuple[tuple[str, str], ...]:
    """The options, in the order of the policies, written as usual. Raises ConfigError unless each belongs to one
    policy, and has a value that the policy takes.
    """
    owners = dict.fromkeys(PARTS, "a part")
    options: dict[str, str] = {}
    for part, registry in REGISTRIES.items():
        name = getattr(system, part)
        for option in names_of_options(part, name):
            if option in owners:
                raise _error(system, f"{part}={name!r}: its option {option!r} is called as {owners[option]} is")
            owners[option] = f"one of {part}={name!r}"
        if name in registry:
            texts = system.options_of(part)
            parsed = registry[name].parse(texts, f"system={system.name!r:.200}")
            options |= {key: option_text(getattr(parsed, key)) for key in texts}
    for option, _ in system.options:
        if option not in options:
            policies = ", ".join(f"{part}={getattr(system, part)}" for part in REGISTRIES)
            raise _error(system, f"{option!r:.80}: unknown; accepted with {policies}: {', '.join(owners)}")
    return tuple(options.items())


def names_of_options(part: str, name: str) -> list[str]:
    """The options of the policy of this name; `part` is a key of REGISTRIES."""
    registry = REGISTRIES[part]
    return option_names(registry[name].options) if name in registry else []


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
    lines, presets = _PRESETS.split("\n")[1:-1], {}
    for spec, summary in zip(lines[::2], lines[1::2], strict=True):
        name, *settings = spec.split(":")
        parts: dict[str, Any] = dict(setting.split("=") for setting in settings)
        parts |= {key: int(parts[key]) for key in NUMBERS if key in parts}
        presets[name] = System(name, summary.strip(), **parts, keeps_everything=parts["eviction"] == "none")
    return presets


SYSTEMS: Registry[System] = Registry(
    "system",
    "expertly.systems",
    _presets(),
    lambda system: isinstance(system, System),
    "a System",
    adopt=lambda system, name: replace(system, name=name),  # named as users name it
)


def default_system(layers: Sequence[LayerGeometry], held_nbytes: int, *, runs_on_host: bool) -> str:
    """The default system where memory holds so many bytes of experts. Prefetching hides the loads of what is often
    missing and large; asking routers early, and loading what is not needed then, takes longer than it hides where most
    experts are there or tiny, or loads are copies to an accelerator.
    """
    nbytes = sum(layer.nbytes for layer in layers)
    lacking_nbytes = max(0, nbytes - held_nbytes) / sum(layer.num_experts for layer in layers)
    return "expertly-ahead" if runs_on_host and lacking_nbytes >= LEAST_LACKING_NBYTES else "expertly"


_UNPREDICTED: dict[str, Any] = {part.name: part.default for part in fields(System) if part.name in OF_PREDICTION}


def without_prediction(system: System) -> System:
    """The system without its predictor: a preset if one is equal to that, else one named after it."""
    options = tuple((key, value) for key, value in system.options if key not in system.options_of("prediction"))
    name = f"{system.name} without prediction"
    made = replace(system, **_UNPREDICTED, name=name, prediction="none", loop=OVERLAPPED, options=options, needs=())
    presets = SYSTEMS.built_in.values()
    return next(
        (preset for preset in presets if replace(made, name=preset.name, summary=preset.summary) == preset), made
    )


# -- by name -------------------------------------------------------------------------------------------------------


def get_system(spec: str) -> System:
    """The preset of that name, or one with other parts: `name:key=value:key=value`. Keys are those of PARTS and the
    options of its policies. The system's name is the spec with its keys in a fixed order, and gives the same system.

    Raises ConfigError naming the key and what is accepted.
    """
    name, *settings = [part.strip() for part in spec.split(":")]
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r:.200}: unknown; accepted: {', '.join(SYSTEMS)}")
    return _derived(SYSTEMS[name], settings, spec) if settings else SYSTEMS[name]


def get_runnable(spec: str) -> System:
    """`get_system` for an engine. Raises ConfigError also for a system that is for simulation alone; it names only
    systems that an engine can run.
    """
    name = spec.split(":")[0].strip()
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r:.200}: unknown; {_accepted_by_engines()}")
    system = get_system(spec)
    if not _is_runnable(system):
        reason = "needs to know the demands to come (see `simulate`)"
        if "future" not in system.needs:
            reason = f"loop={system.loop} is for simulation (`expertly lab simulate`)"
        raise ConfigError(f"system={spec!r:.200}: {reason}; {_accepted_by_engines()}")
    return system


def _accepted_by_engines() -> str:
    return f"accepted: {', '.join([AUTO_SYSTEM, *runnable_systems()])}"


def runnable_systems() -> list[str]:
    """Names of the systems that an engine can run."""
    return [name for name, system in SYSTEMS.items() if _is_runnable(system)]


def _is_runnable(system: System) -> bool:
    return "future" not in system.needs and system.loop == OVERLAPPED


def _derived(preset: System, settings: list[str], spec: str) -> System:
    """The preset with other parts and options, from `key=value` texts."""
    before = replace(preset, name=spec)  # as errors name it
    if preset.keeps_everything:
        raise _error(before, f"{preset.name!r} keeps every expert, there is nothing to choose; accepted: its name")
    texts = _texts(before, settings)
    parts: dict[str, Any] = {key: texts[key] for key in ACCEPTED if key in texts}
    for key in NUMBERS:
        if key in texts:
            parts[key] = parse_int(texts[key], f"system={spec!r:.200}: {key}={texts[key]!r:.80}")
    options = {key: value for key, value in texts.items() if key not in PARTS}
    for part in REGISTRIES:
        if parts.get(part) in (None, getattr(preset, part)):  # options stay until their policy is replaced
            options = preset.options_of(part) | options
    stated = list(parts)
    parts = _implied(preset, parts)
    system = replace(before, options=tuple(options.items()), needs=(), **parts)
    for key, reason in _useless(system):
        if key in stated:
            raise _error(system, f"{key}={texts[key]}: of no use where {reason}")
    words = [f"{key}={parts[key]}" for key in stated]
    words += [f"{key}={value}" for key, value in system.options if key in texts]
    return replace(system, name=":".join([preset.name, *words]), summary=f"{preset.name} with {', '.join(words)}")


def _useless(system: System) -> Iterator[tuple[str, str]]:
    """Parts without effect, and why."""
    if not ALLOCATIONS[system.allocation].keeps:
        yield from ((key, f"nothing is kept (allocation={system.allocation})") for key in OF_KEEPING)
    if system.prediction == "none":
        yield from ((key, "nothing is predicted (prediction=none)") for key in OF_PREDICTION)


def _implied(preset: System, parts: dict[str, Any]) -> dict[str, Any]:
    """The stated parts, with others that follow from them."""
    prediction, implied = parts.get("prediction", preset.prediction), dict[str, Any]()
    if parts.get("admission", preset.admission) == "best":
        implied["prefill"] = "stream"  # prompts are weighed as well
    if prediction == "none":
        implied |= _UNPREDICTED
        if preset.loop == "synchronous":
            implied["loop"] = OVERLAPPED
    elif "prediction" in parts and prediction in PREDICTORS and PREDICTORS[prediction].default_distance is not None:
        implied["distance"] = PREDICTORS[prediction].default_distance
    return implied | parts


def _texts(preset: System, settings: list[str]) -> dict[str, str]:
    """The settings by key. Raises ConfigError where one is no `key=value`, or is given twice."""
    texts: dict[str, str] = {}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if not (key and value):
            raise _error(preset, f"{setting!r:.80}: must be key=value")
        if key in texts:
            raise _error(preset, f"{key!r:.80}: given twice")
        texts[key] = value
    return texts

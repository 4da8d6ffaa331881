"""The presets: systems by name (docs/conventions.md). A preset that is added here exists everywhere. Each can be taken
with other parts: `name:key=value:key=value`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.policies.admission import ADMISSIONS
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.base import option_text, parse_int
from expertly.policies.predictor import PREDICTORS
from expertly.policies.predictor.base import ALL_LAYERS
from expertly.policies.registry import Registry
from expertly.scheduler.system import (
    ACCEPTED,
    NUMBERS,
    OF_KEEPING,
    OF_PREDICTION,
    PARTS,
    REGISTRIES,
    System,
    names_of_options,
    unknown,
)

BASE_SYSTEM = "lru"
"""The baseline."""

AUTO_SYSTEM = "auto"
"""The default where a model is loaded: what `expertly tune` chose for it, else `default_system`."""

BOUNDS = ("belady", "belady-global", "oracle", "resident")
"""Simulated beside the systems that are compared: bounds, and every expert kept."""

LEAST_NBYTES = 1 << 19
"""Least bytes of an expert for `expertly-ahead` to be the default: loading tiny ones is faster than asking routers."""

_PRESETS = f"""
on-demand:eviction=lru:scope=global:prefill=evict
    loads what is missing when it is needed (DeepSpeed-Inference, as fMoE builds it)
lru:eviction=lru:scope=layer
    keeps the most recently used experts of each layer
lfu:eviction=lfu:scope=layer
    keeps the most frequently used experts of each layer
lcp:eviction=lcp:scope=layer
    keeps the experts of highest frequency x decayed recency (MoEpic)
random:eviction=random:scope=layer
    evicts at random: the baseline every policy must beat
static:eviction=static:scope=layer
    pins each layer's most popular experts, with two spare places
expertly:eviction=reuse:scope=global:admission=best
    keeps what is used again soonest, as it learns from nearby layers' routing while it runs (ours)
expertly-ahead:eviction=reuse:scope=global:prediction=lookahead:admission=best:ahead=staging:gate=measured
    the same, and prefetches what the next router, asked early, names, where that is faster (ours)
resident:eviction=none:scope=global:transfer=at load
    keeps every expert: the speed of enough memory
deepspeed-index:eviction=lru:scope=global:prediction=index:prefill=evict
    prefetches the next layer's experts in the order of their numbers (DeepSpeed, as MoE-Infinity has it)
brainstorm:eviction=lfu:scope=global:prediction=popularity:prefill=evict
    predicts and evicts by how often experts were chosen so far (BrainStorm, as MoE-Infinity has it)
mixtral-offloading:eviction=lru:scope=layer:prediction=lookahead:transfer=synchronous:prefill=evict
    LRU per layer; each layer waits for what the next one's router, asked early, makes it load
moe-infinity-lfu:eviction=lfu:scope=global:prediction=counts:transfer=synchronous:prefill=evict
    prefetches what each request chose most so far, and waits for it (MoE-Infinity, as fMoE and MoEpic have it)
belady:eviction=belady:scope=layer:admission=best
    keeps what is used again soonest: no replacement within layers loads less
belady-global:eviction=belady:scope=global:admission=best
    the same in one cache over all layers: no system loads fewer bytes
oracle:eviction=belady:scope=global:prediction=perfect:distance={ALL_LAYERS}:admission=best:ahead=staging
    belady-global with perfect prediction, prefetching as early as slots and the link allow
modelled-lookahead:eviction=lru:scope=layer:prediction=modelled
    LRU per layer with a lookahead of stated accuracy, modelled (ProMoE, section 4: 90.5% one layer ahead)
adapmoe:eviction=lru:scope=layer:allocation=adapmoe:prediction=lookahead:ahead=staging:prefill=evict
    LRU per layer with a lookahead; layers that miss more keep more, by dynamic programming (AdapMoE)
fmoe:eviction=fmoe:scope=global:prediction=fmoe:distance=2:prefetch=proximity:prefill=evict
    expert maps of earlier iterations predict, order prefetches and say what is evicted (fMoE)
promoe:eviction=lru:scope=layer:prediction=learned:distance=4:segments=4:prefill=evict
    LRU per layer, and small networks trained beforehand on router inputs, which predict (ProMoE)
pre-gated:eviction=lru:scope=layer:allocation=none:prediction=learned:ahead=staging
    keeps nothing: a trained predictor prefetches one layer ahead (Pre-gated MoE, but lossless)
moepic:eviction=lcp:scope=layer:allocation=moepic:prediction=speculative:ahead=staging:segments=4:prefill=evict
    keeps tops of experts by cache priority, prefetches the rest; layers get memory by what it hides (MoEpic)
moe-infinity:eviction=eam:scope=global:prediction=eam:prefill=evict
    activation matrices of earlier requests predict and say what is evicted (MoE-Infinity)
"""
"""Each preset as a user would write it, and what it does. Other parts have the defaults of System; transfer is
asynchronous where it predicts. `adapmoe` needs ahead=staging, since layers that keep nothing are prefetched, too.
"""


def _presets() -> dict[str, System]:
    lines = _PRESETS.split("\n")[1:-1]
    found = {}
    for spec, summary in zip(lines[::2], lines[1::2], strict=True):
        name, *settings = spec.split(":")
        parts: dict[str, Any] = dict(setting.split("=") for setting in settings)
        parts |= {key: int(parts[key]) for key in NUMBERS if key in parts}
        if "prediction" in parts:
            parts.setdefault("transfer", "asynchronous")
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
    """The default system for a model that was not tuned, and the mean MiB of its experts, which decides: loading a tiny
    expert takes less time than working out whether it will be needed.
    """
    nbytes = sum(layer.nbytes for layer in layers) / sum(layer.num_experts for layer in layers)
    return "expertly-ahead" if nbytes >= LEAST_NBYTES else "expertly", nbytes / (1 << 20)


def without_prediction(system: System) -> System:
    """The system without its predictor: a preset if one is equal to that, else one named after it."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(System) if field.name in OF_PREDICTION}
    options = tuple((key, value) for key, value in system.options if key not in system.options_of("prediction"))
    name = f"{system.name} without prediction"
    made = replace(system, **defaults, name=name, prediction="none", options=options, needs=())
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
    """`get_system` for an engine. Raises ConfigError also for a system that needs the future; it names only systems
    that an engine can run.
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
    return system


def runnable_systems() -> list[str]:
    """Names of the systems that do not need the future, so that an engine can run them."""
    return [name for name, system in SYSTEMS.items() if "future" not in system.needs]


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
    if ADMISSIONS[parts.get("admission", preset.admission)].weighs_scores:
        parts.setdefault("prefill", "stream")  # prompts are weighed as well
    if prediction == "none":
        parts |= {field.name: field.default for field in fields(System) if field.name in OF_PREDICTION}
    elif "prediction" in parts:
        if preset.prediction == "none":
            parts.setdefault("transfer", "asynchronous")
        if PREDICTORS[prediction].default_distance is not None:
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
    if given.get("ahead") == "ring":  # what it was called until November 2026
        given["ahead"] = "staging"
    fill = given.pop("fill", "demand")  # a part until November 2026; saved specs may name its default
    if fill != "demand":
        raise ConfigError(
            f"{where}: fill={fill!r:.80}: no part any more: what layers lack is loaded when it is needed; "
            f"accepted: leave it out"
        )
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
            raise unknown(where, part, name)
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

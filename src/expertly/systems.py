"""The presets: systems by name (docs/conventions.md). Adding one here is adding it everywhere, and each can be taken
with other parts: `name:key=value:key=value`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from expertly.core.errors import ConfigError
from expertly.parts import ACCEPTED, NUMBERS, OF_PREDICTION, PARTS, System
from expertly.policies.options import option_names, option_text, parse_int
from expertly.policies.predictor import PREDICTORS

DEFAULT_SYSTEM = "lru"

ALL_LAYERS = 1 << 30
"""A distance that no model has."""

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            "on-demand",
            "loads what is missing when it is needed (DeepSpeed-Inference, as fMoE builds it)",
            eviction="lru",
            scope="global",
        ),
        System("lru", "keeps the most recently used experts of each layer", eviction="lru", scope="layer"),
        System("lfu", "keeps the most frequently used experts of each layer", eviction="lfu", scope="layer"),
        System(
            "lcp", "keeps the experts of highest frequency x decayed recency (MoEpic)", eviction="lcp", scope="layer"
        ),
        System("random", "keeps any experts: the baseline every policy must beat", eviction="random", scope="layer"),
        System(
            "static",
            "pins each layer's most popular experts, with two spare places",
            eviction="static",
            scope="layer",
        ),
        System(
            "resident",
            "keeps every expert: the speed of enough memory",
            eviction="none",
            scope="global",
            transfer="at load",
            keeps_everything=True,
        ),
        System(
            "belady",
            "keeps what is used again soonest: the least that replacement in each layer must load",
            eviction="belady",
            scope="layer",
            admission="best",
        ),
        System(
            "belady-global",
            "the same in one cache over all layers: no system loads fewer bytes",
            eviction="belady",
            scope="global",
            admission="best",
        ),
        System(
            "oracle",
            "belady-global with perfect prediction, loading as early as places and the link allow",
            eviction="belady",
            scope="global",
            prediction="perfect",
            transfer="asynchronous",
            admission="best",
            ahead="ring",
            distance=ALL_LAYERS,
        ),
        System(
            "modelled-lookahead",
            "LRU per layer with a lookahead of stated accuracy, modelled (ProMoE, section 4: 90.5% one layer ahead)",
            eviction="lru",
            scope="layer",
            prediction="modelled",
            transfer="asynchronous",
        ),
        System(
            "fmoe",
            "expert maps of earlier iterations predict, order what is loaded ahead and say what goes (fMoE)",
            eviction="fmoe",
            scope="global",
            prediction="fmoe",
            prefetch="proximity",
            transfer="asynchronous",
            distance=2,
        ),
    )
}


def get_system(spec: str) -> System:
    """The preset of that name, or one with other parts: `name:key=value:key=value`. Keys are those of PARTS and the
    options of its predictor; another `prediction` brings its own. The system's name is the spec with keys in a fixed
    order and values as they are usually written: by it the same system can be had again.

    Raises ConfigError naming the key and what is accepted.
    """
    name, *settings = [part.strip() for part in spec.split(":")]
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r:.200}: unknown; accepted: {', '.join(SYSTEMS)}")
    return _derived(SYSTEMS[name], settings, f"system={spec!r:.200}") if settings else SYSTEMS[name]


def _derived(preset: System, settings: list[str], where: str) -> System:
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
    parts: dict[str, Any] = {key: given[key] for key in ACCEPTED if key in given}
    parts |= {key: parse_int(given[key], f"{where}: {key}={given[key]!r:.80}") for key in NUMBERS if key in given}
    options = {key: value for key, value in given.items() if key not in PARTS}
    prediction = parts.get("prediction", preset.prediction)
    if prediction not in ACCEPTED["prediction"]:
        accepted = ", ".join(ACCEPTED["prediction"])
        raise ConfigError(f"{where}: prediction={prediction!r:.80}: unknown; accepted: {accepted}")
    of_prediction = [] if prediction == "none" else option_names(PREDICTORS[prediction].options)
    for key in options:
        if key not in of_prediction:
            accepted = ", ".join((*PARTS, *of_prediction))
            raise ConfigError(f"{where}: {key!r:.80}: unknown; accepted with prediction={prediction}: {accepted}")
    if prediction == "none":
        for key in OF_PREDICTION:
            if key in parts:
                raise ConfigError(
                    f"{where}: {key}={given[key]}: of no use where nothing is predicted (prediction=none)"
                )
        parts |= {"transfer": "demand", **{key: _default(key) for key in OF_PREDICTION}}
    else:
        parsed = PREDICTORS[prediction].parse(options, where)
        options = {key: option_text(getattr(parsed, key)) for key in of_prediction if key in options}
        if "prediction" in parts:
            parts["transfer"] = "asynchronous"
    said = {**{key: parts[key] for key in PARTS if key in given}, **options}
    text = [f"{key}={value}" for key, value in said.items()]
    summary = f"{preset.name} with {', '.join(text)}"
    return replace(
        preset, name=":".join([preset.name, *text]), summary=summary, options=tuple(options.items()), needs=(), **parts
    )


def _default(key: str) -> object:
    return next(field.default for field in fields(System) if field.name == key)


def runnable_systems() -> list[str]:
    """Names of the systems that an engine can run: those that do not need the future."""
    return [name for name, system in SYSTEMS.items() if "future" not in system.needs]

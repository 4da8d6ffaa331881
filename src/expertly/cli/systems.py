"""`expertly systems`: the systems, their parts, and how to take other parts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from expertly.cli.output import message, show, table
from expertly.options import json_flag
from expertly.policies.base import describe_options
from expertly.policies.prediction import ALL_LAYERS
from expertly.scheduler.systems import ACCEPTED, OF_PREDICTION, PARTS, REGISTRIES, SYSTEMS, System, names_of_options

IN_TABLE = ("eviction", "scope", "prediction", "distance")
"""Parts in which most systems differ; the others stand behind a system's summary where they are not the default."""

_DEFAULTS = {field.name: field.default for field in fields(System)}


@dataclass(frozen=True, kw_only=True)
class SystemsOptions:
    json: bool = json_flag()


def run(args: SystemsOptions) -> int:
    for problem in [problem for registry in (SYSTEMS, *REGISTRIES.values()) for problem in registry.problems()]:
        message(f"expertly: note: {problem}")
    policies = [(part, name) for part, registry in REGISTRIES.items() for name in registry]
    result: dict[str, Any] = {
        "systems": [_parts(system) | {"summary": system.summary} for system in SYSTEMS.values()],
        "parts": {part: list(ACCEPTED.get(part, ())) for part in PARTS},  # empty where it is a number
        "options": {f"{part}={name}": names for part, name in policies if (names := names_of_options(part, name))},
    }
    show(result, args.json, lambda: _report(result["parts"]))
    return 0


def _report(accepted: dict[str, list[str]]) -> str:
    rows = []
    for system in SYSTEMS.values():
        parts = _parts(system)
        rows.append([system.name, *("-" if parts[part] is None else str(parts[part]) for part in IN_TABLE)])
    lines = [table(("system", *IN_TABLE), rows), ""]
    for system in SYSTEMS.values():
        unlike = [part for part in PARTS if part not in IN_TABLE and getattr(system, part) != _DEFAULTS[part]]
        changed = ", ".join(f"{part}={getattr(system, part)}" for part in unlike)
        lines.append(f"{system.name}: {system.summary}{f' [{changed}]' if changed else ''}")
    lines += ["", "Any but resident can be taken with other parts, NAME:KEY=VALUE:..., wherever a system is named:"]
    lines.append(
        "  --system fmoe:eviction=lru, --system lru:prediction=lookahead:distance=2, --system fmoe:semantic=no"
    )
    lines += [f"{part}: {', '.join(values) or 'a whole number from 1'}" for part, values in accepted.items()]
    for part, registry in REGISTRIES.items():
        for name in registry:
            if options := describe_options(registry[name].options):
                lines += [f"with {part}={name}:", *(f"  {option}: {text}" for option, text in options.items())]
    lines.append(f"{', '.join(REGISTRIES)}: or the dotted path of one of yours, KEY=MODULE.NAME (docs/extending.md)")
    return "\n".join(lines)


def _parts(system: System) -> dict[str, Any]:
    """A system's parts by name; None for parts of prediction in a system that does not predict."""
    parts: dict[str, Any] = {"name": system.name, **{part: getattr(system, part) for part in PARTS}}
    if system.prediction == "none":
        parts |= dict.fromkeys(OF_PREDICTION)
    elif system.distance >= ALL_LAYERS:
        parts["distance"] = "all"
    return parts

"""`expertly systems`: the systems, their parts, and how to take other parts."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, fields
from typing import Any

from expertly.cli.output import fitted, message, print_json, table
from expertly.options import json_flag
from expertly.policies.base import describe_options
from expertly.policies.prediction import ALL_LAYERS
from expertly.scheduler.systems import ACCEPTED, OF_PREDICTION, PARTS, REGISTRIES, SYSTEMS, System, names_of_options

SHOWN = ("eviction", "scope", "allocation", "prediction", "prefetch", "distance")
_DEFAULTS = {field.name: field.default for field in fields(System)}
OTHERS = tuple(part for part in PARTS if part not in SHOWN)


@dataclass(frozen=True, kw_only=True)
class SystemsOptions:
    json: bool = json_flag()


def run(args: SystemsOptions) -> int:
    for problem in [problem for registry in (SYSTEMS, *REGISTRIES.values()) for problem in registry.problems()]:
        message(f"expertly: note: {problem}")
    accepted = {key: list(ACCEPTED.get(key, ())) for key in PARTS}  # empty where it is a number
    if args.json:
        systems = [_parts(system) | {"summary": system.summary} for system in SYSTEMS.values()]
        every = [(part, name) for part, registry in REGISTRIES.items() for name in registry]
        by_policy = {f"{part}={name}": names for part, name in every if (names := names_of_options(part, name))}
        print_json({"systems": systems, "parts": accepted, "options": by_policy})
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    shown = [key for key in SHOWN if width >= 100 or key not in ("allocation", "prefetch")]
    rows = []
    for system in SYSTEMS.values():
        parts = _parts(system)
        rows.append([system.name, *("-" if parts[key] is None else str(parts[key]) for key in shown)])
    lines = [table(("system", *shown), rows), ""]
    for system in SYSTEMS.values():
        unlike = [key for key in PARTS if key not in shown and getattr(system, key) != _DEFAULTS[key]]
        others = ", ".join(f"{key}={getattr(system, key)}" for key in unlike)
        lines.append(f"{system.name}: {system.summary}{f' [{others}]' if others else ''}")
    lines += ["", "Any but resident can be taken with other parts, NAME:KEY=VALUE:..., wherever a system is named:"]
    lines.append(
        "  --system fmoe:eviction=lru, --system lru:prediction=lookahead:distance=2, --system fmoe:semantic=no"
    )
    lines += [f"{key}: {', '.join(values) if values else 'a whole number from 1'}" for key, values in accepted.items()]
    for part, registry in REGISTRIES.items():
        for name in registry:
            if options := describe_options(registry[name].options):
                lines.append(f"with {part}={name}:")
                lines += [f"  {option}: {text}" for option, text in options.items()]
    lines.append(f"{', '.join(REGISTRIES)}: or the dotted path of one of yours, KEY=MODULE.NAME (docs/extending.md)")
    print(fitted("\n".join(lines), sys.stdout))
    return 0


def _parts(system: System) -> dict[str, Any]:
    """A system's parts by name; None for parts of prediction in a system that does not predict."""
    parts: dict[str, Any] = {"name": system.name, **{name: getattr(system, name) for name in (*SHOWN, *OTHERS)}}
    if system.prediction == "none":
        parts |= dict.fromkeys(OF_PREDICTION)
    elif system.distance >= ALL_LAYERS:
        parts["distance"] = "all"
    return parts

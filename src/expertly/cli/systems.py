"""`expertly systems`: the presets, the parts they are made of, and how to take other parts."""

from __future__ import annotations

import argparse
from typing import Any

from expertly.cli.output import add_json_flag, print_json, table
from expertly.parts import ACCEPTED, PARTS, System
from expertly.policies.options import option_names
from expertly.policies.predictor import PREDICTORS
from expertly.systems import ALL_LAYERS, SYSTEMS

SHOWN = ("eviction", "scope", "allocation", "prediction", "prefetch", "distance", "transfer")
OF_PREDICTION = ("prefetch", "distance")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("systems", help="list the systems and their parts", description=__doc__)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.json:
        systems = [_parts(system) | {"summary": system.summary} for system in SYSTEMS.values()]
        print_json({"systems": systems, "parts": _accepted(), "options": _options()})
        return 0
    rows = [["-" if value is None else str(value) for value in _parts(system).values()] for system in SYSTEMS.values()]
    print(table(("system", *SHOWN), rows))
    print()
    for system in SYSTEMS.values():
        print(f"{system.name}: {system.summary}")
    print()
    print("Any but resident can be taken with other parts, NAME:KEY=VALUE:..., wherever a system is named:")
    print("  --system fmoe:eviction=lru, --system lru:prediction=lookahead:distance=2, --system fmoe:semantic=no")
    for key, accepted in _accepted().items():
        print(f"{key}: {', '.join(accepted) if accepted else 'a whole number from 1'}")
    for name, options in _options().items():
        print(f"with prediction={name}: {', '.join(options)}")
    return 0


def _parts(system: System) -> dict[str, Any]:
    """By name, None where nothing is predicted."""
    parts: dict[str, Any] = {"name": system.name, **{name: getattr(system, name) for name in SHOWN}}
    if system.prediction == "none":
        parts |= dict.fromkeys(OF_PREDICTION)
    elif system.distance >= ALL_LAYERS:
        parts["distance"] = "all"
    return parts


def _accepted() -> dict[str, list[str]]:
    """What each key takes; nothing where it takes a number."""
    return {key: list(ACCEPTED.get(key, ())) for key in PARTS}


def _options() -> dict[str, list[str]]:
    """Of each predictor that has any."""
    return {name: names for name, one in PREDICTORS.items() if (names := option_names(one.options))}

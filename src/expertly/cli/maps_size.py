"""`expertly maps size`: the memory that a full store takes, by model and capacity; embeddings are counted apart."""

from __future__ import annotations

import argparse
from typing import Any

from expertly.cli.output import add_json_flag, format_nbytes, print_json, table
from expertly.core.errors import ConfigError

DEFAULT_GEOMETRIES = "mixtral-8x7b,qwen1.5-moe,phi-3.5-moe"
DEFAULT_CAPACITIES = "1000,2000,4000,8000,16000,32000"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("size", help="memory that maps of a model take", description=__doc__)
    add = parser.add_argument
    add(
        "--geometry",
        default=DEFAULT_GEOMETRIES,
        metavar="A,B",
        help=f"shipped descriptions or TOML files (default: {DEFAULT_GEOMETRIES})",
    )
    add("--capacity", default=DEFAULT_CAPACITIES, metavar="N,N", help=f"maps (default: {DEFAULT_CAPACITIES})")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.core.geometry import Geometry
    from expertly.policies.learned import ModelShape
    from expertly.policies.predictor.fmoe.store import MapStore, coverage_bounds
    from expertly.sim.hardware import read_geometry

    capacities = [_capacity(text) for text in _parts("capacity", args.capacity)]
    models: list[dict[str, Any]] = []
    for name in _parts("geometry", args.geometry):
        geometry = Geometry(read_geometry(name).layers)
        shape, hidden_size = ModelShape.of(geometry), geometry.layers[0].hidden_size
        sizes = [MapStore.nbytes_of(shape, capacity, hidden_size) for capacity in capacities]
        models.append(
            {
                "geometry": name,
                "num_layers": shape.num_layers,
                "num_experts": shape.max_experts,
                "embedding_size": hidden_size,
                "coverage": [{"similarity": b.similarity, "maps": b.num_maps} for b in coverage_bounds(shape)],
                "maps_bytes": [maps for maps, _ in sizes],
                "embeddings_bytes": [embeddings for _, embeddings in sizes],
            }
        )
    if args.json:
        print_json({"capacities": capacities, "models": models})
    else:
        print(_table(capacities, models))
    return 0


def _table(capacities: list[int], models: list[dict[str, Any]]) -> str:
    rows = []
    for model in models:
        bounds = [str(bound["maps"]) for bound in model["coverage"]]
        rows.append((f"{model['geometry']}: maps", *map(format_nbytes, model["maps_bytes"]), *bounds))
        rows.append(("  embeddings", *map(format_nbytes, model["embeddings_bytes"]), "", ""))
    return table(("memory", *(f"{capacity} maps" for capacity in capacities), "75% need", "98% need"), rows)


def _parts(field: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{field}={text!r}: must be one or more, with commas between them")
    return list(dict.fromkeys(parts))


def _capacity(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 9 and int(text) >= 1):
        raise ConfigError(f"capacity={text!r}: must be a whole number from 1 to 999999999")
    return int(text)

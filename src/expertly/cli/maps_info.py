"""`expertly maps info`: what a file of expert maps holds, and how much of what the model routes it covers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expertly.cli.maps_summary import headline, maps_facts, printable
from expertly.cli.output import add_json_flag, format_nbytes, format_share, print_json

_NUM_SAMPLED = 512


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", help="what a maps file holds", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a maps file")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.maps.coverage import coverage_bounds, mean_similarities
    from expertly.maps.file import MapsFile

    file = MapsFile.read(args.file)
    similarity, of_embeddings = mean_similarities(file.store, _NUM_SAMPLED)
    bounds = coverage_bounds(file.header.shape)
    facts = maps_facts(file) | {
        "mean_similarity": similarity,
        "mean_embedding_similarity": of_embeddings,
        "sampled_maps": min(_NUM_SAMPLED, file.store.num_maps),
        "coverage": [{"similarity": bound.similarity, "maps": bound.num_maps} for bound in bounds],
    }
    if args.json:
        print_json(facts)
    else:
        print(headline(file))
        print(_lines(facts))
    return 0


def _lines(facts: dict[str, Any]) -> str:
    """A line each: what, and what is to be said of it."""
    num_maps = facts["maps"]
    requests = f"{facts['requests']}, of each at most {facts['max_maps_of_request']} maps"
    rows = [("identity", printable(facts["identity"]))]
    rows += [(printable(name), printable(value)) for name, value in facts["about"].items() if value not in (None, "")]
    rows += [("maps", f"{num_maps} of at most {facts['capacity']}"), ("requests", requests)]
    for bound, formula in zip(facts["coverage"], ("2 L E", "L E ln(L E) / 2"), strict=True):
        share = format_share(num_maps / bound["maps"])
        label = f"similar to {bound['similarity']:.0%}"
        rows.append((label, f"any iteration, with {formula} = {bound['maps']} maps; here are {share} of them"))
    of_maps, of_embeddings = _number(facts["mean_similarity"]), _number(facts["mean_embedding_similarity"])
    alike = f"{of_maps} of two maps, {of_embeddings} of their embeddings; of {facts['sampled_maps']} maps"
    rows.append(("mean cosine", alike))
    for name in ("maps", "embeddings"):
        here, full = (format_nbytes(facts[key]) for key in (f"{name}_bytes", f"full_{name}_bytes"))
        rows.append((f"memory of {name}", f"{here}, {full} when it is full"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

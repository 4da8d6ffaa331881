"""`expertly maps info`: what a file of maps or activation matrices holds, and how much of what the model routes it
covers; or from how much what was learned of reuse was learned.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.maps_reuse import print_reuse
from expertly.cli.maps_summary import facts_of, headline, read_stores
from expertly.cli.output import add_json_flag, format_nbytes, format_share, print_json, printable

if TYPE_CHECKING:
    from expertly.policies.learned import LearnedFile

_NUM_SAMPLED = 512
_BOUNDS = ("2 L E", "L E ln(L E) / 2")

Lines = list[tuple[str, str]]
"""What, and what is to be said of it."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", help="what a file holds", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a file of maps, matrices or reuse")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import kind_of
    from expertly.policies.predictor.fmoe.store import MapStore, coverage_bounds

    if kind_of(args.file) == ReuseModel.kind:
        print_reuse(args.file, args.json)
        return 0
    file = read_stores(args.file)
    is_maps = isinstance(file.learned, MapStore)
    facts = facts_of(file) | (_similarity(file) if is_maps else {})
    facts["coverage"] = [
        {"similarity": bound.similarity, "maps" if is_maps else "matrices": bound.num_maps}
        for bound in coverage_bounds(file.header.shape)
    ]
    if args.json:
        print_json(facts)
        return 0
    lines = [("identity", printable(facts["identity"]))]
    lines += [(printable(name), printable(value)) for name, value in facts["about"].items() if value not in (None, "")]
    lines += _maps_lines(facts) if is_maps else _matrices_lines(facts)
    width = max(len(name) for name, _ in lines)
    print("\n".join([headline(file), *(f"{name.ljust(width)}  {value}" for name, value in lines)]))
    return 0


def _similarity(file: LearnedFile[Any]) -> dict[str, Any]:
    from expertly.policies.predictor.fmoe.store import mean_similarities

    of_maps, of_embeddings = mean_similarities(file.learned, _NUM_SAMPLED)
    return {
        "mean_similarity": of_maps,
        "mean_embedding_similarity": of_embeddings,
        "sampled_maps": min(_NUM_SAMPLED, file.learned.num_maps),
    }


def _maps_lines(facts: dict[str, Any]) -> Lines:
    num_maps = facts["maps"]
    requests = f"{facts['requests']}, of each at most {facts['max_maps_of_request']} maps"
    lines = [("maps", f"{num_maps} of at most {facts['capacity']}"), ("requests", requests)]
    for bound, formula in zip(facts["coverage"], _BOUNDS, strict=True):
        share = format_share(num_maps / bound["maps"])
        label = f"similar to {bound['similarity']:.0%}"
        lines.append((label, f"any iteration, with {formula} = {bound['maps']} maps; here are {share} of them"))
    of_maps, of_embeddings = _number(facts["mean_similarity"]), _number(facts["mean_embedding_similarity"])
    alike = f"{of_maps} of two maps, {of_embeddings} of their embeddings; of {facts['sampled_maps']} maps"
    lines.append(("mean cosine", alike))
    for name in ("maps", "embeddings"):
        here, full = (format_nbytes(facts[key]) for key in (f"{name}_bytes", f"full_{name}_bytes"))
        lines.append((f"memory of {name}", f"{here}, {full} when it is full"))
    return lines


def _matrices_lines(facts: dict[str, Any]) -> Lines:
    lines = []
    for phase in ("prefill", "decode"):
        num = facts[f"{phase}_matrices"]
        lines.append((phase, f"{num} of at most {facts['capacity']} matrices, {facts[f'{phase}_tokens']} tokens"))
        for bound, formula in zip(facts["coverage"], _BOUNDS, strict=True):
            share = format_share(num / bound["matrices"])
            label = f"  similar to {bound['similarity']:.0%}"
            lines.append((label, f"any request, with {formula} = {bound['matrices']} of them; here are {share}"))
    here, full = format_nbytes(facts["matrices_bytes"]), format_nbytes(facts["full_matrices_bytes"])
    return [*lines, ("memory", f"{here}, {full} when both are full")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

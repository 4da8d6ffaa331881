"""`expertly trace synth`: a trace of made-up routing, the same for the same flags."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import count, exponent, positive_int, seed, share
from expertly.cli.output import add_json_flag
from expertly.cli.trace_summary import report_trace
from expertly.core.errors import ConfigError

if TYPE_CHECKING:
    from expertly.lab.synth import SynthWorkload

WORKLOADS = ("zipf", "cyclic", "stationary")

_OF_WORKLOAD = {"zipf": "zipf", "markov": "zipf", "phases": "zipf", "working_set": "stationary"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("synth", help="make up a trace", description=__doc__)
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="where the trace goes: a new or an empty folder")
    add(
        "--workload",
        default="zipf",
        metavar="NAME",
        help="zipf (default); cyclic: a loop over all experts; stationary: random among a few; of the last two --json "
        "prints what Belady's replacement hits",
    )
    add("--layers", type=positive_int, default=16, metavar="N", help="default: 16")
    add("--experts", type=positive_int, default=64, metavar="N", help="a layer; default: 64")
    add("--top-k", type=positive_int, default=4, metavar="N", help="experts a token; default: 4")
    add("--tokens", type=positive_int, default=10_000, metavar="N", help="of all requests; default: 10000")
    add("--requests", type=positive_int, default=1, metavar="N", help="that share the tokens evenly; default: 1")
    add("--prefill-tokens", type=count, default=0, metavar="N", help="first tokens of a request, as one iteration")
    add("--zipf", type=exponent, metavar="A", help="popularity of rank r: r^-A (zipf; default: 1)")
    add("--markov", type=share, metavar="P", help="chance that an expert is kept for the next token (zipf; default: 0)")
    add("--phases", type=positive_int, metavar="N", help="between which popularity is dealt anew (zipf; default: 1)")
    add("--working-set", type=positive_int, metavar="N", help="experts in use (stationary; default: 2 K)")
    add(
        "--lookahead",
        type=share,
        metavar="P",
        help="add scores of the next layer, modelled: so many of its K best are needed (default: none; 0.905 is what "
        "ProMoE states)",
    )
    add("--seed", type=seed, default=0, metavar="N", help="default: 0")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.lab.synth import write_workload

    workload = _workload(args)
    write_workload(
        args.out,
        workload,
        model=f"synthetic {args.workload}",
        num_requests=args.requests,
        prefill_tokens=args.prefill_tokens,
        lookahead=args.lookahead,
        seed=args.seed,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["expertly", *sys.argv[1:]]),
    )
    known = {} if args.prefill_tokens else _optimal_hits(workload)
    report_trace(args.out, args.json, {"workload": args.workload, "optimal_hits": known or None})
    return 0


def _workload(args: argparse.Namespace) -> SynthWorkload:
    from expertly.lab import synth

    if args.workload not in WORKLOADS:
        raise ConfigError(f"workload={args.workload!r}: unknown; accepted: {', '.join(WORKLOADS)}")
    for flag, workload in _OF_WORKLOAD.items():
        if getattr(args, flag) is not None and args.workload != workload:
            raise ConfigError(f"--{flag.replace('_', '-')} has no effect on --workload {args.workload}")
    sizes = (args.layers, args.experts, args.top_k, args.tokens)
    if args.workload == "cyclic":
        return synth.cyclic(*sizes)
    if args.workload == "stationary":
        working_set = min(2 * args.top_k, args.experts) if args.working_set is None else args.working_set
        return synth.stationary_set(*sizes, working_set=working_set, seed=args.seed)
    return synth.zipf(
        *sizes,
        exponent=1.0 if args.zipf is None else args.zipf,
        keep=args.markov or 0.0,
        num_phases=args.phases or 1,
        seed=args.seed,
    )


def _optimal_hits(workload: SynthWorkload) -> dict[str, int]:
    """By capacity in experts a layer, where it is known. Holds where each token is an iteration by itself."""
    hits = {capacity: workload.optimal_hits(capacity) for capacity in range(1, workload.num_experts + 1)}
    return {str(capacity): number for capacity, number in hits.items() if number is not None}

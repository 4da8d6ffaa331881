"""`expertly lab trace synth`: a trace of made-up routing, the same for the same flags."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import exponent, seed, share
from expertly.cli.trace_summary import report_trace
from expertly.core.errors import ConfigError
from expertly.options import REQUIRED, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.lab.synth import SynthWorkload

WORKLOADS = ("zipf", "cyclic", "stationary")

_OF_WORKLOAD = {"zipf": "zipf", "markov": "zipf", "phases": "zipf", "working_set": "stationary"}


@dataclass(frozen=True, kw_only=True)
class TraceSynthOptions:
    out: Path = argument(REQUIRED, "where the trace goes: a new or an empty folder", metavar="OUT", type=Path)
    workload: str = option(
        "zipf",
        "zipf (default); cyclic: a loop over all experts; stationary: random among a few; of the last two --json "
        "prints what Belady's replacement hits",
        metavar="NAME",
    )
    layers: int = option(16, "default: 16", metavar="N", least=1)
    experts: int = option(64, "a layer; default: 64", metavar="N", least=1)
    top_k: int = option(4, "experts a token; default: 4", metavar="N", least=1)
    tokens: int = option(10000, "of all requests; default: 10000", metavar="N", least=1)
    requests: int = option(1, "that share the tokens evenly; default: 1", metavar="N", least=1)
    prefill_tokens: int = option(0, "first tokens of a request, as one iteration", metavar="N")
    zipf: Any | None = option(None, "popularity of rank r: r^-A (zipf; default: 1)", metavar="A", type=exponent)
    markov: Any | None = option(
        None, "chance that an expert is kept for the next token (zipf; default: 0)", metavar="P", type=share
    )
    phases: int | None = option(
        None, "between which popularity is dealt anew (zipf; default: 1)", metavar="N", type=int, least=1
    )
    working_set: int | None = option(None, "experts in use (stationary; default: 2 K)", metavar="N", type=int, least=1)
    lookahead: Any | None = option(
        None, "add scores of the next layer, modelled: so many of its K best are needed", metavar="P", type=share
    )
    seed: Any = option(0, "default: 0", metavar="N", type=seed)
    json: bool = json_flag()


def run(args: TraceSynthOptions) -> int:
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


def _workload(args: TraceSynthOptions) -> SynthWorkload:
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

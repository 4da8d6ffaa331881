"""`expertly simulate`: what systems would do with a recorded trace on a described machine, beside the best possible."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import names, positive_int, seed, split
from expertly.cli.output import add_json_flag, message, print_json, progress_bar
from expertly.cli.system_files import plan_for, predictor_for
from expertly.core.costs import refuse_compressed
from expertly.core.errors import ConfigError
from expertly.scheduler.presets import BASE_SYSTEM, SYSTEMS
from expertly.scheduler.system import ORDERS

if TYPE_CHECKING:
    from expertly.sim.study import Memory

DEFAULT_MEMORY = "10%,25%,50%"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("simulate", help="run systems over a recorded trace", description=__doc__)
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, help="a folder made by `expertly trace record`, `import` or `synth`")
    add(
        "--system",
        default=BASE_SYSTEM,
        metavar="A,B",
        help=f"of {', '.join(SYSTEMS.built_in)} (default: {BASE_SYSTEM}) or what `expertly systems` lists; "
        "NAME:KEY=VALUE changes a part of one",
    )
    add(
        "--memory",
        metavar="SIZE,SIZE",
        help=f"shares of the experts or amounts (default: {DEFAULT_MEMORY})".replace("%", "%%"),
    )
    add("--experts-per-layer", metavar="N,N", help="instead: every layer keeps so many experts, beside the ring")
    add("--hardware", default="rtx3090", metavar="NAME", help="a shipped profile or a TOML file (default: rtx3090)")
    add("--codec", default="none", metavar="NAME", help="experts on disk: none (as they are) or planes (compressed)")
    add("--compressed", metavar="SHARE", help=argparse.SUPPRESS)  # gone, and refused
    add("--predictor", type=Path, metavar="FILE", help="for systems that take one: `expertly train-predictor` makes it")
    add("--plan", type=Path, metavar="FILE", help="for systems with split caching: `expertly configure` makes it")
    add("--matcher", default="virtual", metavar="NAME", help="virtual (default: predicting takes its time) or inline")
    add("--segments", type=positive_int, metavar="P", help="parts an expert is cut into (default: the system's)")
    add("--order", metavar="NAME", help="resident (what is here first) or id (default: each system's)")
    add(
        "--geometry",
        metavar="NAME",
        help="sizes of experts: a shipped description or a TOML file (default: the trace's)",
    )
    add("--requests", type=positive_int, metavar="N", help="simulate so many requests at most")
    add("--tokens", type=positive_int, metavar="N", help="simulate so many tokens at most")
    add(
        "--split",
        type=split,
        metavar="7:3",
        help="profiles learn from a first part of the shuffled requests, the rest is simulated",
    )
    add("--seed", type=seed, default=0, metavar="N", help="of the shuffle, and of what policies draw (default: 0)")
    add(
        "--arrivals", type=Path, metavar="FILE", help="CSV of arrivals and lengths: requests queue, latencies are given"
    )
    add("--plot", type=Path, metavar="FILE", help="draw hit rate, TPOT and stalls against memory (PNG, PDF, SVG)")
    add("--chrome-trace", type=Path, metavar="FILE", help="write a timeline for chrome://tracing or ui.perfetto.dev")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.cli.simulate_report import about, report
    from expertly.cli.trace_geometry import trace_geometry
    from expertly.lab.plots import check_plot
    from expertly.sim.hardware import Hardware
    from expertly.sim.schedule import Selection, make_schedule, read_arrivals
    from expertly.sim.study import MATCHERS, Study
    from expertly.trace.reader import Trace

    refuse_compressed(args.compressed)
    systems, memories = names("system", args.system), _memories(args)
    if args.requests is not None and args.tokens is not None:
        raise ConfigError(f"requests={args.requests}, tokens={args.tokens}: both limit the same; give one of them")
    if args.order is not None and args.order not in ORDERS:
        raise ConfigError(f"order={args.order!r}: unknown; accepted: {', '.join(ORDERS)}")
    if args.matcher not in MATCHERS:
        raise ConfigError(f"matcher={args.matcher!r}: unknown; accepted: {', '.join(MATCHERS)}")
    if args.plot is not None:
        check_plot(args.plot)
    selection = Selection(args.requests, args.tokens, args.split, args.seed)
    hardware = Hardware.read(args.hardware)
    trace = Trace.open(args.trace)
    predictor = predictor_for(systems, args.predictor)
    plan = plan_for(systems, args.plan)
    layers, dense, geometry_name = trace_geometry(trace, args.geometry)
    arrivals = None if args.arrivals is None else read_arrivals(args.arrivals)
    schedule = make_schedule(trace, selection, arrivals)
    with _chrome_trace(args.chrome_trace) as chrome, progress_bar(unit="row") as progress:
        study = Study(
            trace,
            schedule,
            hardware,
            layers,
            dense,
            segments=args.segments,
            seed=args.seed,
            is_queued=arrivals is not None,
            order=args.order,
            matcher=args.matcher,
            learned=None if predictor is None else predictor.learned,
            plan=plan,
            chrome=chrome,
            progress=progress,
            codec=args.codec,
        )
        results = list(study.results(systems, memories))
    facts = about(args, study, systems, geometry_name, predictor)
    if args.plot is not None:
        from expertly.lab.drawings import plot_simulation

        plot_simulation(facts, results, args.plot)
        message(f"plot written to {args.plot}")
    if args.chrome_trace is not None:
        message(f"timeline written to {args.chrome_trace}")
    if args.json:
        print_json({**facts, "results": results})
    else:
        print(report(facts, results))
    return 0


def _memories(args: argparse.Namespace) -> list[Memory]:
    from expertly.sim.study import Memory

    if args.experts_per_layer is None:
        return [Memory(label) for label in names("memory", DEFAULT_MEMORY if args.memory is None else args.memory)]
    if args.memory is not None:
        raise ConfigError(
            f"experts_per_layer={args.experts_per_layer}: stands instead of memory={args.memory}; give one"
        )
    memories = []
    for text in names("experts_per_layer", args.experts_per_layer):
        if not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"experts_per_layer={text!r}: must be a whole number from 0")
        memories.append(Memory(f"{int(text)}/layer", int(text)))
    return memories


@contextlib.contextmanager
def _chrome_trace(path: Path | None) -> Iterator[Any]:
    from expertly.lab.chrome import ChromeTrace

    if path is None:
        yield None
    else:
        with ChromeTrace(path) as chrome:
            yield chrome

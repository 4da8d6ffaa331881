"""`expertly lab simulate`: run systems over a trace, on a described machine.

Beside what would be the best possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import names, seed, split
from expertly.cli.output import message, print_json, progress_bar
from expertly.cli.system_files import plan_for, predictor_for
from expertly.core.errors import ConfigError
from expertly.options import REQUIRED, argument, json_flag, option
from expertly.scheduler.system import ORDERS

if TYPE_CHECKING:
    from expertly.sim.study import Memory

DEFAULT_MEMORY = "10%,25%,50%"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    trace: Path = argument(
        REQUIRED, "a folder made by `expertly lab trace record`, `import` or `synth`", metavar="TRACE", type=Path
    )
    system: str = option(
        "lru",
        "of on-demand, lru, lfu, lcp, random, static, expertly, expertly-ahead, resident, deepspeed-index, "
        "brainstorm, mixtral-offloading, moe-infinity-lfu, belady, belady-global, oracle, modelled-lookahead, "
        "adapmoe, fmoe, promoe, pre-gated, moepic, moe-infinity (default: lru) or what `expertly lab systems` lists; "
        "NAME:KEY=VALUE changes a part of one",
        metavar="A,B",
    )
    memory: str | None = option(None, "shares of the experts or amounts", metavar="SIZE,SIZE")
    experts_per_layer: str | None = option(
        None, "instead: every layer keeps so many experts, beside the staging slots", metavar="N,N"
    )
    hardware: str = option("rtx3090", "a shipped profile or a TOML file", metavar="NAME")
    codec: str = option("none", "experts on disk: none (as they are) or planes (compressed)", metavar="NAME")
    predictor: Path | None = option(
        None, "for systems that take one: `expertly lab train` makes it", metavar="FILE", type=Path
    )
    plan: Path | None = option(
        None, "for systems with split caching: `expertly lab configure` makes it", metavar="FILE", type=Path
    )
    predict: str = option(
        "virtual", "virtual (default: predicting takes its time) or inline", metavar="NAME", was="matcher"
    )
    segments: int | None = option(None, "parts an expert is cut into", metavar="P", type=int, least=1)
    order: str | None = option(None, "resident (what is here first) or id", metavar="NAME")
    geometry: str | None = option(None, "sizes of experts: a shipped description or a TOML file", metavar="NAME")
    requests: int | None = option(None, "simulate so many requests at most", metavar="N", type=int, least=1)
    tokens: int | None = option(None, "simulate so many tokens at most", metavar="N", type=int, least=1)
    split: Any | None = option(
        None,
        "profiles learn from a first part of the shuffled requests, the rest is simulated",
        metavar="7:3",
        type=split,
    )
    seed: Any = option(0, "of the shuffle, and of what policies draw", metavar="N", type=seed)
    arrivals: Path | None = option(
        None, "CSV of arrivals and lengths: requests queue, latencies are given", metavar="FILE", type=Path
    )
    plot: Path | None = option(
        None, "draw hit rate, TPOT and stalls against memory (PNG, PDF, SVG)", metavar="FILE", type=Path
    )
    chrome_trace: Path | None = option(
        None, "write a timeline for chrome://tracing or ui.perfetto.dev", metavar="FILE", type=Path
    )
    json: bool = json_flag()


def run(args: SimulateOptions) -> int:
    from expertly.cli.simulate_report import about, report
    from expertly.cli.trace_geometry import trace_geometry
    from expertly.lab.plots import check_plot
    from expertly.sim.hardware import Hardware
    from expertly.sim.schedule import Selection, make_schedule, read_arrivals
    from expertly.sim.study import MATCHERS, Study
    from expertly.trace.reader import Trace

    systems, memories = names("system", args.system), _memories(args)
    if args.requests is not None and args.tokens is not None:
        raise ConfigError(f"requests={args.requests}, tokens={args.tokens}: both limit the same; give one of them")
    if args.order is not None and args.order not in ORDERS:
        raise ConfigError(f"order={args.order!r}: unknown; accepted: {', '.join(ORDERS)}")
    if args.predict not in MATCHERS:
        raise ConfigError(f"predict={args.predict!r}: unknown; accepted: {', '.join(MATCHERS)}")
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
            matcher=args.predict,
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


def _memories(args: SimulateOptions) -> list[Memory]:
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

"""`expertly configure`: how much of how many experts each layer should keep, from a model or a trace (MoEpic)."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import positive_int, proper_share, seconds, seed, split
from expertly.cli.output import add_json_flag, message, print_json, reserved_stdout
from expertly.core.errors import ConfigError
from expertly.policies.allocation.moepic import DEFAULT_ZETA

if TYPE_CHECKING:
    from expertly.cli.configure_sources import ConfiguratorInput
    from expertly.policies.allocation.moepic import Configuration
    from expertly.scheduler.budget import Budget

SYSTEM = "moepic"
DEFAULT_MEMORY = "25%"
DEFAULT_HARDWARE = "rtx3090"
DEFAULT_TOKENS = 256
DEFAULT_SECONDS = 10.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("configure", help="plan what each layer keeps (MoEpic)", description=__doc__)
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        metavar="MODEL|TRACE",
        help="a model (a folder, a packed store or a hub id; default: the demo model), which is run and measured here, "
        "or a trace, best one of `expertly trace record --full`",
    )
    add(
        "--memory",
        default=DEFAULT_MEMORY,
        metavar="SIZE,SIZE",
        help=f"for experts, as `generate` takes it (default: {DEFAULT_MEMORY}); a model runs with the first of several"
        "".replace("%", "%%"),
    )
    add("--segments", type=positive_int, metavar="P", help=f"parts an expert is cut into (default: those of {SYSTEM})")
    add(
        "--zeta",
        type=proper_share,
        default=DEFAULT_ZETA,
        metavar="X",
        help="share of memory moved at a time (default: 0.01)",
    )
    add("--hardware", metavar="NAME", help=f"times by a profile (default: {DEFAULT_HARDWARE}; a model's are measured)")
    add(
        "--tokens",
        type=positive_int,
        metavar="N",
        help=f"learn from so many tokens (default: all; a model: {DEFAULT_TOKENS})",
    )
    add("--out", type=Path, metavar="FILE", help="save the plan, which --plan reads")
    add("--plot", type=Path, metavar="FILE", help="draw budgets, splits and exposed times (PNG, PDF, SVG)")
    of_trace = parser.add_argument_group("of a trace")
    of_trace.add_argument("--geometry", metavar="NAME", help="sizes of experts: a description (default: the trace's)")
    of_trace.add_argument(
        "--split", type=split, metavar="7:3", help="learn only from what `simulate --split` learns from"
    )
    of_trace.add_argument("--seed", type=seed, metavar="N", help="of the split's shuffle (default: 0)")
    of_model = parser.add_argument_group("of a model")
    of_model.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what to continue; may be given several times"
    )
    of_model.add_argument(
        "--seconds", type=seconds, metavar="S", help=f"measure times for so long (default: {DEFAULT_SECONDS:g})"
    )
    of_model.add_argument("--dtype", metavar="NAME", help="as of `generate`")
    of_model.add_argument("--device", metavar="NAME", help="as of `generate`")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from expertly.cli.configure_sources import is_trace, observed_in
    from expertly.lab.plots import check_plot

    memories = _memories(args)
    of_trace = is_trace(args.source)
    _check_arguments(args, of_trace)
    if args.plot is not None:
        check_plot(args.plot)
    with reserved_stdout() as stdout:
        if of_trace:
            seen = observed_in(args, memories)
        else:
            from expertly.cli.configure_model import observed_of

            seen = observed_of(args, memories)
        found = [(label, budget, *_configured(seen, budget, args.zeta)) for label, budget in seen.budgets.items()]
        from expertly.cli.configure_report import report, result_of

        result = result_of(args, seen, found)
        if args.out is not None:
            _save(args, seen, found[0][0], found[0][2])
        if args.plot is not None:
            from expertly.lab.drawings import plot_configuration

            plot_configuration(result, args.plot)
            message(f"plot written to {args.plot}")
        if args.json:
            print_json(result, stdout)
        else:
            stdout.write(report(result) + "\n")
    return 0


def _memories(args: argparse.Namespace) -> list[str]:
    labels = [label.strip() for label in args.memory.split(",")]
    if not all(labels):
        raise ConfigError(f"memory={args.memory!r}: must be one or more, with commas between them")
    labels = list(dict.fromkeys(labels))
    if len(labels) > 1 and args.out is not None:
        raise ConfigError(f"out={str(args.out)!r}: holds the plan of one memory, not of {args.memory}; give one")
    if args.out is not None:
        folder = args.out.absolute().parent
        if args.out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"out={str(args.out)!r}: must be a file, in a folder that exists and is writable")
    return labels


def _check_arguments(args: argparse.Namespace, of_trace: bool) -> None:
    """Raises ConfigError for flags that would do nothing."""
    useless = ("prompt", "seconds", "dtype", "device") if of_trace else ("geometry", "split", "seed")
    for name in useless:
        if getattr(args, name) is not None:
            what = "a model, and this is a trace" if of_trace else "a trace, and this is a model"
            raise ConfigError(f"{name}={getattr(args, name)!r}: only of {what}: {args.source or 'demo'}")
    if args.seed is not None and args.split is None:
        raise ConfigError(f"seed={args.seed}: shuffles for --split, which is not given")
    if args.seconds is not None and args.hardware is not None:
        raise ConfigError(
            f"seconds={args.seconds:g}: nothing is measured, times are those of hardware={args.hardware!r}"
        )


def _configured(seen: ConfiguratorInput, budget: Budget, zeta: float) -> tuple[Configuration, float]:
    """And the seconds that it took."""
    from expertly.policies.allocation.moepic import configure

    start = time.perf_counter()
    found = configure(seen.geometry, budget.kept_slots, seen.rates.layers, seen.timing, zeta)
    return found, time.perf_counter() - start


def _save(args: argparse.Namespace, seen: ConfiguratorInput, memory: str, found: Configuration) -> None:
    from expertly.policies.allocation.moepic import save_plan

    about: dict[str, str | int | float | None] = {
        "model": seen.model,
        "memory": memory,
        "times": seen.times,
        "exposed_ms_uniform": round(sum(found.start_exposed_ns) / 1e6, 6),
        "exposed_ms": round(sum(one.exposed_ns for one in found.outcomes) / 1e6, 6),
        "command": shlex.join(["expertly", *sys.argv[1:]]),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    save_plan(args.out, found.plan, about)

"""`expertly lab configure`: MoEpic's plan: what of the experts each layer keeps.

From a model, which is run and measured, or a trace.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import proper_share, seconds, seed, split
from expertly.cli.output import message, print_json, reserved_stdout
from expertly.core.errors import ConfigError
from expertly.options import argument, json_flag, option

if TYPE_CHECKING:
    from expertly.cli.configure_sources import ConfiguratorInput
    from expertly.policies.allocation.moepic import Configuration
    from expertly.scheduler.budget import Budget

SYSTEM = "moepic"
DEFAULT_MEMORY = "25%"
DEFAULT_HARDWARE = "rtx3090"
DEFAULT_TOKENS = 256
DEFAULT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ConfigureOptions:
    source: str | None = argument(
        None,
        "a model (a folder, a packed store or a hub id; default: the demo model), which is run and measured here,"
        " or a trace, best one of `expertly lab trace record --full`",
        metavar="MODEL|TRACE",
    )
    memory: str = option(
        "25%",
        "for experts, as `generate` takes it (default: 25%); a model runs with the first of several",
        metavar="SIZE,SIZE",
    )
    segments: int | None = option(None, "parts an expert is cut into", metavar="P", type=int, least=1)
    zeta: Any = option(0.01, "share of memory moved at a time", metavar="X", type=proper_share)
    hardware: str | None = option(None, "times by a profile", metavar="NAME")
    tokens: int | None = option(None, "learn from so many tokens", metavar="N", type=int, least=1)
    out: Path | None = option(None, "save the plan, which --plan reads", metavar="FILE", type=Path)
    plot: Path | None = option(
        None, "draw budgets, splits and exposed times (PNG, PDF, SVG)", metavar="FILE", type=Path
    )
    geometry: str | None = option(None, "sizes of experts: a description", metavar="NAME")
    split: Any | None = option(None, "learn only from what `simulate --split` learns from", metavar="7:3", type=split)
    seed: Any | None = option(None, "of the split's shuffle", metavar="N", type=seed)
    prompt: list[str] | None = option(
        None, "what to continue; may be given several times", metavar="TEXT", is_several=True
    )
    seconds: Any | None = option(None, "measure times for so long", metavar="S", type=seconds)
    dtype: str | None = option(None, "as of `generate`", metavar="NAME")
    device: str | None = option(None, "as of `generate`", metavar="NAME")
    json: bool = json_flag()


def run(args: ConfigureOptions) -> int:
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
            _save(args.out, seen, found[0][0], found[0][2])
        if args.plot is not None:
            from expertly.lab.drawings import plot_configuration

            plot_configuration(result, args.plot)
            message(f"plot written to {args.plot}")
        if args.json:
            print_json(result, stdout)
        else:
            stdout.write(report(result) + "\n")
    return 0


def _memories(args: ConfigureOptions) -> list[str]:
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


def _check_arguments(args: ConfigureOptions, of_trace: bool) -> None:
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


def _save(path: Path, seen: ConfiguratorInput, memory: str, found: Configuration) -> None:
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
    save_plan(path, found.plan, about)

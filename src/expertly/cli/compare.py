"""`expertly compare`: which system is best for a model on this machine, or for a recorded trace on a described one, and
how far that is from the best possible; with a report to look at.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import names, positive_int, seed, split, temperature
from expertly.cli.configure_sources import is_trace
from expertly.cli.output import add_json_flag, message, printable, progress_bar, reserved_stdout
from expertly.cli.system_files import plan_for, predictor_for
from expertly.core.costs import refuse_compressed
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.lab.compare.settings import (
    DEFAULT_MEMORY,
    ComparisonSettings,
    check_memories,
    check_systems,
    default_systems,
)
from expertly.lab.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from expertly.lab.compare.comparison import Comparison

WITH_MODEL = ("prompts", "rounds", "temperature", "dtype", "device")
WITH_TRACE = ("geometry",)
"""Flags that would do nothing with the other."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compare", help="which system is best here, and how far from the best possible")
    parser.description = __doc__
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        metavar="MODEL|TRACE",
        help="a model (a folder, a packed store or a hub id; default: the demo model): the engine runs, and the "
        "simulator with this machine's speeds; or the folder of a trace: the simulator alone",
    )
    usual = default_systems()
    add("--system", default=usual, metavar="A,B", help=f"default: {usual}; NAME:KEY=VALUE changes a part of one")
    add(
        "--memory",
        default=DEFAULT_MEMORY,
        metavar="SIZE,SIZE",
        help=f"shares of the experts or amounts (default: {DEFAULT_MEMORY})".replace("%", "%%"),
    )
    add("--out", required=True, type=Path, metavar="DIR", help="where the report goes: a new or an empty folder")
    add("--force", action="store_true", help="replace an earlier comparison in DIR")
    add(
        "--prompts",
        metavar="FILE",
        help='JSON Lines, {"prompt": "text"} a line (default: some that ship with expertly)',
    )
    add(
        "--requests",
        type=positive_int,
        metavar="N",
        help="default: 5 with a model (with --split both parts), 20 with a trace",
    )
    add("--tokens", type=positive_int, metavar="N", help="of each answer (default: 24 with a model, all with a trace)")
    add("--rounds", type=positive_int, metavar="N", help="times that the engine runs everything (default: 2)")
    add("--temperature", type=temperature, metavar="X", help="of the answers, 0 is greedy (default: 0.8)")
    add(
        "--split",
        type=split,
        metavar="7:3",
        help="what learns does from a first part of the shuffled requests, the rest is compared",
    )
    add("--seed", type=seed, default=0, metavar="N", help="of the shuffle and of what is drawn (default: 0)")
    add(
        "--hardware",
        metavar="NAME",
        help="simulate a shipped profile or a TOML file (default: with a model this machine as it is measured "
        "meanwhile, with a trace rtx3090)",
    )
    add("--geometry", metavar="NAME", help="with a trace: sizes of experts, a shipped description or a TOML file")
    add("--segments", type=positive_int, metavar="P", help="parts an expert is cut into (default: each system's)")
    add("--codec", metavar="NAME", help="how experts are stored: none, planes, with a model auto (its default)")
    add("--compressed", metavar="SHARE", help=argparse.SUPPRESS)  # gone, and refused
    add("--dtype", metavar="NAME", help="bfloat16, float16 or float32 (default: the checkpoint's)")
    add("--device", metavar="NAME", help="cpu or cuda:N (default: the accelerator, where there is one)")
    add("--predictor", type=Path, metavar="FILE", help="for systems that take one: `expertly train-predictor` makes it")
    add("--plan", type=Path, metavar="FILE", help="for systems with split caching: `expertly configure` makes it")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 2 where a system that was tried did not come through, 130 where it was interrupted. What there is is
    written in any case, and between rounds, so that nothing that ends this process takes it along.
    """
    has_trace = is_trace(args.source)
    _refuse(args, WITH_MODEL if has_trace else WITH_TRACE, has_trace)
    settings = _settings(args, has_trace)
    prompts = [] if has_trace else _prompts(args)
    with reserved_stdout() as stdout:
        from expertly.cli.compare_output import Output
        from expertly.lab.compare.comparison import Comparison
        from expertly.lab.compare.folder import begin, prepare

        command = shlex.join(["expertly", *sys.argv[1:]])
        kind, name = ("trace", str(args.source)) if has_trace else ("model", args.source or "demo")
        comparison = Comparison(settings, command, {"kind": kind, "name": printable(name)})
        output = Output(comparison, args.out)
        comparison.keep = output.keep
        check = _opened_trace(args) if has_trace else None
        prepare(args.out, args.force)
        begin(args.out, command)
        is_interrupted = False
        try:
            with progress_bar("steps") as progress:
                if check is not None:
                    from expertly.lab.compare.comparison import compare_trace

                    compare_trace(comparison, *check, progress)
                else:
                    _compare_model(comparison, prompts, args, progress)
        except KeyboardInterrupt:
            is_interrupted = True
        except ExpertlyError as error:
            if not comparison.has_results:
                raise
            comparison.problem = str(error)
        except BaseException as error:  # a bug, of ours or of a system that was installed: what was done is not lost
            comparison.problem = f"{type(error).__name__}: {error}"
            output.write()
            raise
        return output.end(stdout, args.json, is_interrupted)


def _compare_model(comparison: Comparison, prompts: list[Prompt], args: argparse.Namespace, progress: Any) -> None:
    from expertly.lab.compare.comparison import compare_model
    from expertly.lab.compare.folder import TRACE

    tell = message if progress is None else lambda what: progress(what, 0, 1)
    compare_model(comparison, args.source, prompts, args.out / TRACE, progress, tell)


def _opened_trace(args: argparse.Namespace) -> tuple[Any, Any]:
    from expertly.cli.trace_geometry import trace_geometry
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(args.source))
    return trace, trace_geometry(trace, args.geometry)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], has_trace: bool) -> None:
    for name in names:
        if getattr(args, name) is not None:
            what, other = ("a trace", "a model") if has_trace else ("a model", "a trace")
            raise ConfigError(f"{name}={getattr(args, name)!r}: of no use with {what}; accepted with {other}")


def _settings(args: argparse.Namespace, has_trace: bool) -> ComparisonSettings:
    refuse_compressed(args.compressed)
    given = {name: getattr(args, name) for name in ("rounds", "temperature") if getattr(args, name) is not None}
    settings = ComparisonSettings(
        check_systems(names("system", args.system)),
        check_memories(names("memory", args.memory)),
        requests=args.requests,
        tokens=args.tokens,
        split=args.split,
        seed=args.seed,
        segments=args.segments,
        codec=args.codec or ("none" if has_trace else "auto"),
        dtype=args.dtype,
        device=args.device,
        hardware=args.hardware,
        predictor=args.predictor,
        plan=args.plan,
        **given,
    )
    _check_files(settings)
    return settings


def _check_files(settings: ComparisonSettings) -> None:
    """Raises what reading them raises, before anything runs."""
    from expertly.sim.hardware import Hardware

    if settings.hardware is not None:
        Hardware.read(settings.hardware)
    predictor_for(settings.systems, settings.predictor)
    plan_for(settings.systems, settings.plan)


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    from expertly.data import demo_prompts

    return read_prompts(str(demo_prompts()) if args.prompts is None else args.prompts, args.requests)

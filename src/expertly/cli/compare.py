"""`expertly lab compare`: which system is fastest for a model, or a trace.

Runs a model under each system on this machine, or simulates a recorded trace on a described one, and says how far each
system is from the best possible. Writes a report to look at, after every round, so that an interrupted comparison
leaves one. Exit code 2 where a system failed, 130 where it was interrupted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertly.arguments import names, seed, split, temperature
from expertly.cli.inputs import is_trace, plan_for, predictor_for, trace_geometry
from expertly.cli.output import printable, progress_bar, reserved_stdout, typed
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.data import demo_prompts
from expertly.lab.compare.settings import (
    DEFAULT_MEMORY,
    USUAL_SYSTEMS,
    ComparisonSettings,
    check_memories,
    check_systems,
)
from expertly.lab.prompts import PROMPTS_HELP, RAW_HELP, read_prompts
from expertly.options import (
    ADVANCED,
    MODEL_HELP,
    REQUIRED,
    RESEARCH,
    argument,
    check_one_memory,
    jobs_option,
    json_flag,
    load_option,
    option,
    path_option,
)
from expertly.sim.hardware import Hardware
from expertly.trace.reader import Trace

WITH_MODEL = ("prompts", "rounds", "temperature", "total_memory", "dtype", "device")
WITH_TRACE = ("geometry",)
"""Options that only a model, and only a trace, can use."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    source: str | None = argument(
        None,
        "a model (a folder, a packed store or a hub id; default: the demo model), which runs on "
        "this machine and is simulated with this machine's speeds; or the folder of a trace, "
        "which is simulated",
        metavar="MODEL|TRACE",
    )
    system: str = option(
        USUAL_SYSTEMS, "as `expertly lab systems` lists; NAME:KEY=VALUE changes a part of one", metavar="A,B"
    )
    memory: str | None = option(
        None, f"for experts: shares of them or amounts (default: {DEFAULT_MEMORY})", metavar="SIZE,SIZE"
    )
    total_memory: str | None = option(
        None, "instead of memory, with a model: amounts for everything, as `run` takes them", metavar="SIZE,SIZE"
    )
    out: Path = path_option(REQUIRED, "where the report goes: a new or an empty folder", "DIR")
    force: bool = option(False, "replace an earlier comparison in DIR")
    prompts: str | None = option(None, PROMPTS_HELP, metavar="FILE")
    requests: int | None = option(
        None, "how many are run (default: 5 of a model's prompts, with --split both parts; 20 of a trace)", least=1
    )
    tokens: int | None = option(None, "length of each answer (default: 24 with a model)", least=1)
    rounds: int | None = option(None, "how often the engine runs everything (default: 2)", least=1)
    raw: bool = option(False, RAW_HELP, panel=ADVANCED)
    temperature: Any | None = option(None, "of the answers; 0 is greedy", metavar="X", type=temperature, panel=ADVANCED)
    split: Any | None = option(
        None,
        "systems that learn do so from the first part of the shuffled requests; the second is compared",
        metavar="7:3",
        type=split,
        panel=ADVANCED,
    )
    seed: Any = option(0, "of the shuffle and of sampling", metavar="N", type=seed, panel=ADVANCED)
    hardware: str | None = option(
        None, "the machine to simulate: a shipped profile or a TOML file", metavar="NAME", panel=ADVANCED
    )
    geometry: str | None = option(
        None,
        "with a trace: the sizes of its experts, a shipped description or a TOML file",
        metavar="NAME",
        panel=ADVANCED,
    )
    segments: int | None = load_option("segments")
    codec: str | None = load_option("codec", default=None)
    dtype: str | None = load_option("dtype")
    device: str | None = load_option("device")
    predictor: Path | None = path_option(
        None, "trained weights for systems with a learned predictor, from `expertly lab train`", panel=RESEARCH
    )
    plan: Path | None = path_option(
        None, "a plan for systems with split caching, from `expertly lab configure`", panel=RESEARCH
    )
    jobs: int | None = jobs_option("simulations")
    json: bool = json_flag()


def run(args: CompareOptions) -> int:
    has_trace = is_trace(args.source)
    _refuse(args, WITH_MODEL if has_trace else WITH_TRACE, has_trace)
    settings = _settings(args, has_trace)
    texts = str(demo_prompts()) if args.prompts is None else args.prompts
    prompts = [] if has_trace else read_prompts(texts, args.requests)
    with reserved_stdout() as stdout:
        from expertly.cli.compare_output import Output
        from expertly.lab.compare.comparison import TRACE, Comparison, compare_model, compare_trace, prepare

        command = typed()
        kind, name = ("trace", str(args.source)) if has_trace else ("model", args.source or "demo")
        comparison = Comparison(settings, command, {"kind": kind, "name": printable(name)})
        output = Output(comparison, args.out)
        comparison.keep = output.keep
        trace = Trace.open(Path(str(args.source))) if has_trace else None
        geometry = None if trace is None else trace_geometry(trace, args.geometry)
        prepare(args.out, command, args.force)
        is_interrupted = False
        try:
            with progress_bar("steps") as progress:
                if trace is not None and geometry is not None:
                    compare_trace(comparison, trace, geometry, progress)
                else:
                    folder, tell = args.out / TRACE, progress.say
                    compare_model(comparison, args.source, prompts, folder, progress, tell, progress.in_bytes)
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


def _refuse(args: CompareOptions, names: tuple[str, ...], has_trace: bool) -> None:
    for name in names:
        if getattr(args, name) is not None:
            what, other = ("a trace", "a model") if has_trace else ("a model", "a trace")
            raise ConfigError(f"{name}={getattr(args, name)!r}: of no use with {what}; accepted with {other}")


def _settings(args: CompareOptions, has_trace: bool) -> ComparisonSettings:
    same = (
        "requests",
        "tokens",
        "rounds",
        "temperature",
        "split",
        "seed",
        "segments",
        "dtype",
        "device",
        "hardware",
        "jobs",
    )
    given = {name: getattr(args, name) for name in (*same, "predictor", "plan") if getattr(args, name) is not None}
    check_one_memory(args.memory, args.total_memory)
    field, text = ("memory", args.memory or DEFAULT_MEMORY)
    if args.total_memory is not None:
        field, text = ("total_memory", args.total_memory)
    memories = check_memories(names(field, text), field)
    settings = ComparisonSettings(
        check_systems(names("system", args.system)),
        memories,
        total_memories=memories if args.total_memory is not None else (),
        codec=args.codec or ("none" if has_trace else "auto"),
        is_raw=args.raw,
        **given,
    )
    if settings.hardware is not None:  # what reading files raises, before anything runs
        Hardware.read(settings.hardware)
    predictor_for(settings.systems, settings.predictor)
    plan_for(settings.systems, settings.plan)
    return settings


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CompareOptions):
    source: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    system: str = option("lru,expertly", "systems to run, see `expertly lab systems`", metavar="A,B")
    total_memory: str | None = option(
        None, "instead of memory: amounts for everything, as `run` takes them", metavar="SIZE,SIZE"
    )
    out: Path | None = path_option(None, "where the report goes (default: a new folder here)", "DIR")  # type: ignore[assignment]
    requests: int | None = option(None, "how many prompts are run (default: 5; --split divides them)", least=1)
    tokens: int | None = option(None, "length of each answer (default: 24)", least=1)


def bench(args: BenchOptions) -> int:
    """How fast a model runs here, and how fast it could run at best.

    Writes a report to look at: that of `expertly lab compare`, which begins with more systems and takes recorded
    traces, too.
    """
    return run(replace(args, out=args.out or Path(time.strftime("expertly-bench-%Y-%m-%d-%H%M%S"))))

"""`expertly lab machine`: write this machine, as a model runs on it, as a hardware file for `lab simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertly.cli.output import message, progress_bar
from expertly.options import MODEL_HELP, REQUIRED, argument, load_option, path_option

MODEL_SECONDS = 40.0
"""How long a model is measured."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    out: Path = path_option(REQUIRED, "the hardware file", "FILE.toml")
    memory: str | None = load_option("memory", default=None, help="for experts while they are measured (default: 25%)")
    total_memory: str | None = load_option("total_memory")


def run(args: MachineOptions) -> int:
    """Measure a model's layers, experts and loads on this machine, as a TOML file for `--hardware`."""
    from expertly import api
    from expertly_lab.model_profile import measure_model

    with progress_bar() as progress:
        memory = args.memory or (None if args.total_memory else "25%")
        model, _ = api.load(args.model, memory=memory, total_memory=args.total_memory, system="lru", progress=progress)
    try:
        hardware = measure_model(model, MODEL_SECONDS)
    finally:
        api.unload(model)
    hardware.write(args.out, [f"Measured with {args.model or 'the demo model'}."])
    message(f"hardware file written to {args.out}")
    return 0

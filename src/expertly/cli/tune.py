"""`expertly tune`: choose the fastest system for a model here, and remember it."""

from __future__ import annotations

import io
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import duration, seed
from expertly.cli.output import message, print_json, progress_bar, reserved_stdout
from expertly.core.errors import ConfigError
from expertly.data import demo_prompts
from expertly.lab.prompts import PROMPTS_HELP, RAW_HELP, Prompt, read_prompts
from expertly.options import argument, json_flag, option

if TYPE_CHECKING:
    from expertly.lab.tune.tune import Tuned
    from expertly.sim.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    model: str | None = argument(None, "a folder, a packed store or a hub id", metavar="MODEL")
    prompts: str | None = option(None, "what you ask of it. " + PROMPTS_HELP, metavar="FILE")
    raw: bool = option(False, RAW_HELP)
    memory: str = option("auto", 'for experts: "25%" of them, "1.5GiB" or "auto" (default)', metavar="SIZE")
    requests: int = option(
        16,
        "answer so many of the prompts (default: 16), half to learn from, half to try systems on",
        metavar="N",
        least=1,
    )
    max_new_tokens: int = option(64, "of an answer", metavar="N", least=1)
    time_limit: Any = option(300.0, "seconds or minutes, 90s or 5m, for everything", metavar="TIME", type=duration)
    dtype: str | None = option(None, "bfloat16, float16 or float32", metavar="NAME")
    codec: str = option("auto", "how experts are stored: none, planes, or auto: what is packed", metavar="NAME")
    device: str | None = option(None, "cpu or cuda:N", metavar="NAME")
    predictor: str = option("auto", "trained weights: a file, auto (default) or off", metavar="FILE")
    seed: Any = option(0, "of sampling, and of which half is learned from", metavar="N", type=seed)
    out: Path | None = option(None, "write all that was measured, as --json prints it", metavar="FILE", type=Path)
    json: bool = json_flag()


def run(args: TuneOptions) -> int:
    begin = time.monotonic()
    prompts = _prompts(args)
    if args.out is not None:
        folder = args.out.absolute().parent
        if args.out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"out={str(args.out)!r}: must be a file, in a folder that exists and is writable")
    with reserved_stdout() as stdout:
        from expertly.cli.tune_report import report, result_of
        from expertly.lab.tune.tune import Wishes, save, tune

        wishes = Wishes(
            model=args.model,
            memory=args.memory,
            dtype=args.dtype,
            codec=args.codec,
            device=args.device,
            predictor=args.predictor,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            time_limit_s=args.time_limit,
            is_raw=args.raw,
            command=shlex.join(["expertly", *sys.argv[1:]]),
        )
        with progress_bar("turns") as progress:
            tuned = tune(wishes, prompts, measured_machine, begin=begin, progress=progress)
        path = save(tuned)
        result = result_of(args, tuned, path)
        if args.out is not None:
            _write(args.out, result)
        if args.json:
            print_json(result, stdout)
        else:
            stdout.write(report(result) + "\n")
    _say(tuned, path)
    return 0


def _prompts(args: TuneOptions) -> list[Prompt]:
    found = read_prompts(str(demo_prompts()) if args.prompts is None else args.prompts, args.requests)
    if args.prompts is None:
        message(f"expertly: no --prompts: tuned for {len(found)} texts that ship, not for yours")
    return found


def measured_machine() -> Hardware:
    """As `expertly doctor --hardware-out`, in less time."""
    from expertly.cli.doctor_hardware import machine_hardware
    from expertly.hardware.machine import Effort, examine
    from expertly.store.cache import cache_folder

    effort = Effort(scratch_nbytes=256 << 20, write_s=2.0, reads_s=3.0, each_s=0.2, device_s=1.0)
    profile, _ = examine(cache_folder(), effort)
    return machine_hardware(profile)


def _write(path: Path, result: dict[str, Any]) -> None:
    from expertly.core.files import disk_errors, write_atomic

    text = io.StringIO()
    print_json(result, text)
    with disk_errors(path, "writing the result", ConfigError, ""):
        write_atomic(path, text.getvalue().encode())


def _say(tuned: Tuned, path: Path | None) -> None:
    if path is None:
        message(f"expertly: nothing saved: {tuned.verdict.why}; give it more time (--time-limit)")
    else:
        message(f"expertly: saved in {path}; --system auto uses it from now on")

"""`expertly tune`: finds the system that runs a model fastest on this machine, for your prompts, and remembers it."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import positive_int, seed
from expertly.cli.output import add_json_flag, message, print_json, progress_bar, reserved_stdout
from expertly.core.errors import ConfigError
from expertly.data import demo_prompts
from expertly.lab.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from expertly.lab.tune.tune import Tuned
    from expertly.sim.hardware import Hardware

DEFAULT_REQUESTS = 16
DEFAULT_NEW_TOKENS = 64
DEFAULT_TIME_LIMIT = "300s"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tune", help="choose a system for a model, machine and prompts", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, a packed store or a hub id (default: the demo model)")
    add(
        "--prompts",
        metavar="FILE",
        help='what you ask of it: JSON Lines, {"prompt": "text"} a line; .gz or "-" for stdin (default: some of ours)',
    )
    add("--memory", default="auto", metavar="SIZE", help='for experts: "25%%" of them, "1.5GiB" or "auto" (default)')
    add(
        "--requests",
        type=positive_int,
        default=DEFAULT_REQUESTS,
        metavar="N",
        help=f"answer so many of the prompts (default: {DEFAULT_REQUESTS}), half to learn from, half to try systems on",
    )
    add(
        "--max-new-tokens",
        type=positive_int,
        default=DEFAULT_NEW_TOKENS,
        metavar="N",
        help=f"of an answer (default: {DEFAULT_NEW_TOKENS})",
    )
    add(
        "--time-limit",
        type=time_limit,
        default=DEFAULT_TIME_LIMIT,
        metavar="TIME",
        help=f"seconds or minutes, 90s or 5m, for everything (default: {DEFAULT_TIME_LIMIT})",
    )
    add("--dtype", metavar="NAME", help="bfloat16, float16 or float32 (default: the checkpoint's)")
    add("--codec", default="auto", metavar="NAME", help="how experts are stored: none, planes, or auto: what is packed")
    add("--device", metavar="NAME", help="cpu or cuda:N (default: the accelerator, where there is one)")
    add("--predictor", default="auto", metavar="FILE", help="trained weights: a file, auto (default) or off")
    add("--seed", type=seed, default=0, metavar="N", help="of sampling, and of which half is learned from (default: 0)")
    add("--out", type=Path, metavar="FILE", help="write all that was measured, as --json prints it")
    add_json_flag(parser)


def time_limit(text: str) -> float:
    """Seconds of "300s", "300" or "5m"."""
    number, scale = (text[:-1], {"s": 1.0, "m": 60.0}[text[-1]]) if text[-1:] in ("s", "m") else (text, 1.0)
    try:
        value = float(number) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: must be from 1 second to a day, for instance 90s or 5m")
    return value


def run(args: argparse.Namespace) -> int:
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


def _prompts(args: argparse.Namespace) -> list[Prompt]:
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

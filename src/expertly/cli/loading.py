"""A model from the command line: the arguments of every command that runs one, and the model that they ask for."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from expertly.cli.arguments import positive_int
from expertly.cli.output import message, progress_bar
from expertly.scheduler.presets import AUTO_SYSTEM, SYSTEMS


def add_loading_arguments(parser: argparse.ArgumentParser, *, maps: str = "auto", why: str = "") -> None:
    """The model, the memory that its experts get and the system that serves them. `maps`: the default of --maps, and
    `why` it is that.
    """
    add = parser.add_argument
    shipped = [name for name, system in SYSTEMS.built_in.items() if "future" not in system.needs]
    add("model", nargs="?", metavar="MODEL", help="a folder, a packed store or a hub id (default: the demo model)")
    add("--memory", default="auto", metavar="SIZE", help='for experts: "25%%" of them, "1.5GiB" or "auto" (default)')
    add(
        "--system",
        metavar="NAME",
        help=f"{', '.join(shipped)} or what is installed, or one of them with other parts, name:key=value (see "
        "`expertly systems`); auto (default): what `expertly tune` chose for this model, else expertly, or lru where "
        "experts are tiny",
    )
    add("--segments", type=positive_int, metavar="P", help="parts an expert is cut into (default: the system's)")
    add("--dtype", metavar="NAME", help="bfloat16, float16 or float32 (default: the checkpoint's)")
    add("--codec", default="auto", metavar="NAME", help="how experts are stored: none, planes (compressed) or auto")
    add("--compressed", metavar="SHARE", help=argparse.SUPPRESS)  # gone, and refused
    add("--device", metavar="NAME", help="cpu or cuda:N (default: the accelerator, where there is one)")
    add("--devices", metavar="A,B", help="experts over several: cuda:0,cuda:1, or logical ones, cpu:0,cpu:1")
    add(
        "--maps",
        default=maps,
        metavar="FILE",
        help="expert maps, activation matrices or what was learned of reuse, which a system with them starts from and "
        f'adds to: a file, "auto" (beside the packed store) or "off" (default: {maps}{why and ", " + why})',
    )
    add(
        "--predictor",
        default="auto",
        metavar="FILE",
        help='weights that a system with a learned predictor takes: a file made by `expertly train-predictor`, "auto" '
        '(default: beside the packed store, or those of the demo model) or "off"',
    )
    add(
        "--plan",
        metavar="FILE",
        help="splits that a system with split caching begins with: `expertly configure` makes it",
    )
    add(
        "--matcher",
        default="auto",
        metavar="NAME",
        help="where a system predicts: thread (beside the forward pass), inline (within it, repeatable) or auto "
        "(default: inline where the system waits for its predictions, else thread)",
    )


def load_model(args: argparse.Namespace, **others: Any) -> tuple[Any, Any]:
    """The model and its tokenizer, None where it has none; `others` are more arguments of `expertly.load`. Says what
    system `auto` came to; where nobody asked and nothing has been tuned that is advice, for terminals.
    """
    from expertly import api
    from expertly.engine.saved_choice import choices_path

    with progress_bar() as progress:
        model, tokenizer = api.load(
            args.model,
            memory=args.memory,
            system=args.system or AUTO_SYSTEM,
            segments=args.segments,
            dtype=args.dtype,
            codec=args.codec,
            compressed=args.compressed,
            device=args.device,
            devices=args.devices,
            maps=args.maps,
            predictor=args.predictor,
            plan=args.plan,
            matcher=args.matcher,
            progress=progress,
            **others,
        )
    reason = api.stats(model).system_reason
    is_news = args.system is not None or choices_path(api.handle(model).store).exists()
    if reason is not None and (is_news or sys.stderr.isatty()):
        message(f"expertly: {reason}")
    return model, tokenizer

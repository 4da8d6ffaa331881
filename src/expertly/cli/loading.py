"""A model from the command line: the arguments of every command that runs one, and the model that they ask for."""

from __future__ import annotations

import argparse
from typing import Any

from expertly.cli.arguments import positive_int
from expertly.cli.output import progress_bar
from expertly.systems import DEFAULT_SYSTEM, runnable_systems


def add_loading_arguments(parser: argparse.ArgumentParser, *, maps: str = "auto", why: str = "") -> None:
    """The model, the memory that its experts get and the system that serves them. `maps`: the default of --maps, and
    `why` it is that.
    """
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, a packed store or a hub id (default: the demo model)")
    add("--memory", default="auto", metavar="SIZE", help='for experts: "25%%" of them, "1.5GiB" or "auto" (default)')
    add(
        "--system",
        default=DEFAULT_SYSTEM,
        metavar="NAME",
        help=f"{', '.join(runnable_systems())} (default: {DEFAULT_SYSTEM}), or one of them with other parts, "
        "name:key=value (see `expertly systems`)",
    )
    add("--segments", type=positive_int, default=1, metavar="P", help="parts an expert is cut into (default: 1)")
    add("--dtype", metavar="NAME", help="bfloat16, float16 or float32 (default: the checkpoint's)")
    add("--device", metavar="NAME", help="cpu or cuda:N (default: the accelerator, where there is one)")
    add(
        "--maps",
        default=maps,
        metavar="FILE",
        help='expert maps that a system with maps starts from and adds to: a file, "auto" (beside the packed store) or '
        f'"off" (default: {maps}{why and ", " + why})',
    )
    add(
        "--matcher",
        default="thread",
        metavar="NAME",
        help="where a system predicts: thread (default: beside the forward pass) or inline (within it, repeatable)",
    )


def load_model(args: argparse.Namespace, **others: Any) -> tuple[Any, Any]:
    """The model and its tokenizer, None where it has none; `others` are more arguments of `expertly.load`."""
    from expertly.engine import api

    with progress_bar() as progress:
        return api.load(
            args.model,
            memory=args.memory,
            system=args.system,
            segments=args.segments,
            dtype=args.dtype,
            device=args.device,
            maps=args.maps,
            matcher=args.matcher,
            progress=progress,
            **others,
        )

"""A model from the command line: the arguments of every command that runs one, and the model that they ask for."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from expertly.cli.arguments import positive_int
from expertly.cli.output import message, progress_bar
from expertly.options import command_line_options, systems_that_run
from expertly.scheduler.presets import AUTO_SYSTEM


def add_loading_arguments(parser: argparse.ArgumentParser, *, maps: str = "auto", why: str = "") -> None:
    """The model, the memory that its experts get and the system that serves them. `maps`: the default of --maps, and
    `why` it is that.
    """
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a packed store or a hub id (default: the demo model)"
    )
    for one in command_line_options():
        text, default = one.metadata["help"], one.default
        if one.name == "maps":
            default, text = maps, text + (f" (default: {maps}, {why})" if why else "")
        if one.name == "system":  # None: nobody asked, see `load_model`
            default, text = None, f"{', '.join(systems_that_run())}: {text}"
        parser.add_argument(
            f"--{one.name.replace('_', '-')}",
            type=positive_int if one.name == "segments" else str,
            default=default,
            metavar=one.metadata["metavar"],
            help=text.replace("%", "%%"),
        )
    parser.add_argument("--compressed", help=argparse.SUPPRESS)  # has gone, and is refused


def load_model(args: argparse.Namespace, **others: Any) -> tuple[Any, Any]:
    """The model and its tokenizer, None where it has none; `others` are more arguments of `expertly.load`. Says what
    system `auto` came to; where nobody asked and nothing has been tuned that is advice, for terminals.
    """
    from expertly import api
    from expertly.engine.choice import choices_path

    with progress_bar() as progress:
        asked = {one.name: getattr(args, one.name) for one in command_line_options()}
        asked |= {"system": args.system or AUTO_SYSTEM, "compressed": args.compressed, **others}
        model, tokenizer = api.load(args.model, progress=progress, **asked)
    reason = api.stats(model).system_reason
    is_news = args.system is not None or choices_path(api.handle(model).store).exists()
    if reason is not None and (is_news or sys.stderr.isatty()):
        message(f"expertly: {reason}")
    return model, tokenizer

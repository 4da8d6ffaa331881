"""How commands load a model."""

from __future__ import annotations

import sys
from typing import Any

from expertly.cli.output import message, progress_bar
from expertly.options import LOAD_OPTIONS, LoadOptions


def load_model(model: str | None, options: LoadOptions, **changed: Any) -> tuple[Any, Any]:
    """A model and its tokenizer (None where it has none); `changed` replaces options."""
    from expertly import api

    arguments = {name: getattr(options, name) for name in LOAD_OPTIONS} | changed
    with progress_bar() as progress:
        loaded, tokenizer = api.load(model, progress=progress, **arguments)
    say_system(loaded)
    if options.quantize is not None:
        message(f"expertly: experts are {api.handle(loaded).store.manifest.rounding}")
    return loaded, tokenizer


def say_system(loaded: Any) -> None:
    """Tell the user which system `auto` chose, in a terminal."""
    from expertly import api

    reason = api.stats(loaded).system_reason
    if reason is not None and sys.stderr.isatty():
        message(f"expertly: {reason}")

"""The model that a command's options ask for."""

from __future__ import annotations

import sys
from typing import Any

from expertly.cli.output import message, progress_bar
from expertly.options import LoadOptions, load_arguments


def load_model(model: str | None, options: LoadOptions, **others: Any) -> tuple[Any, Any]:
    """The model and its tokenizer, None where it has none; `others` replace options."""
    from expertly import api

    with progress_bar() as progress:
        loaded, tokenizer = api.load(model, progress=progress, **{**load_arguments(options), **others})
    say_system(loaded)
    return loaded, tokenizer


def say_system(loaded: Any) -> None:
    """What system `auto` came to for a model; where nothing has been tuned that is advice, for terminals."""
    from expertly import api
    from expertly.engine.choice import choices_path

    reason = api.stats(loaded).system_reason
    if reason is not None and (choices_path(api.handle(loaded).store).exists() or sys.stderr.isatty()):
        message(f"expertly: {reason}")

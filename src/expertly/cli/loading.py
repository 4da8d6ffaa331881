"""The model that a command's options ask for."""

from __future__ import annotations

import sys
from typing import Any

from expertly.cli.output import message, progress_bar
from expertly.options import LoadOptions, load_arguments

MODEL_HELP = "a folder, a packed store or a hub id (default: the demo model)"


def load_model(model: str | None, options: LoadOptions, **others: Any) -> tuple[Any, Any]:
    """The model and its tokenizer, None where it has none; `others` replace options. Says what system `auto` came to;
    where nothing has been tuned that is advice, for terminals.
    """
    from expertly import api
    from expertly.engine.choice import choices_path

    with progress_bar() as progress:
        loaded, tokenizer = api.load(model, progress=progress, **{**load_arguments(options), **others})
    reason = api.stats(loaded).system_reason
    if reason is not None and (choices_path(api.handle(loaded).store).exists() or sys.stderr.isatty()):
        message(f"expertly: {reason}")
    return loaded, tokenizer

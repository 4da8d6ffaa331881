"""What `generate`, `trace record` and `configure` ask of transformers' `generate`."""

from __future__ import annotations

import copy
from typing import Any


def generation_config(
    model: Any, max_new_tokens: int, temperature: float | None = 0.0, top_p: float | None = 1.0
) -> Any:
    """The model's own, one sequence, greedy unless there is a temperature. With None for both, tokens are chosen as the
    model's own says; with one of them, by that and all of the vocabulary.
    """
    config = copy.deepcopy(model.generation_config)
    config.max_length, config.max_new_tokens = None, max_new_tokens
    config.num_beams, config.num_return_sequences = 1, 1
    if temperature is not None or top_p is not None:
        temperature = 1.0 if temperature is None else temperature
        config.do_sample = temperature > 0
        config.temperature = temperature if config.do_sample else None
        config.top_p = (1.0 if top_p is None else top_p) if config.do_sample else None
        config.top_k = 0 if config.do_sample else None
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = end[0] if isinstance(end, list) else end
    return config

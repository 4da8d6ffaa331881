"""What `generate`, `trace record` and `configure` ask of transformers' `generate`."""

from __future__ import annotations

import copy
from typing import Any


def generation_config(model: Any, max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0) -> Any:
    """The model's own, one sequence, greedy unless there is a temperature."""
    config = copy.deepcopy(model.generation_config)
    config.max_length, config.max_new_tokens = None, max_new_tokens
    config.num_beams, config.num_return_sequences = 1, 1
    config.do_sample = temperature > 0
    config.temperature = temperature if config.do_sample else None
    config.top_p = top_p if config.do_sample else None
    config.top_k = 0 if config.do_sample else None
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = end[0] if isinstance(end, list) else end
    return config

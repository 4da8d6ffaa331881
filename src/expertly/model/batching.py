"""Continuous batching with a bounded cache: upstream's default takes most of the machine's memory."""

from __future__ import annotations

import copy
from typing import Any

from transformers import ContinuousBatchingConfig

from expertly.core.errors import ModelUseError

PAGE_TOKENS = 32
"""Tokens of one cache page where the caller leaves it open."""

MAX_BATCH_TOKENS = 512
"""Tokens of one forward pass where the caller leaves it open; longer prompts are cut by upstream's scheduler."""

_MAX_CONCURRENT = 16
_UNKNOWN_LENGTH = 4096


def bounded_config(config: Any, hints: Any) -> Any:
    """`config` with what bounds the cache filled in, and CUDA graphs and what needs them switched off.

    Room is made for at most 16 of the requests in `hints` (upstream's WorkloadHints or None) at a time, in full length.
    """
    page_field = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    settings: Any = {page_field: PAGE_TOKENS}
    config = ContinuousBatchingConfig(**settings) if config is None else copy.copy(config)
    config.use_cuda_graph = False
    config.use_async_batching = False
    if config.max_batch_tokens is None:
        config.max_batch_tokens = MAX_BATCH_TOKENS
    if config.num_blocks is None:
        length = getattr(hints, "max_prompt_length", 0) + getattr(hints, "max_generated_length", 0)
        num_requests = min(getattr(hints, "num_requests", 0) or _MAX_CONCURRENT, _MAX_CONCURRENT)
        pages = -(-(length or _UNKNOWN_LENGTH) // getattr(config, page_field)) + 1
        config.num_blocks = pages * num_requests
    return config


def refuse_compiled(generation_config: Any, config: Any) -> None:
    """Raise ModelUseError where CUDA graphs or compilation are asked for by name."""
    graphs = getattr(config, "use_cuda_graph", None)
    if any(graphs) if isinstance(graphs, tuple) else graphs:
        raise ModelUseError(f"use_cuda_graph={graphs}: experts that come and go cannot be captured; accepted: False")
    compiled = [getattr(config, name, None) for name in ("varlen_compile_config", "decode_compile_config")]
    compiled.append(getattr(generation_config, "compile_config", None))
    level = getattr(config, "default_compile_level", None)
    if level or any(one is not None for one in compiled):
        raise ModelUseError("compile_config: experts that come and go cannot be traced; accepted: None")

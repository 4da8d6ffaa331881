"""A server's part of dividing the memory (engine/memory.py): how large its KV cache may be, and what it got."""

from __future__ import annotations

from expertly.api import Handle
from expertly.core.errors import ConfigError
from expertly.engine.memory import DEFAULT_CONTEXT, SharedCache
from expertly.serve.scheduler import Room
from expertly.serve.settings import ServeOptions
from expertly.store.packed import PackedStore

PAGE_TOKENS = 32
"""Tokens of one page of the KV cache."""

MAX_BATCH_TOKENS = 256
"""Tokens of one forward pass; a longer prompt is read in parts, between which other texts go on."""

MAX_DEFAULT_CACHE = 32768
"""The default limit of the KV cache in tokens: attention on a CPU reads the caches of all running texts."""

HOST_NBYTES = 96 << 20
"""Of a server on a host: processes for templates and grammars, 12 MiB each and what they take for one request; bodies
that are read; libraries that are imported when the first request needs them, 30 MiB more than BESIDE_NBYTES counts
(bench/bodies.py).
"""

_PADDING_PAGES = 2
"""Additional pages that padding is written to."""


def cache_for(options: ServeOptions, store: PackedStore) -> SharedCache:
    """A KV cache between one text of full length and as many texts as may run. Raises ConfigError naming the option."""
    if options.max_running > MAX_BATCH_TOKENS:
        raise ConfigError(f"max_running={options.max_running}: accepted: at most {MAX_BATCH_TOKENS}")
    context = _context(options, store)
    one = -(-context // PAGE_TOKENS) + 1  # pages of layers may not align
    if options.kv_tokens is None:
        least, most = one, max(one, min(options.max_running * one, MAX_DEFAULT_CACHE // PAGE_TOKENS))
    else:
        least = most = -(-options.kv_tokens // PAGE_TOKENS)
        if least < one:
            raise ConfigError(
                f"kv_tokens={options.kv_tokens}: accepted: {one * PAGE_TOKENS} or more, for one text of {context}"
            )
    text = store.config.get("text_config", store.config)
    num_masks = 2 if "sliding_attention" in (text.get("layer_types") or ()) else 1
    least, most = ((pages + _PADDING_PAGES) * PAGE_TOKENS for pages in (least, most))
    return SharedCache(least, most, MAX_BATCH_TOKENS, num_masks, HOST_NBYTES)


def room_for(options: ServeOptions, loaded: Handle) -> Room:
    """What may run at a time in the KV cache that the server got."""
    pages = loaded.division.context // PAGE_TOKENS - _PADDING_PAGES
    return Room(_context(options, loaded.store), PAGE_TOKENS, pages, options.max_running, options.max_queue)


def memory_of(loaded: Handle, room: Room) -> dict[str, int]:
    """Bytes by use, as they were divided. `working`: what activations and libraries need."""
    beside = loaded.division.beside
    return {
        "dense_bytes": beside.dense_nbytes,
        "kv_cache_bytes": (room.num_pages + _PADDING_PAGES) * PAGE_TOKENS * beside.cache_nbytes,
        "working_bytes": beside.fixed_nbytes,
        "experts_bytes": sum(one["memory_bytes"] for one in loaded.stats.as_dict()["devices"] if one["worker"] is None),
    }


def _context(options: ServeOptions, store: PackedStore) -> int:
    """The longest text in tokens."""
    most = store.positions
    context = options.context
    if context is None:
        return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    assert isinstance(context, int)
    if most is not None and context > most:
        raise ConfigError(f"context={context}: accepted: at most the model's {most}")
    return context

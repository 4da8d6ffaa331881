"""A server's part of dividing the memory (engine/memory.py): how large its KV cache may be, and what it got."""

from __future__ import annotations

import shutil
from typing import Any

from expertly.api import Handle
from expertly.core.errors import ConfigError
from expertly.core.files import json_bytes
from expertly.core.resources import parse_size
from expertly.engine.memory import DEFAULT_CONTEXT, SharedCache
from expertly.engine.worker import store_facts
from expertly.model.pages import kind_of_pages
from expertly.serve.scheduler import Room
from expertly.serve.settings import ServeOptions
from expertly.store.cache import pages_beside
from expertly.store.packed import PackedStore
from expertly.store.pages import WAITING_NBYTES, KeptPages

PAGE_TOKENS = 32  # tokens of one page of the KV cache
MAX_BATCH_TOKENS = 256  # tokens of one forward pass; a longer prompt is read in parts, between which other texts go on

MAX_DEFAULT_CACHE = 32768
"""The default limit of the KV cache in tokens: attention on a CPU reads the caches of all running texts."""

# Of a server on a host: processes for templates and grammars, 12 MiB each and what they take for one request; bodies
# that are read; libraries that are imported when the first request needs them, 30 MiB more than BESIDE_NBYTES counts.
HOST_NBYTES = 96 << 20

_PADDING_PAGES = 2  # additional pages that padding is written to


def cache_for(options: ServeOptions, store: PackedStore) -> SharedCache:
    """A KV cache between one text of full length and as many texts as may run. Raises ConfigError naming the option."""
    if options.max_running > MAX_BATCH_TOKENS:
        raise ConfigError(f"max_running={options.max_running}: accepted: at most {MAX_BATCH_TOKENS}")
    context = _context(options, store)
    text = store.config.get("text_config", store.config)
    least = -(-context // PAGE_TOKENS)
    most = max(least, min(options.max_running * least, MAX_DEFAULT_CACHE // PAGE_TOKENS))
    if options.kv_tokens is not None:
        if -(-options.kv_tokens // PAGE_TOKENS) < least:
            sentence = f"kv_tokens={options.kv_tokens}: accepted: {least * PAGE_TOKENS} or more"
            raise ConfigError(f"{sentence}, for one text of {context}")
        least = most = -(-options.kv_tokens // PAGE_TOKENS)
    num_masks = 2 if "sliding_attention" in (text.get("layer_types") or ()) else 1
    least, most = ((pages + _PADDING_PAGES) * PAGE_TOKENS for pages in (least, most))
    host_nbytes = HOST_NBYTES + (WAITING_NBYTES if options.kv_disk else 0)
    return SharedCache(least, most, MAX_BATCH_TOKENS, num_masks, host_nbytes)


def room_for(options: ServeOptions, loaded: Handle) -> Room:
    """What may run at a time in the KV cache that the server got."""
    pages = loaded.division.context // PAGE_TOKENS - _PADDING_PAGES
    return Room(_context(options, loaded.store), pages, options.max_running, options.max_queue)


def kept_pages(options: ServeOptions, model: Any, store: PackedStore, reason: str | None) -> KeptPages | None:
    """The pages on disk, if asked for. `reason`: why requests cannot share forward passes. Raises ConfigError."""
    if options.kv_disk is None:
        return None
    kind = kind_of_pages(model)
    if reason is not None or kind is None:
        reason = reason or "layers of this model see only the last tokens"
        raise ConfigError(f"kv_disk={options.kv_disk!r}: {reason}; accepted: no kv_disk")
    folder = pages_beside(store.folder)
    most = parse_size(options.kv_disk, shutil.disk_usage(store.folder).free, "kv_disk", "what is free there")
    of_model = {**store_facts(store.manifest), "kind": kind, "page": PAGE_TOKENS}
    return KeptPages(folder, most, json_bytes(of_model))


def memory_of(loaded: Handle, room: Room) -> dict[str, int]:
    """Bytes by use, as they were divided. `working`: what activations and libraries need."""
    beside = loaded.division.beside
    return {
        "dense_bytes": beside.dense_nbytes,
        "kv_cache_bytes": (room.num_pages + _PADDING_PAGES) * PAGE_TOKENS * beside.cache_nbytes,
        "working_bytes": beside.fixed_nbytes,
        "experts_bytes": loaded.stats.as_dict()["devices"][0]["memory_bytes"],  # the others are workers
    }


def _context(options: ServeOptions, store: PackedStore) -> int:
    """The longest text in tokens."""
    context, positions = options.context, store.positions
    if context is None:
        return min(DEFAULT_CONTEXT, positions or DEFAULT_CONTEXT)
    if positions is not None and context > positions:
        raise ConfigError(f"context={context}: accepted: at most the model's {positions}")
    return context

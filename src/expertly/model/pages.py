"""The paged cache of transformers' continuous batching, with pages that hold a token's keys and values of all layers.

Transformers keeps of layers with a sliding window only the last tokens, so that no prompt finds what it shares with an
earlier one. Here they keep all, and read the last.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type

from expertly.core.errors import ConfigError
from expertly.model.hooks import Altered
from expertly.model.kv_codes import ACCEPTED, KeyFactors, coded, digest_of
from expertly.native.kernels import STEP_NBYTES

_FULL, _SLIDING = "full_attention", "sliding_attention"


def use_pages(model: Any, manager: Any) -> None:
    """Have a manager of continuous batching make such a cache, in 8 bits where the model says so. Raises ConfigError
    where a transformers cannot.
    """
    factors: KeyFactors | None = getattr(model, "_expertly_kv_codes", None)
    if hasattr(paged_cache, "FullAttentionCacheAllocator"):  # not in transformers 5.17
        make = type(manager)._create_batch_processor
        names = {**make.__globals__, "PagedAttentionCache": partial(_pages, factors)}
        manager._create_batch_processor = MethodType(FunctionType(make.__code__, names), manager)
    elif factors is not None:
        raise ConfigError(f"kv='8bit': transformers {transformers.__version__} has other pages; {ACCEPTED}")


def _pages(factors: KeyFactors | None, *, config: Any, dtype: torch.dtype, **more: Any) -> PagedAttentionCache:
    from transformers.generation.continuous_batching.utils import find_head_dim

    kinds: Any = group_layers_by_attn_type(config)
    sliding = kinds[_SLIDING] if len(kinds) > 1 else ()
    as_one = {"layer_types": None, "sliding_window": None} if sliding else {}
    wider = {} if factors is None else {"head_dim": find_head_dim(config) + STEP_NBYTES}  # heads with room for a step
    of_pages: Any = Altered(config, **as_one, **wider)
    cache: Any = PagedAttentionCache(config=of_pages, dtype=dtype if factors is None else torch.uint8, **more)
    cache.config, cache.dtype = config, dtype
    (allocator,) = cache.cache_allocators.values()
    kind = type(allocator)
    if factors is not None:  # tokens are [n, heads, D]
        update = coded(kind.update, lambda self, layer, *indices: self._expertly_factors[layer])
        kind = allocator.__class__ = type(kind.__name__, (kind,), {"update": update})
        allocator._expertly_factors = factors.of_layers
    if sliding:
        cache.pool.blocks_per_sector.append(1)  # the pool has an entry for each allocator; this one takes no pages
        cache.pool.reset()
        window: Any = object.__new__(type(kind.__name__, (_Window, kind), {}))
        vars(window).update(vars(allocator), index=1, sliding_window=config.sliding_window)
        cache.cache_allocators[_SLIDING] = window
        cache.layer_to_allocator.update(dict.fromkeys(sliding, window))
    return cache


class _Window:
    """What layers with a sliding window read of another allocator's pages, which are all that there are."""

    layer_type = _SLIDING
    supports_block_table = False
    index: int
    sliding_window: int

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return query_length + min(past_length, self.sliding_window - 1)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        rows: Any = super().get_read_indices(request_id, past_length, query_length)  # type: ignore[misc]
        return rows[-self.get_seqlen_k(past_length, query_length) :]  # type: ignore[no-any-return]

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return 0

    def _others(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the allocator whose pages these are does it."""

    allocate_cache_to_request = acquire_prefix_blocks = mark_complete_blocks = _others
    free_blocks = free_all_requests = _others


def kind_of_pages(model: Any) -> str | None:
    """What the layout of a page depends on beside the model; None where pages are not those of the tokens before them
    alone, or not all alike.
    """
    groups: Any = group_layers_by_attn_type(model.config.get_text_config())
    are_alike = isinstance(groups, dict) and _FULL in groups
    return f"transformers {transformers.__version__} {digest_of(model)}" if are_alike else None

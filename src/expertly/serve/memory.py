"""How a server's memory is divided: dense weights, KV cache, experts. Cache and experts share what is stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from expertly.core.errors import BudgetError
from expertly.core.units import format_nbytes
from expertly.engine.memory import WORKING_NBYTES, kv_cache_nbytes

PAGE_TOKENS = 32
"""Tokens of one page of the KV cache."""

MAX_BATCH_TOKENS = 256
"""Tokens of one forward pass; a longer prompt is read in parts, between which others write."""

_CACHE_SHARE = 0.25
"""Of what the dense weights leave, at most so much is KV cache, where experts could use it."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Bytes by use. `working` is what Python, torch, masks and activations take. `total` None: nothing was stated."""

    dense: int
    cache: int
    working: int
    experts: int
    num_pages: int
    total: int | None = None

    def sentence(self) -> str:
        stated = "" if self.total is None else f"total memory {format_nbytes(self.total)}: "
        tokens = self.num_pages * PAGE_TOKENS
        return (
            f"{stated}dense weights {format_nbytes(self.dense)}, KV cache {format_nbytes(self.cache)} "
            f"({tokens} tokens), experts {format_nbytes(self.experts)}, working memory {format_nbytes(self.working)}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "dense_bytes": self.dense,
            "kv_cache_bytes": self.cache,
            "experts_bytes": self.experts,
            "working_bytes": self.working,
            "total_bytes": self.total,
        }


@dataclass(frozen=True, slots=True)
class Shape:
    """What the division depends on: of the model its bytes, of the server how much it may serve at a time."""

    config: dict[str, Any]
    itemsize: int
    dense: int
    all_experts: int
    context: int
    max_running: int

    def pages_wanted(self) -> int:
        """For every request that may run, in full length."""
        return self.max_running * self.pages_of_one()

    def pages_of_one(self) -> int:
        return -(-self.context // PAGE_TOKENS) + 1

    def cache_nbytes(self, num_pages: int) -> int:
        """Two pages more than are used: those that padding is written to."""
        return kv_cache_nbytes(self.config, (num_pages + 2) * PAGE_TOKENS, self.itemsize)

    def mask_nbytes(self, num_pages: int) -> int:
        """What attention without a kernel of its own is told of who sees what, [tokens of a pass, of the cache]."""
        kinds = 2 if "sliding_attention" in (self.config.get("layer_types") or ()) else 1
        return kinds * MAX_BATCH_TOKENS * (num_pages * PAGE_TOKENS + MAX_BATCH_TOKENS) * self.itemsize

    def working(self, num_pages: int) -> int:
        return WORKING_NBYTES + self.mask_nbytes(num_pages)


def split_total(total: int, shape: Shape, stated_pages: int | None = None) -> MemorySplit:
    """Divide `total` bytes: first one context of cache, then a quarter of what is left for the cache as far as it is
    wanted, the rest for experts; where all experts fit, the cache gets what they leave. Or `stated_pages` of cache.

    Raises BudgetError naming what the least would need, experts aside.
    """
    left = total - shape.dense
    few = stated_pages or shape.pages_of_one()
    least = shape.cache_nbytes(few) + shape.working(few)
    if left <= least:
        raise BudgetError(
            f"--total-memory {total}: {shape.dense} bytes are dense weights, {least} working memory and the KV cache "
            f"of {few * PAGE_TOKENS} tokens; the least is above {shape.dense + least} bytes"
        )
    page = (shape.cache_nbytes(1000) + shape.mask_nbytes(1000) - shape.cache_nbytes(0) - shape.mask_nbytes(0)) // 1000
    spare = left - shape.cache_nbytes(0) - shape.working(0)
    share = max(int(spare * _CACHE_SHARE), spare - shape.all_experts)
    pages = stated_pages or max(shape.pages_of_one(), min(shape.pages_wanted(), share // max(1, page)))
    cache, working = shape.cache_nbytes(pages), shape.working(pages)
    return MemorySplit(
        shape.dense, cache, working, max(0, min(shape.all_experts, left - cache - working)), pages, total
    )

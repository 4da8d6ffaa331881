"""Divides memory: how much experts get, and the slots that makes.

The option `memory` is for experts alone, `total_memory` for everything. Where neither states an amount for experts,
they get what the dense part, the KV cache and activations of `context` tokens, and on a host the process itself, leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.resources import parse_memory
from expertly.core.units import format_nbytes, format_share
from expertly.engine.compute import expert_nbytes_at_once
from expertly.engine.device import kind_of
from expertly.engine.process import rss_nbytes
from expertly.model.needs import kv_cache_nbytes, pass_nbytes
from expertly.native.kernels import choose_kernels
from expertly.scheduler.budget import Budget, least_nbytes, split_budget
from expertly.scheduler.systems import System
from expertly.store.packed import PackedStore

WORKING_NBYTES = 600 << 20
"""On an accelerator: memory of Python, torch and activations beside weights and KV cache, for any model."""

BESIDE_NBYTES = 48 << 20
"""On a host: memory that a process with torch and transformers imported takes later, beside weights, KV cache,
activations and the expert being computed. 6 to 15 MiB were measured; with 28 a model with wide experts was killed
(docs/log/). Code of libraries is not in it: it is resident already, or can be read again.
"""

DEFAULT_CONTEXT = 4096
"""The option `context`, where it is not given."""

CACHE_SHARE = 4
"""A server's KV cache takes at most a quarter of the memory that experts could have, or what they do not need."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """The options about memory; see `expertly.load`. `cache`: a server's KV cache, instead of `context`."""

    memory: str | int | None = None
    context: int | None = None
    total: str | int | None = None
    cache: SharedCache | None = None
    rows_nbytes: int = 0  # of tables, in host memory
    is_coded: bool = False  # the KV cache has 8 bits

    @property
    def is_stated(self) -> bool:
        """Whether the user states the experts' amount; else they get what is left."""
        return self.total is None and self.memory not in (None, "auto")


@dataclass(frozen=True, slots=True)
class BesideExperts:
    """Memory beside experts, on the device of the dense part."""

    dense_nbytes: int
    fixed_nbytes: int  # of any forward pass
    cache_nbytes: int  # KV cache of a token
    pass_nbytes: int = 0  # activations of each token that a forward pass reads

    def of_tokens(self, num_cached: int, num_read: int) -> int:
        """KV cache and activations of a pass that reads `num_read` tokens with `num_cached` in the KV cache."""
        return (num_cached + num_read) * self.cache_nbytes + num_read * self.pass_nbytes

    def sentence(self, context: int) -> str:
        """For people: what a prompt of `context` tokens needs."""
        working = self.fixed_nbytes + context * self.pass_nbytes
        return (
            f"dense weights take {format_nbytes(self.dense_nbytes)}, the KV cache of {context} tokens "
            f"{format_nbytes(context * self.cache_nbytes)}, working memory {format_nbytes(working)}"
        )


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The KV cache that a server's requests share, `least` to `most` tokens. A forward pass reads at most `num_read`
    tokens and has `num_masks` attention masks, [num_read, cached tokens] each. `host_nbytes`: what the server itself
    takes of host memory, whatever runs.
    """

    least: int
    most: int
    num_read: int
    num_masks: int = 1
    host_nbytes: int = 0

    def beside(self, alone: BesideExperts, itemsize: int, *, runs_on_host: bool) -> BesideExperts:
        """A server's needs: activations of the longest pass, and for each cached token its column of the masks, too."""
        mask_nbytes = self.num_masks * self.num_read * itemsize
        fixed = alone.fixed_nbytes + self.num_read * (alone.pass_nbytes + mask_nbytes)
        if runs_on_host:
            fixed += self.host_nbytes
        return BesideExperts(alone.dense_nbytes, fixed, alone.cache_nbytes + mask_nbytes)

    def tokens_in(self, nbytes: int, beside: BesideExperts) -> int:
        """The tokens that fit into `nbytes`, from `least` to `most`."""
        return max(self.least, min(self.most, nbytes // max(1, beside.cache_nbytes)))


@dataclass(frozen=True, slots=True)
class RoomBeside:
    """Memory that experts leave for KV cache and activations."""

    nbytes: int
    beside: BesideExperts

    def check(self, num_cached: int, num_read: int) -> None:
        """Raises BudgetError where a pass that reads `num_read` tokens with `num_cached` in the cache does not fit."""
        needed = self.beside.of_tokens(num_cached, num_read)
        if needed > self.nbytes:
            raise BudgetError(
                f"{num_read} tokens behind {num_cached}: KV cache and activations take {format_nbytes(needed)}, and "
                f"{format_nbytes(max(0, self.nbytes))} are left beside the experts; load the model with "
                f"context={num_cached + num_read} (fewer experts), or write less"
            )


@dataclass(frozen=True, slots=True)
class Division:
    """The slots and the reason for their number; memory beside experts, for `context` tokens. `room` is None where the
    experts' amount was stated and the rest not counted.
    """

    budget: Budget
    reason: str
    beside: BesideExperts
    context: int
    room: RoomBeside | None = None


def divide(
    store: PackedStore, geometry: Geometry, system: System, request: MemoryRequest, target: torch.device
) -> Division:
    """Divide memory between a device's experts and the rest. System `resident` takes all experts and accepts no less.
    Raises ConfigError (BudgetError) naming the option that cannot be met.
    """
    if request.context is not None and request.context < 1:
        raise ConfigError(f"context={request.context}: must be at least 1 token")
    itemsize = geometry.layers[0].itemsize
    beside = beside_experts(store, itemsize, target, is_coded=request.is_coded)
    context = request.context or DEFAULT_CONTEXT
    if kind_of(target).runs_on_host:
        beside = replace(beside, fixed_nbytes=beside.fixed_nbytes + request.rows_nbytes)
    if request.cache is not None:
        beside = request.cache.beside(beside, itemsize, runs_on_host=kind_of(target).runs_on_host)
    if system.keeps_everything or request.is_stated:
        return _divide_stated(geometry, system, request, target, beside, context)
    total, available, words = _available(target, request.total)
    left = available - beside.dense_nbytes - beside.fixed_nbytes
    if request.cache is not None:
        context = request.cache.tokens_in(max(left // CACHE_SHARE, left - geometry.nbytes), beside)
    amount = max(0, min(left - beside.of_tokens(0, context), geometry.nbytes))
    part = amount / geometry.nbytes
    share = "all experts fit" if part == 1 else f"{format_share(part)} of the experts"
    name = "memory auto" if request.total is None else f"total memory {request.total}"
    reason = f"{name}: {format_nbytes(amount)} ({share}): {words}; {beside.sentence(context)}"
    try:
        return Division(split_budget(geometry, amount), reason, beside, context, RoomBeside(left - amount, beside))
    except BudgetError as error:
        least = least_nbytes(geometry)
        if total is None or amount >= least:
            raise BudgetError(f"{error}; {reason}") from None
        enough = total + least + beside.of_tokens(0, context) - left
        raise BudgetError(
            f"total_memory={request.total!r}: the least that works is about {-(-enough // 2**20)}MiB; {reason}"
        ) from None


def _divide_stated(
    geometry: Geometry,
    system: System,
    request: MemoryRequest,
    target: torch.device,
    beside: BesideExperts,
    context: int,
) -> Division:
    """The division where the user states the experts' amount, or the system keeps all. Memory must hold that and the
    rest: checked against `total_memory`, for a stated context on a host, and for a server on any device.
    """
    amount, reason, room = geometry.nbytes, f"memory {request.memory}", None
    if request.is_stated:
        assert request.memory is not None
        amount = parse_memory(request.memory, geometry.nbytes) or geometry.nbytes
    if system.keeps_everything:
        if amount < geometry.nbytes:
            raise ConfigError(
                f"memory={request.memory!r}: system {system.name!r} keeps all experts and needs {geometry.nbytes} "
                "bytes (100%)"
            )
        amount, reason = geometry.nbytes, f"system {system.name}: all experts"
    is_context_stated = request.context is not None and kind_of(target).runs_on_host
    if request.total is not None or request.cache is not None or is_context_stated:
        _, available, words = _available(target, request.total)
        kept = min(amount, geometry.nbytes)
        room = RoomBeside(available - beside.dense_nbytes - beside.fixed_nbytes - kept, beside)
        if request.cache is not None:
            context = request.cache.tokens_in(room.nbytes, beside)
        if beside.of_tokens(0, context) > room.nbytes:
            raise BudgetError(
                f"{reason}: takes {format_nbytes(kept)}, but {words}; {beside.sentence(context)}; accepted: less "
                "memory, or a smaller context"
            )
        if request.total is not None or request.cache is not None:
            reason = f"{reason}: {format_nbytes(kept)}; {words}; {beside.sentence(context)}"
    return Division(split_budget(geometry, amount), reason, beside, context, room)


# -- what there is, and what a model takes of it -----------------------------------------------------------------------


def _available(target: torch.device, total: str | int | None) -> tuple[int | None, int, str]:
    """The bytes that `total` states, or None; the bytes for weights, KV cache and activations; and a sentence on these.
    They are the stated bytes without those that this process takes of them, or else the free memory.
    """
    kind = kind_of(target)
    free = kind.available_nbytes(target)
    stated = None if total is None else parse_memory(total, free, "total_memory")
    if stated is None:
        return None, free, f"{format_nbytes(free)} are free"
    if not kind.runs_on_host:
        return stated, stated, f"of {format_nbytes(stated)}"
    taken = rss_nbytes()
    return stated, stated - taken, f"of {format_nbytes(stated)} this process takes {format_nbytes(taken)}"


def beside_experts(store: PackedStore, itemsize: int, target: torch.device, *, is_coded: bool = False) -> BesideExperts:
    """What a packed model needs beside experts on a device."""
    dense, runs_on_host = store.dense_nbytes, kind_of(target).runs_on_host
    if store.manifest.dense_formats and choose_kernels(runs_on_host=runs_on_host).library is None:
        dense = sum(store.dense_by_format(is_decoded=True).values())
    how = {"runs_on_host": runs_on_host, "is_coded": is_coded}
    return beside_layers(store.manifest.layers, store.config, dense, itemsize, **how)


def beside_layers(
    layers: Sequence[LayerGeometry],
    config: dict[str, Any],
    dense_nbytes: int,
    itemsize: int,
    *,
    runs_on_host: bool,
    is_coded: bool = False,
) -> BesideExperts:
    """What a model with these layers of experts needs beside them."""
    cache = kv_cache_nbytes(config, 1, itemsize, is_coded=is_coded)
    if not runs_on_host:
        return BesideExperts(dense_nbytes, WORKING_NBYTES, cache)
    fixed = BESIDE_NBYTES + max(map(expert_nbytes_at_once, layers), default=0)
    return BesideExperts(dense_nbytes, fixed, cache, pass_nbytes(config, itemsize))

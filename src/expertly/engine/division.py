"""How the memory that a user states is divided: over devices, and into slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.engine.device import kind_of
from expertly.engine.group import choose_amounts, shares_of, split_over
from expertly.engine.memory import WORKING_NBYTES, kv_cache_nbytes, working_nbytes
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore

DEFAULT_CONTEXT = 4096
"""Tokens of KV cache that `memory="auto"` leaves room for."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a user says of memory; see `expertly.load`."""

    memory: str | int | None = None
    ring: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Division:
    """The slots of each device, and why so many."""

    budgets: list[Budget]
    reason: str


def divide(
    store: PackedStore,
    geometries: Sequence[Geometry],
    system: System,
    request: Request,
    targets: Sequence[torch.device],
) -> Division:
    """Of each device's share of the experts. `resident` takes everything and accepts no less.

    Raises ConfigError (BudgetError) naming the setting that cannot be.
    """
    amounts, reason = _amounts(store, geometries, system, request, targets)
    if system.keeps_everything:
        return Division([split_budget(one, one.nbytes) for one in geometries], reason)
    try:
        return Division(split_over(geometries, amounts, request.ring), reason)
    except BudgetError as error:
        why = f"; {reason}" if request.memory in (None, "auto") else ""
        raise BudgetError(f"{error}{why}") from None


def _amounts(
    store: PackedStore,
    geometries: Sequence[Geometry],
    system: System,
    request: Request,
    targets: Sequence[torch.device],
) -> tuple[list[int], str]:
    """What each device gives to experts, and why so much."""
    memory, context = request.memory, request.context
    total_nbytes = sum(one.nbytes for one in geometries)
    if context is not None and context < 1:
        raise ConfigError(f"context={context}: must be at least 1 token")
    if context is not None and (system.keeps_everything or memory not in (None, "auto")):
        raise ConfigError(f"context={context}: only memory='auto' leaves room for it, not memory={memory!r}")
    if system.keeps_everything:
        nbytes = parse_memory("100%" if memory in (None, "auto") else memory, total_nbytes)
        if nbytes is not None and nbytes < total_nbytes:
            raise ConfigError(
                f"memory={memory!r}: system {system.name!r} keeps all experts and needs {total_nbytes} bytes (100%)"
            )
        return [one.nbytes for one in geometries], f"system {system.name}: all experts"
    nbytes = parse_memory("auto" if memory is None else memory, total_nbytes)
    if nbytes is None:
        tokens = context or DEFAULT_CONTEXT
        itemsize = geometries[0].layers[0].itemsize
        cache = kv_cache_nbytes(store.config, tokens, itemsize)
        is_host = kind_of(targets[0]).runs_on_host
        working = working_nbytes(store.config, tokens, itemsize) if is_host else WORKING_NBYTES
        return choose_amounts(targets, geometries, store.dense_nbytes, cache, tokens, working)
    over = f" over {len(targets)} devices" if len(targets) > 1 else ""
    return shares_of(nbytes, geometries), f"memory {memory}{over}"

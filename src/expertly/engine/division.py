"""How the memory that a user states is divided: over devices, into slots, and into experts that stay compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from expertly.core.amounts import parse_memory, parse_share
from expertly.core.codecs import DEVICE, DecodingRates, choose_decoding, too_small
from expertly.core.errors import BudgetError, ConfigError, TransferError
from expertly.core.geometry import Geometry
from expertly.engine.device_loading import choose_amounts, shares_of, split_over
from expertly.engine.memory import WORKING_NBYTES, available_host_nbytes, kv_cache_nbytes, working_nbytes
from expertly.engine.nvcomp_decoder import why_not
from expertly.hardware.measure_codec import best_costs, decoding_rates
from expertly.scheduler.budget import Budget, least_nbytes, split_budget
from expertly.scheduler.compressed_share import ShareChoice, choose_share
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
    host_memory: str | int = "auto"
    compressed: str | float = "auto"


@dataclass(frozen=True, slots=True)
class Division:
    """The slots of each device, and the bytes in which experts stay compressed: on a CPU a part of the memory, behind
    an accelerator a part of the host memory, or all of it, and `host_memory` 0: then the device decodes.
    """

    budgets: list[Budget]
    compressed_nbytes: list[int]
    host_memory: str | int  # what is left of it, where it is divided
    reason: str
    compressed: ShareChoice


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
    is_hosted, is_for_device = targets[0].type == "cuda", request.compressed == DEVICE
    share = 1.0 if is_for_device else parse_share(request.compressed)
    total_nbytes = sum(one.nbytes for one in geometries)
    if share and store.codec == "none":
        raise ConfigError(
            f"compressed={request.compressed!r}: the packed store is in codec none, so its experts cannot stay "
            "compressed; accepted: auto and 0, or codec='planes'"
        )
    if share and system.keeps_everything:
        raise ConfigError(f"compressed={request.compressed!r}: system {system.name!r} keeps all experts; accepted: 0")
    if is_for_device:
        _check_device(store, targets[0])
    amounts, reason = _amounts(store, geometries, system, request, targets)
    if system.keeps_everything:
        none = ShareChoice(0.0, f"system {system.name} keeps all experts", 0.0)
        budgets = [split_budget(one, one.nbytes) for one in geometries]
        return Division(budgets, [0] * len(geometries), request.host_memory, reason, none)
    ring, host_memory = request.ring, request.host_memory
    divided = amounts
    if is_hosted:
        divided, ring = shares_of(_host_nbytes(host_memory, total_nbytes), geometries), None
    streamed_nbytes = sum(least_nbytes(one, ring) for one in geometries) if ring is None or ring > 0 else 0
    device_why = None
    if is_hosted and share is None and store.codec != "none":
        is_for_device, device_why = _choose_device(store, targets[0], sum(divided) >= total_nbytes)
    if is_for_device:
        chosen = ShareChoice(1.0, device_why or "it was asked for that the device decodes", 0.0)
    else:
        chosen = _choose(share, store, geometries, divided, streamed_nbytes)
        if device_why is not None:
            chosen = replace(chosen, why=f"{chosen.why}; {device_why}")
    compressed = [int(amount * chosen.share) for amount in divided]
    if is_hosted and any(compressed):
        host_memory = sum(divided) - sum(compressed)
    elif not is_hosted:
        amounts = [amount - part for amount, part in zip(amounts, compressed, strict=True)]
    try:
        budgets = split_over(geometries, amounts, request.ring)
    except BudgetError as error:
        why = f"; {reason}" if request.memory in (None, "auto") else ""
        beside = "" if is_hosted or not any(compressed) else f"; {sum(compressed)} bytes are for compressed experts"
        raise BudgetError(f"{error}{why}{beside}") from None
    return Division(budgets, compressed, host_memory, reason, chosen)


def _check_device(store: PackedStore, target: torch.device) -> None:
    """Raises ConfigError where the device cannot decode, or makes other bits than the host."""
    if target.type != "cuda":
        raise ConfigError(f"compressed={DEVICE!r}: only an accelerator decodes; accepted here: a share, 0 and auto")
    try:
        _rates(store, target)
    except (ConfigError, TransferError) as error:
        raise ConfigError(f"compressed={DEVICE!r}: {error}; accepted without it: a share, 0 and auto") from None


def _choose_device(store: PackedStore, target: torch.device, host_holds_all: bool) -> tuple[bool, str]:
    """Whether the device decodes, by measuring, and why."""
    try:
        rates = _rates(store, target)
    except (ConfigError, TransferError) as error:
        return False, f"the host decodes: {error}"
    return choose_decoding(rates, host_holds_all)


def _rates(store: PackedStore, target: torch.device) -> DecodingRates:
    missing = why_not()
    if missing is not None:
        raise ConfigError(missing)
    return decoding_rates(store, target)


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
        is_host = targets[0].type == "cpu"
        working = working_nbytes(store.config, tokens, itemsize) if is_host else WORKING_NBYTES
        return choose_amounts(targets, geometries, store.dense_nbytes, cache, tokens, working)
    over = f" over {len(targets)} devices" if len(targets) > 1 else ""
    return shares_of(nbytes, geometries), f"memory {memory}{over}"


def _host_nbytes(host_memory: str | int, total_nbytes: int) -> int:
    nbytes = parse_memory(host_memory, total_nbytes)
    return nbytes if nbytes is not None else max(0, min(total_nbytes, available_host_nbytes() - WORKING_NBYTES))


def _choose(
    share: float | None,
    store: PackedStore,
    geometries: Sequence[Geometry],
    amounts: Sequence[int],
    streamed_nbytes: int,
) -> ShareChoice:
    """The share of `amounts` that was asked for, or what pays; measures for half a second where that is not clear.
    `streamed_nbytes` of them keep nothing.
    """
    if share is not None:
        return ShareChoice(share, "it was asked for", 0.0)
    if store.codec == "none":
        return ShareChoice(0.0, "experts are stored as they are", 0.0)
    total_nbytes = sum(one.nbytes for one in geometries)
    small = too_small(total_nbytes)
    if small is not None:
        return ShareChoice(0.0, small.why, 0.0)
    if sum(amounts) >= total_nbytes:
        return ShareChoice(0.0, "all experts are kept: none is loaded twice", 0.0)
    disk, costs = best_costs(store)
    chosen = choose_share(total_nbytes, sum(amounts), streamed_nbytes, disk, costs)
    largest = max(layer.expert_nbytes for one in geometries for layer in one.layers)
    if chosen.share and min(amounts) * chosen.share < largest:
        return ShareChoice(0.0, f"{chosen.share:.0%} of the memory would not hold a whole expert", 0.0)
    return chosen

"""Divides memory: how much experts get, on each device, and the slots that makes.

The option `memory` is for experts alone, `total_memory` for everything. Where neither states an amount for experts,
they get what the dense part, the KV cache and activations of `context` tokens, and on a host the process itself, leave.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.core.units import format_nbytes, format_share
from expertly.engine.compute import expert_nbytes_at_once
from expertly.engine.device import kind_of
from expertly.engine.process import rss_nbytes
from expertly.native.kernels import choose_kernels
from expertly.scheduler.budget import Budget, least_nbytes, split_budget
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore

WORKING_NBYTES = 600 << 20
"""On an accelerator: memory of Python, torch and activations beside weights and KV cache, for any model."""

BESIDE_NBYTES = 48 << 20
"""On a host: memory that a process with torch and transformers imported takes later, beside weights, KV cache,
activations and the expert being computed. 6 to 15 MiB were measured; with 28 a model with wide experts was killed
(docs/log.md). Code of libraries is not in it: it is resident already, or can be read again.
"""

DEFAULT_CONTEXT = 4096
"""The option `context`, where it is not given."""

CACHE_SHARE = 4
"""A server's KV cache takes at most a quarter of the memory that experts could have, or what they do not need."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """The options about memory; see `expertly.load`. `at_most`: experts gain nothing from more bytes than this.
    `cache`: a server's KV cache, instead of `context`.
    """

    memory: str | int | None = None
    staging: int | None = None
    context: int | None = None
    total: str | int | None = None
    at_most: int | None = None
    cache: SharedCache | None = None

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

    def beside(self, one: BesideExperts, itemsize: int, *, runs_on_host: bool) -> BesideExperts:
        """A server's needs: activations of the longest pass, and for each cached token its column of the masks, too."""
        mask_nbytes = self.num_masks * self.num_read * itemsize
        fixed = one.fixed_nbytes + self.num_read * (one.pass_nbytes + mask_nbytes)
        if runs_on_host:
            fixed += self.host_nbytes
        return BesideExperts(one.dense_nbytes, fixed, one.cache_nbytes + mask_nbytes)

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
    """The slots of each device and the reason for their number; memory beside experts, for `context` tokens. `room` is
    None where the experts' amount was stated and the rest not counted.
    """

    budgets: list[Budget]
    reason: str
    beside: BesideExperts
    context: int
    room: RoomBeside | None = None


def divide(
    store: PackedStore,
    geometries: Sequence[Geometry],
    system: System,
    request: MemoryRequest,
    targets: Sequence[torch.device],
) -> Division:
    """Divide memory over devices, each with its share of the experts. System `resident` takes all experts and accepts
    no less. Raises ConfigError (BudgetError) naming the option that cannot be met.
    """
    if request.context is not None and request.context < 1:
        raise ConfigError(f"context={request.context}: must be at least 1 token")
    if request.total is not None and len(targets) > 1:
        raise ConfigError(
            f"total_memory={request.total!r}: {len(targets)} devices have memory of their own; accepted: memory, for "
            "the experts of all"
        )
    itemsize = geometries[0].layers[0].itemsize
    beside, context = beside_experts(store, itemsize, targets[0]), request.context or DEFAULT_CONTEXT
    if request.cache is not None:
        beside = request.cache.beside(beside, itemsize, runs_on_host=kind_of(targets[0]).runs_on_host)
    if system.keeps_everything or request.is_stated:
        return _divide_stated(geometries, system, request, targets, beside, context)
    if request.cache is not None:
        left = _available(targets[0], request.total)[0] - beside.dense_nbytes - beside.fixed_nbytes
        experts = sum(one.nbytes for one in _on_first(geometries, targets))
        context = request.cache.tokens_in(max(left // CACHE_SHARE, left - experts), beside)
    amounts, reason, room = choose_amounts(targets, geometries, beside, context, request.total)
    if request.at_most is not None:
        most = shares_of(request.at_most, geometries)
        owners = [kind_of(target).memory_of(target) for target in targets]
        room += sum(max(0, a - b) for a, b, owner in zip(amounts, most, owners, strict=True) if owner == owners[0])
        amounts = [min(one, other) for one, other in zip(amounts, most, strict=True)]
    try:
        budgets = _split_over(geometries, amounts, request.staging)
        return Division(budgets, reason, beside, context, RoomBeside(room, beside))
    except BudgetError as error:
        least, free = least_nbytes(geometries[0], request.staging), kind_of(targets[0]).available_nbytes(targets[0])
        total = None if request.total is None else parse_memory(request.total, free, "total_memory")
        if total is None or amounts[0] >= least:
            raise BudgetError(f"{error}; {reason}") from None
        enough = total + least - amounts[0] + beside.of_tokens(0, context) - room
        raise BudgetError(
            f"total_memory={request.total!r}: the least that works is about {-(-enough // 2**20)}MiB; {reason}"
        ) from None


def _divide_stated(
    geometries: Sequence[Geometry],
    system: System,
    request: MemoryRequest,
    targets: Sequence[torch.device],
    beside: BesideExperts,
    context: int,
) -> Division:
    """The division where the user states the experts' amount, or the system keeps all. Memory must hold that and the
    rest: checked against `total_memory`, for a stated context on a host, and for a server on any device.
    """
    total_nbytes = sum(one.nbytes for one in geometries)
    nbytes = total_nbytes
    if request.is_stated:
        assert request.memory is not None
        nbytes = parse_memory(request.memory, total_nbytes) or total_nbytes
    if system.keeps_everything and nbytes < total_nbytes:
        raise ConfigError(
            f"memory={request.memory!r}: system {system.name!r} keeps all experts and needs {total_nbytes} bytes (100%)"
        )
    over = f" over {len(targets)} devices" if len(targets) > 1 else ""
    reason = f"system {system.name}: all experts" if system.keeps_everything else f"memory {request.memory}{over}"
    room = None
    amounts = [one.nbytes for one in geometries] if system.keeps_everything else shares_of(nbytes, geometries)
    is_context_stated = request.context is not None and kind_of(targets[0]).runs_on_host
    if request.total is not None or request.cache is not None or is_context_stated:
        available, what = _available(targets[0], request.total)
        used = [min(amount, one.nbytes) for amount, one in zip(amounts, geometries, strict=True)]
        kept = sum(_on_first(used, targets))
        room = RoomBeside(available - beside.dense_nbytes - beside.fixed_nbytes - kept, beside)
        if request.cache is not None:
            context = request.cache.tokens_in(room.nbytes, beside)
        if beside.of_tokens(0, context) > room.nbytes:
            raise BudgetError(
                f"{reason}: takes {format_nbytes(kept)}, but {what}; {beside.sentence(context)}; accepted: less "
                "memory, or a smaller context"
            )
        if request.total is not None or request.cache is not None:
            reason = f"{reason}: {format_nbytes(kept)}; {what}; {beside.sentence(context)}"
    budgets = _split_over(geometries, amounts, None if system.keeps_everything else request.staging)
    return Division(budgets, reason, beside, context, room)


def _on_first(values: Sequence[Value], targets: Sequence[torch.device]) -> list[Value]:
    """The values of the devices that share the first one's memory."""
    owners = [kind_of(target).memory_of(target) for target in targets]
    return [value for value, owner in zip(values, owners, strict=True) if owner == owners[0]]


def shares_of(nbytes: int, geometries: Sequence[Geometry]) -> list[int]:
    """An amount divided over devices in proportion to their experts, rounded down."""
    total = sum(one.nbytes for one in geometries)
    return [nbytes * one.nbytes // total for one in geometries]


def _split_over(geometries: Sequence[Geometry], amounts: Sequence[int], staging: int | None) -> list[Budget]:
    """The slots of each device. Raises BudgetError naming the least memory for all of them together."""
    if len(geometries) == 1:
        return [split_budget(geometries[0], amounts[0], staging)]
    is_possible = staging is None or staging > 0  # else `split_budget` refuses it
    least = [least_nbytes(one, staging) if is_possible else 0 for one in geometries]
    if any(amount < need for amount, need in zip(amounts, least, strict=True)):
        total = sum(one.nbytes for one in geometries)
        enough = max(-(-need * total // one.nbytes) for need, one in zip(least, geometries, strict=True))
        raise BudgetError(
            f"memory={sum(amounts)} bytes over {len(geometries)} devices: below the staging slots through which each "
            f"streams its experts; the least that works is {enough} bytes"
        )
    return [split_budget(one, amount, staging) for one, amount in zip(geometries, amounts, strict=True)]


# -- what is chosen where experts get what is left ---------------------------------------------------------------------


def choose_amounts(
    targets: Sequence[torch.device],
    geometries: Sequence[Geometry],
    beside: BesideExperts,
    context: int,
    total: str | int | None = None,
) -> tuple[list[int], str, int]:
    """The experts' amount on each device, the reason, and the bytes left on the first device for KV cache and
    activations. It comes from `total`, or from the free memory, which logical devices share. The first device also
    holds what is `beside` experts, for `context` tokens.
    """
    amounts = [0] * len(targets)
    reasons = []
    room = 0
    owners = [kind_of(target).memory_of(target) for target in targets]
    for owner in dict.fromkeys(owners):
        here = [number for number, one in enumerate(owners) if one == owner]
        of_experts = [geometries[number] for number in here]
        expert_nbytes = sum(one.nbytes for one in of_experts)
        available, what = _available(targets[here[0]], total)
        own, tokens = (beside, context) if 0 in here else (BesideExperts(0, beside.fixed_nbytes, 0), 0)
        left = available - own.dense_nbytes - own.fixed_nbytes
        chosen = max(0, min(left - own.of_tokens(0, tokens), expert_nbytes))
        for number, amount in zip(here, shares_of(chosen, of_experts), strict=True):
            amounts[number] = amount
        share = (
            "all experts fit" if chosen == expert_nbytes else f"{format_share(chosen / expert_nbytes)} of the experts"
        )
        reason = f"{format_nbytes(chosen)} ({share}): {what}; {own.sentence(tokens)}"
        reasons.append(reason if len(targets) == 1 else f"{owner}: {reason}")
        room = left - chosen if 0 in here else room
    over = f" over {len(targets)} devices" if len(targets) > 1 else ""
    name = "memory auto" if total is None else f"total memory {total}"
    return amounts, f"{name}{over}: {'; '.join(reasons)}", room


def _available(target: torch.device, total: str | int | None) -> tuple[int, str]:
    """Bytes for weights, KV cache and activations, and words for their amount: the free memory, or `total` less what
    this process takes of the same memory already.
    """
    kind = kind_of(target)
    free = kind.available_nbytes(target)
    stated = None if total is None else parse_memory(total, free, "total_memory")
    if stated is None:
        return free, f"{format_nbytes(free)} are free"
    if not kind.runs_on_host:
        return stated, f"of {format_nbytes(stated)}"
    own = rss_nbytes()
    return stated - own, f"of {format_nbytes(stated)} this process takes {format_nbytes(own)}"


def beside_experts(store: PackedStore, itemsize: int, target: torch.device) -> BesideExperts:
    """What a packed model needs beside experts on a device."""
    config = store.config
    cache, runs_on_host = kv_cache_nbytes(config, 1, itemsize), kind_of(target).runs_on_host
    dense = store.dense_nbytes
    if store.manifest.dense_formats and choose_kernels(runs_on_host=runs_on_host).library is None:
        dense = sum(store.dense_by_format(is_decoded=True).values())
    if not runs_on_host:
        return BesideExperts(dense, WORKING_NBYTES, cache)
    fixed = BESIDE_NBYTES + max(map(expert_nbytes_at_once, store.manifest.layers), default=0)
    return BesideExperts(dense, fixed, cache, pass_nbytes(config, itemsize))


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("text_config")
    return found if isinstance(found, dict) else config


def pass_nbytes(config: dict[str, Any], itemsize: int) -> int:
    """Activations of each token that a forward pass on a CPU reads."""
    text = _text_of(config)
    hidden = text.get("hidden_size", text.get("d_model", 0))
    top_k = next(
        (text[name] for name in ("num_experts_per_tok", "num_experts_per_token", "top_k") if text.get(name)), 1
    )
    wide = text.get("intermediate_size", text.get("d_ff", 0)) or 0
    return int(itemsize * (hidden * (8 + 2 * top_k) + 3 * wide))


def kv_cache_nbytes(config: dict[str, Any], context: int, itemsize: int) -> int:
    """Keys and values of `context` tokens of one request; an upper bound for sliding, shared or compressed layers."""
    text = _text_of(config)
    heads = text.get("num_attention_heads", text.get("num_heads", 1))
    hidden = text.get("hidden_size", text.get("d_model", 0))
    size = text.get("head_dim") or text.get("d_kv") or hidden // max(1, heads)
    key_size = text.get("qk_nope_head_dim", 0) + text.get("qk_rope_head_dim", 0) or size
    value_size = text.get("v_head_dim") or size
    kv_heads = heads if "kv_lora_rank" in text else text.get("num_key_value_heads") or heads
    layers = text.get("num_hidden_layers", text.get("num_layers", 0))
    if "num_decoder_layers" in text:  # encoder-decoder: self and cross attention of each decoder layer
        layers = 2 * (text["num_decoder_layers"] or layers)
    return layers * kv_heads * (key_size + value_size) * context * itemsize


def available_host_nbytes() -> int:
    """Host memory this process may still take: the system's free memory, within all limits of its cgroups."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")  # without what the page cache could give
    with contextlib.suppress(OSError):  # no /proc
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        free = next((int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"), free)
    for limit, usage, cache in _cgroup_limits():
        free = min(free, limit - usage + cache)
    return max(0, free)


def _cgroup_limits() -> list[tuple[int, int, int]]:
    """(limit, usage, droppable page cache) in bytes of each memory cgroup we are in, version 1 and 2."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, schedulers, path = line.split(":", 2)
        if schedulers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in schedulers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            limit, usage = (_number(folder / name) for name in names)
            if limit is not None and usage is not None:
                found.append((limit, usage, _inactive_file(folder / "memory.stat")))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _inactive_file(path: Path) -> int:
    try:
        fields = dict(line.split()[:2] for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))

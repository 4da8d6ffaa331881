"""What a stated budget is divided into, over devices and into slots, and what is chosen when none is stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.geometry import Geometry
from expertly.core.resources import parse_memory
from expertly.engine.device import kind_of
from expertly.scheduler.budget import Budget, least_nbytes, split_budget
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore

WORKING_NBYTES = 600 << 20
"""What Python, torch and the activations of a forward pass take beside weights and cache, of any model."""

BESIDE_NBYTES = 80 << 20
"""What a process that has imported torch and transformers still comes to take beside weights, KV cache and activations:
58 MiB were measured with the demo model, of which code of libraries is a half.
"""

DEFAULT_CONTEXT = 4096
"""Tokens of KV cache that `memory="auto"` leaves room for."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
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
    request: MemoryRequest,
    targets: Sequence[torch.device],
) -> Division:
    """Of each device's share of the experts. `resident` takes everything and accepts no less.

    Raises ConfigError (BudgetError) naming the setting that cannot be.
    """
    context, total_nbytes = request.context, sum(one.nbytes for one in geometries)
    is_stated = request.memory not in (None, "auto")
    nbytes = parse_memory(request.memory, total_nbytes) if request.memory is not None else None
    if context is not None and context < 1:
        raise ConfigError(f"context={context}: must be at least 1 token")
    if context is not None and (system.keeps_everything or is_stated):
        raise ConfigError(f"context={context}: only memory='auto' leaves room for it, not memory={request.memory!r}")
    if system.keeps_everything:
        if nbytes is not None and nbytes < total_nbytes:
            raise ConfigError(
                f"memory={request.memory!r}: system {system.name!r} keeps all experts and needs {total_nbytes} bytes "
                "(100%)"
            )
        budgets = [split_budget(one, one.nbytes) for one in geometries]
        return Division(budgets, f"system {system.name}: all experts")
    if nbytes is None:
        amounts, reason = _amounts_that_are_free(store, geometries, context or DEFAULT_CONTEXT, targets)
    else:
        over = f" over {len(targets)} devices" if len(targets) > 1 else ""
        amounts, reason = shares_of(nbytes, geometries), f"memory {request.memory}{over}"
    try:
        return Division(_split_over(geometries, amounts, request.ring), reason)
    except BudgetError as error:
        why = "" if is_stated else f"; {reason}"
        raise BudgetError(f"{error}{why}") from None


def shares_of(nbytes: int, geometries: Sequence[Geometry]) -> list[int]:
    """An amount divided over devices in proportion to their experts; what is left over goes to nobody."""
    total = sum(one.nbytes for one in geometries)
    return [nbytes * one.nbytes // total for one in geometries]


def _split_over(geometries: Sequence[Geometry], amounts: Sequence[int], ring: int | None) -> list[Budget]:
    """The slots of each device from its amount; `ring`: the staging slots of each. Raises BudgetError naming the least
    that all need together.
    """
    if len(geometries) == 1:
        return [split_budget(geometries[0], amounts[0], ring)]
    least = [least_nbytes(one, ring) if ring is None or ring > 0 else 0 for one in geometries]
    if any(amount < need for amount, need in zip(amounts, least, strict=True)):
        total = sum(one.nbytes for one in geometries)
        enough = max(-(-need * total // one.nbytes) for need, one in zip(least, geometries, strict=True))
        raise BudgetError(
            f"memory={sum(amounts)} bytes over {len(geometries)} devices: below the staging slots through which each "
            f"streams its experts; the least that works is {enough} bytes"
        )
    return [split_budget(one, amount, ring) for one, amount in zip(geometries, amounts, strict=True)]


# -- what is chosen where nothing is stated ----------------------------------------------------------------------------


def _amounts_that_are_free(
    store: PackedStore, geometries: Sequence[Geometry], context: int, targets: Sequence[torch.device]
) -> tuple[list[int], str]:
    itemsize = geometries[0].layers[0].itemsize
    cache_nbytes = kv_cache_nbytes(store.config, context, itemsize)
    is_host = kind_of(targets[0]).runs_on_host
    working = working_nbytes(store.config, context, itemsize) if is_host else WORKING_NBYTES
    return choose_amounts(targets, geometries, store.dense_nbytes, cache_nbytes, context, working)


def choose_amounts(
    targets: Sequence[torch.device],
    geometries: Sequence[Geometry],
    dense_nbytes: int,
    cache_nbytes: int,
    context: int,
    working_nbytes: int = WORKING_NBYTES,
) -> tuple[list[int], str]:
    """What each device can give to experts, and why: of the memory that is free, which logical devices share; the first
    device also holds the dense part and the KV cache of `context` tokens. `working_nbytes`: what a forward pass takes
    beside these.
    """
    amounts = [0] * len(targets)
    reasons = []
    owners = [kind_of(target).memory_of(target) for target in targets]
    for owner in dict.fromkeys(owners):
        here = [number for number, one in enumerate(owners) if one == owner]
        target, of_experts = targets[here[0]], [geometries[number] for number in here]
        dense, cache, tokens = (dense_nbytes, cache_nbytes, context) if 0 in here else (0, 0, 0)
        available, expert_nbytes = kind_of(target).available_nbytes(target), sum(one.nbytes for one in of_experts)
        chosen, reason = choose_amount(available, expert_nbytes, dense, cache, tokens, working_nbytes)
        for number, amount in zip(here, shares_of(chosen, of_experts), strict=True):
            amounts[number] = amount
        reasons.append(reason if len(targets) == 1 else f"{owner}: {reason}")
    over = f" over {len(targets)} devices" if len(targets) > 1 else ""
    return amounts, f"memory auto{over}: {'; '.join(reasons)}"


def choose_amount(
    available: int,
    expert_nbytes: int,
    dense_nbytes: int,
    cache_nbytes: int,
    context: int,
    working_nbytes: int = WORKING_NBYTES,
) -> tuple[int, str]:
    """What is free after the dense part, the KV cache of `context` tokens and working memory, at most all experts; and
    how that came to be.
    """
    left = available - dense_nbytes - cache_nbytes - working_nbytes
    nbytes = max(0, min(left, expert_nbytes))
    gib = 1 << 30
    parts = (
        f"{available / gib:.2f} GiB are free; dense weights take {dense_nbytes / gib:.2f}, "
        f"the KV cache of {context} tokens {cache_nbytes / gib:.2f}, working memory {working_nbytes / gib:.2f} GiB"
    )
    chosen = "all experts fit" if nbytes == expert_nbytes else f"{100 * nbytes / expert_nbytes:.1f}% of the experts"
    return nbytes, f"{nbytes / gib:.2f} GiB ({chosen}): {parts}"


def working_nbytes(config: dict[str, Any], context: int, itemsize: int) -> int:
    """What a model on a CPU takes beside weights and KV cache, while it reads a prompt of `context` tokens at once;
    imports are not counted, as they are in memory when this is asked.
    """
    text = config.get("text_config", config)
    hidden = text.get("hidden_size", text.get("d_model", 0))
    top_k = next(
        (text[name] for name in ("num_experts_per_tok", "num_experts_per_token", "top_k") if text.get(name)), 1
    )
    wide = text.get("intermediate_size", text.get("d_ff", 0)) or 0
    return BESIDE_NBYTES + context * itemsize * (hidden * (8 + 2 * top_k) + 3 * wide)


def kv_cache_nbytes(config: dict[str, Any], context: int, itemsize: int) -> int:
    """Keys and values of `context` tokens of one request; an upper bound where layers slide, share or compress."""
    text = config.get("text_config", config)
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
    """Host memory this process may still take: what the system has free, within every cgroup limit above us."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next((int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"), 0)
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

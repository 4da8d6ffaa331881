"""From what a user states to what is loaded: how much of the memory is cache, how much experts."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.resources import parse_memory
from expertly.engine.device import choose_devices, kind_of
from expertly.model.packing import pack_cached
from expertly.scheduler.presets import AUTO_SYSTEM, get_system
from expertly.serve.memory import MAX_BATCH_TOKENS, PAGE_TOKENS, MemorySplit, Shape, split_total
from expertly.serve.scheduler import Room

DEFAULT_CONTEXT = 4096
"""Tokens of one text where neither the user nor the model says less."""

MAX_DEFAULT_CACHE = 32768
"""Tokens of KV cache where nobody says more: attention on a CPU reads all of what runs."""


@dataclass(frozen=True, slots=True)
class ServeWishes:
    """As `expertly serve` is told; None: nothing was said."""

    model: str | None
    dtype: str | None
    device: str | None
    devices: str | None
    system: str
    memory: str
    total_memory: str | None
    context: int | None
    max_running: int
    max_queue: int
    kv_tokens: int | None
    codec: str = "auto"


@dataclass(frozen=True, slots=True)
class ServePlan:
    """`memory`: what `expertly.load` is asked for."""

    memory: str | int
    room: Room
    split: MemorySplit


def plan(wishes: ServeWishes) -> ServePlan:
    """Packs the model where it is not packed yet. Raises ConfigError, BudgetError."""
    if wishes.total_memory is not None and wishes.memory != "auto":
        raise ConfigError(
            f"--memory {wishes.memory} and --total-memory {wishes.total_memory}: accepted: one of the two"
        )
    if wishes.max_running > MAX_BATCH_TOKENS:
        raise ConfigError(f"--max-running {wishes.max_running}: accepted: at most {MAX_BATCH_TOKENS}")
    store = pack_cached(wishes.model, wishes.dtype, codec=wishes.codec)
    text = store.config.get("text_config", store.config)
    context = _context(wishes.context, text.get("max_position_embeddings"))
    geometry = store.geometry()
    shape = Shape(
        config=store.config,
        itemsize=geometry.layers[0].itemsize,
        dense=store.dense_nbytes,
        all_experts=geometry.nbytes,
        context=context,
        max_running=wishes.max_running,
    )
    pages = None
    if wishes.kv_tokens is not None:
        pages = -(-wishes.kv_tokens // PAGE_TOKENS)
        if pages < shape.pages_of_one():
            least = shape.pages_of_one() * PAGE_TOKENS
            raise ConfigError(f"--kv-tokens {wishes.kv_tokens}: accepted: {least} or more, for one text of {context}")
    memory, split = _split(wishes, shape, pages)
    _check_room(wishes, split, _stated_experts(memory, shape))
    return ServePlan(memory, Room(context, PAGE_TOKENS, split.num_pages, wishes.max_running, wishes.max_queue), split)


def _stated_experts(memory: str | int, shape: Shape) -> int:
    """Bytes of `memory` that is a size; of "auto", which takes what is left, none."""
    return min(shape.all_experts, parse_memory(memory, shape.all_experts) or 0)


def _check_room(wishes: ServeWishes, split: MemorySplit, experts: int) -> None:
    """Raises BudgetError where the first device has less than what is to be on it: a cache is made as a whole."""
    target = choose_devices(wishes.device, wishes.devices)[0]
    free = kind_of(target).available_nbytes(target)
    if wishes.devices is None and split.dense + split.cache + split.working + experts > free:
        raise BudgetError(
            f"dense weights of {split.dense} bytes, a KV cache of {split.cache} for {split.num_pages * PAGE_TOKENS} "
            f"tokens, working memory of {split.working} and experts of {experts} are more than the {free} bytes that "
            "are free; accepted: less of --kv-tokens, --context, --max-running, --memory or --total-memory"
        )


def _context(wished: int | None, most: int | None) -> int:
    if wished is None:
        return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    if most is not None and wished > most:
        raise ConfigError(f"--context {wished}: accepted: at most the model's {most}")
    return wished


def _split(wishes: ServeWishes, shape: Shape, pages: int | None) -> tuple[str | int, MemorySplit]:
    targets = choose_devices(wishes.device, wishes.devices)
    is_auto = wishes.system == AUTO_SYSTEM  # what that is depends on the memory
    keeps_everything = not is_auto and get_system(wishes.system).keeps_everything
    is_stated = wishes.memory != "auto" or keeps_everything or len(targets) > 1
    if wishes.total_memory is None and is_stated:
        if pages is None:
            most = max(shape.pages_of_one(), MAX_DEFAULT_CACHE // PAGE_TOKENS)
            pages = min(shape.pages_wanted(), most)
        return wishes.memory, MemorySplit(shape.dense, shape.cache_nbytes(pages), shape.working(pages), 0, pages)
    if len(targets) > 1:
        raise ConfigError(f"--total-memory with --devices {wishes.devices}: accepted: --memory, for the experts of all")
    free = kind_of(targets[0]).available_nbytes(targets[0])
    total = parse_memory(wishes.total_memory or "auto", free)
    split = split_total(free if total is None else total, shape, pages)
    if keeps_everything and split.experts < shape.all_experts:
        raise ConfigError(
            f"--total-memory {wishes.total_memory}: system {wishes.system} keeps all experts, {shape.all_experts} "
            f"bytes; {split.experts} are left for them"
        )
    return ("100%" if split.experts == shape.all_experts else split.experts), split

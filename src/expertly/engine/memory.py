"""The budget a user states, and the budget we choose when none is stated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKING_NBYTES = 600 << 20
"""What Python, torch and the activations of a forward pass take beside weights and cache, of any model."""

BESIDE_NBYTES = 80 << 20
"""What a process that has imported torch and transformers still comes to take beside weights, KV cache and activations:
58 MiB were measured with the demo model, of which code of libraries is a half.
"""


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
    free = _meminfo("MemAvailable")
    for limit, usage, cache in _cgroup_limits():
        free = min(free, limit - usage + cache)
    return max(0, free)


@dataclass(frozen=True, slots=True)
class AutoBudget:
    """A chosen budget and the sentence that says why."""

    nbytes: int
    reason: str


def choose_budget(
    available: int,
    expert_nbytes: int,
    dense_nbytes: int,
    cache_nbytes: int,
    context: int,
    working_nbytes: int = WORKING_NBYTES,
) -> AutoBudget:
    """What is free after the dense part, the KV cache of `context` tokens and working memory; at most all experts."""
    left = available - dense_nbytes - cache_nbytes - working_nbytes
    nbytes = max(0, min(left, expert_nbytes))
    gib = 1 << 30
    parts = (
        f"{available / gib:.2f} GiB are free; dense weights take {dense_nbytes / gib:.2f}, "
        f"the KV cache of {context} tokens {cache_nbytes / gib:.2f}, working memory {working_nbytes / gib:.2f} GiB"
    )
    chosen = "all experts fit" if nbytes == expert_nbytes else f"{100 * nbytes / expert_nbytes:.1f}% of the experts"
    return AutoBudget(nbytes, f"memory auto: {nbytes / gib:.2f} GiB ({chosen}): {parts}")


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) << 10
    return 0


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

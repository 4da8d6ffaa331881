"""A prompt of 512 tokens at 25 %: each needed segment is read once a layer, and decode keeps what it had.

    python bench/prefill.py [--experts-gib 3] [--tokens 512]

For each order and preemption: `resident` and `early` are the default; with `id` only the running expert and what was
asked for are protected; with `late` what is missing is found one expert at a time.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

from common import child, inflated_model, options, print_report, run


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """In a child: decode to fill the cache, prefill another prompt, decode on."""
    import torch

    import expertly
    from expertly.api import handle

    model, _ = expertly.load(
        arguments["model"],
        memory="25%",
        system=f"lru:preemption={arguments['preemption']}:order={arguments['order']}",
        segments=arguments["segments"],
        device="cpu",
    )
    scheduler = handle(model).engine.scheduler
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (1, arguments["tokens"] + 64), generator=torch.Generator().manual_seed(0))

    def decode(cache: Any, first: int, last: int) -> None:
        for i in range(first, last):
            model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)

    def phase(name: str) -> dict[str, Any]:
        found: dict[str, Any] = expertly.stats(model).as_dict()["phases"][name]
        return dict(found)

    with torch.no_grad():
        cache = model(ids[:, :16], use_cache=True).past_key_values
        decode(cache, 16, 48)
        kept = [dict(cache.kept) for cache in scheduler.cache.partitions]
        before = phase("prefill")
        start = time.perf_counter()
        model(ids[:, 64:], use_cache=True)
        seconds = time.perf_counter() - start
        after = phase("prefill")
        still = [dict(cache.kept) for cache in scheduler.cache.partitions]
    needed = after["demanded_bytes"] - before["demanded_bytes"]
    absent = needed - (after["hit_bytes"] - before["hit_bytes"])
    loaded = after["bytes_loaded"] - before["bytes_loaded"]
    num_kept = sum(mask.bit_count() for one in kept for mask in one.values())
    num_still = sum(
        (mask & now.get(e, 0)).bit_count() for one, now in zip(kept, still, strict=True) for e, mask in one.items()
    )
    expertly.unload(model)
    return {
        "needed_bytes": needed,
        "absent_bytes": absent,
        "loaded_bytes": loaded,
        "loads_per_absent_segment": loaded / absent,
        "working_set_kept": num_still / num_kept,
        "prefill_s": seconds,
    }


def main() -> None:
    args = options(__doc__, experts_gib=3.0, tokens=512)
    model = inflated_model(args.experts_gib)
    rows = []
    for segments in (1, 4):
        for order, preemption in product(("resident", "id"), ("early", "late")):
            settings = {"order": order, "preemption": preemption, "segments": segments}
            rows.append(settings | child("prefill.py", settings | {"model": str(model), "tokens": args.tokens}))
    print_report("prefill", rows, vars(args))


if __name__ == "__main__":
    run(main, measure)

"""Reads: no amplification, no page cache, and the disk's own rate while the forward pass waits.

    python bench/disk.py [--experts-gib 3] [--memory 10%] [--tokens 48]

Bounds: bytes the kernel read = bytes of absent segments; pages of the expert files in the page cache = 0 afterwards;
bytes demanded / time stalled >= 85% of what `doctor`'s measurement gives at the same read size and depth.
Each configuration runs in a process of its own, on a file larger than any cache between it and the disk.
"""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path
from typing import Any

from common import child, inflated_model, options, print_report, run


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    return int(subprocess.check_output(["fincore", "--noheadings", "--output", "PAGES", str(path)]))


def kernel_read_nbytes() -> int:
    """Bytes this process made the storage layer read."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["read_bytes"])


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """In a child: decode with a cold cache, then the same reads without a model."""
    import torch

    import expertly
    from expertly.core.resources import NUM_READERS
    from expertly.engine.reading import MIN_READ_NBYTES
    from expertly.hardware.measure import measure_disk
    from expertly.model.packing import pack_cached

    store = pack_cached(arguments["model"], None, codec="none")
    files = [store.extents[layer][0] for layer in range(len(store.manifest.layers))]
    cached_before = sum(map(cached_pages, files))  # the files' headers
    asked = {name: arguments[name] for name in ("system", "memory", "segments")}
    model, _ = expertly.load(arguments["model"], device="cpu", codec="none", learned="off", **asked)
    vocab = model.config.vocab_size
    ids = torch.randint(0, vocab, (1, arguments["tokens"] + 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        for i in range(arguments["tokens"] // 4):  # touch every slot once: first use also takes the page
            model(ids[:, 8 + i : 9 + i], past_key_values=cache, use_cache=True)
        before, read_before = expertly.stats(model).as_dict(), kernel_read_nbytes()
        for i in range(arguments["tokens"] // 4, arguments["tokens"]):
            model(ids[:, 8 + i : 9 + i], past_key_values=cache, use_cache=True)
        after, read_after = expertly.stats(model).as_dict(), kernel_read_nbytes()
    decode = [stats["phases"]["decode"] for stats in (before, after)]
    demanded = decode[1]["bytes_loaded"] - decode[0]["bytes_loaded"]
    stalled = decode[1]["stall_s"] - decode[0]["stall_s"]
    expert_nbytes = store.manifest.layers[0].expert_nbytes
    cached = sum(map(cached_pages, files)) - cached_before
    expertly.unload(model)
    read_nbytes = max(MIN_READ_NBYTES, expert_nbytes // NUM_READERS // 4096 * 4096)
    rates = [measure_disk(files[i % len(files)], read_nbytes, NUM_READERS, 1.0).nbytes_per_s for i in range(5)]
    return {
        "demanded_bytes": demanded,
        "kernel_read_bytes": read_after - read_before,
        "amplification": (read_after - read_before) / demanded,
        "pages_added_to_cache": cached,
        "stalled_bytes_per_s": demanded / stalled,
        "read_bytes": read_nbytes,
        "readers": NUM_READERS,
        "doctor_bytes_per_s": statistics.median(rates),
        "share_of_doctor": demanded / stalled / statistics.median(rates),
        "decode_hit_rate": after["phases"]["decode"]["hit_rate"],
    }


def main() -> None:
    args = options(__doc__, experts_gib=3.0, memory="10%", tokens=48)
    model = inflated_model(args.experts_gib)
    rows = []
    for system in ("on-demand", "lru"):
        for segments in (1, 4):
            settings = {"system": system, "segments": segments, "memory": args.memory}
            rows.append(settings | child("disk.py", settings | {"model": str(model), "tokens": args.tokens}))
    print_report("disk", rows, vars(args))


if __name__ == "__main__":
    run(main, measure)

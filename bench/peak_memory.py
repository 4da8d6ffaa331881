"""Peak resident memory of packing, loading and generating, against dense weights + budget + KV cache + 600 MB.

    python bench/peak_memory.py [--experts-gib 3,8]

For a model of any size: the bound is asked at two sizes, packing in a process of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import child, inflated_model, options, print_report, run

MARGIN_NBYTES = 600 * 10**6


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """In a child: pack, or load and generate."""
    from expertly.engine.process import peak_rss_nbytes

    if arguments["what"] == "pack":
        from expertly.model.packing import pack

        store = pack(Path(arguments["model"]), Path(arguments["out"]))
        return {
            "peak_rss_bytes": peak_rss_nbytes(),
            "dense_bytes": store.dense_nbytes,
            "memory_bytes": 0,
            "kv_bytes": 0,
        }
    import torch

    import expertly
    from expertly.api import handle
    from expertly.engine.memory import kv_cache_nbytes

    model, tokenizer = expertly.load(
        arguments["out"], memory=arguments["memory"], segments=arguments["segments"], device="cpu"
    )
    inputs = tokenizer("Once upon a time " * 60, return_tensors="pt", return_token_type_ids=False)
    model.generate(**inputs, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    store = handle(model).store
    num_tokens = inputs["input_ids"].shape[1] + 32
    return {
        "peak_rss_bytes": peak_rss_nbytes(),
        "dense_bytes": store.dense_nbytes,
        "memory_bytes": expertly.stats(model).as_dict()["memory_bytes"],
        "kv_bytes": kv_cache_nbytes(store.config, num_tokens, torch.bfloat16.itemsize),
    }


def main() -> None:
    args = options(__doc__, experts_gib="3,8")
    rows = []
    for gib in map(float, args.experts_gib.split(",")):
        model = inflated_model(gib)
        out = Path(tempfile.mkdtemp(dir=model.parent)) / "store"
        try:
            for what, memory, segments in (("pack", None, None), ("generate", "25%", 1), ("generate", "25%", 4)):
                settings = {"what": what, "experts_gib": gib, "memory": memory, "segments": segments}
                row = settings | child("peak_memory.py", settings | {"model": str(model), "out": str(out)})
                allowed = row["dense_bytes"] + row["memory_bytes"] + row["kv_bytes"] + MARGIN_NBYTES
                rows.append(
                    row
                    | {"allowed_bytes": allowed, "over_parts_bytes": row["peak_rss_bytes"] - allowed + MARGIN_NBYTES}
                )
        finally:
            shutil.rmtree(out.parent)
    print_report("peak_memory", rows, vars(args))


if __name__ == "__main__":
    run(main, measure)

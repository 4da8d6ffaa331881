"""`lru` at 25 % against transformers + accelerate disk offload, in a memory cgroup that the model does not fit in.

    python bench/offload.py [--experts-gib 3] [--limit-gib 2] [--tokens 16]

Bound: at least 5x the tokens per second, the same tokens fed. Peak resident memory is what the kernel says of each
process. Needs a writable version 1 memory cgroup.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from common import (
    GIB,
    child,
    drop_page_cache,
    inflated_model,
    memory_cgroup,
    options,
    print_report,
    run,
)


def load(arguments: dict[str, Any], offload_folder: str) -> Any:
    import torch

    if arguments["name"] == "expertly":
        import expertly

        model, _ = expertly.load(
            arguments["model"], memory="25%", system="lru", segments=arguments["segments"], device="cpu"
        )
        return model
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        arguments["model"],
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": arguments["cpu_bytes"]},
        offload_folder=offload_folder,
    ).eval()


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """In a child and a cgroup: a prompt, then the same tokens one by one, whatever the model would choose."""
    import torch

    from expertly.engine.process import peak_rss_nbytes

    with tempfile.TemporaryDirectory(dir=arguments["scratch"]) as offload_folder, torch.no_grad():
        start = time.perf_counter()
        model = load(arguments, offload_folder)
        loading = time.perf_counter() - start
        ids = torch.tensor([arguments["ids"]])
        times = []
        start = time.perf_counter()
        out = model(ids[:, :16], use_cache=True)
        ttft = time.perf_counter() - start
        greedy = [int(out.logits[0, -1].argmax())]
        for i in range(16, ids.shape[1]):
            start = time.perf_counter()
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            times.append(time.perf_counter() - start)
            greedy.append(int(out.logits[0, -1].argmax()))
        if arguments["name"] == "expertly":
            import expertly

            expertly.unload(model)
    return {
        "load_s": loading,
        "ttft_s": ttft,
        "tpot_s": statistics.mean(times),
        "tokens_per_s": 1 / statistics.mean(times),
        "peak_rss_bytes": peak_rss_nbytes(),
        "greedy": greedy,
    }


def main() -> None:
    args = options(__doc__, experts_gib=3.0, limit_gib=2.0, tokens=16)
    model = inflated_model(args.experts_gib)
    from transformers import AutoTokenizer

    from expertly.model.packing import pack_cached

    pack_cached(str(model), None)
    text = "The old man looked at the sea and said that he would go out again in the morning, with the boy, as before."
    ids = AutoTokenizer.from_pretrained(model)(text * 4)["input_ids"][: 16 + args.tokens]
    rows = []
    for name, segments in (("expertly", 1), ("expertly", 4), ("accelerate", None)):
        with (
            memory_cgroup(int(args.limit_gib * GIB)) as group,
            tempfile.TemporaryDirectory(dir=model.parent) as scratch,
        ):
            drop_page_cache(model)
            settings = {"name": name, "segments": segments}
            # accelerate gets what is left of the limit after Python, torch and one layer's working copy
            extra = {"ids": ids, "scratch": scratch, "cpu_bytes": int((args.limit_gib - 1) * GIB), "model": str(model)}
            rows.append(settings | child("offload.py", settings | extra, cgroup=group, timeout=3000))
    same = {tuple(row.pop("greedy")) for row in rows}
    for row in rows:
        row["speedup"] = row["tokens_per_s"] / rows[-1]["tokens_per_s"]
    print_report("offload", rows, vars(args) | {"greedy_choices_equal": len(same) == 1})


if __name__ == "__main__":
    run(main, measure)

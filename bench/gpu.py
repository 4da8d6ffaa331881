"""On a CUDA device: time per token of each system and budget against `resident` and `on-demand`; copy bandwidth.

    python bench/gpu.py [--experts-gib 4] [--tokens 24] [--out FILE]

Every configuration decodes the same tokens; the reference is the unmodified model on the device. The bytes a decode
step loads over the measured bandwidth of pinned copies is the least time the loads can take.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import inflated_model, options, print_report
from transformers import AutoModelForCausalLM

import expertly


def decode(model: Any, ids: torch.Tensor, num_warm: int) -> tuple[float, float, list[int]]:
    """(TTFT, median TPOT after `num_warm` tokens, greedy choices), feeding `ids` [1, S], the first 16 as a prompt."""
    times, choices = [], []
    with torch.no_grad():
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(ids[:, :16], use_cache=True)
        torch.cuda.synchronize()
        ttft = time.perf_counter() - start
        for i in range(16, ids.shape[1]):
            start = time.perf_counter()
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            choices.append(int(out.logits[0, -1].argmax()))
            times.append(time.perf_counter() - start)
    return ttft, statistics.median(times[num_warm:]), choices


def copy_nbytes_per_s(nbytes: int) -> float:
    """Pinned host memory to the device, `nbytes` a copy."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 8 * nbytes / (time.perf_counter() - start))
    return best


def main() -> None:
    args = options(__doc__, experts_gib=2.0, tokens=16, out=None)
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py: no CUDA device here")
    folder = inflated_model(args.experts_gib)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, plain.config.vocab_size, (1, 16 + 2 * args.tokens), generator=generator).cuda()
    decode(plain, ids, args.tokens)
    ttft, tpot, expected = decode(plain, ids, args.tokens)
    rows: list[dict[str, Any]] = [{"system": "transformers", "memory": None, "ttft_s": ttft, "tpot_s": tpot}]
    del plain
    configurations = [("resident", "100%", 1), ("resident", "100%", 4)]
    for memory in ("10%", "25%", "50%"):
        configurations += [(system, memory, p) for system in ("on-demand", "lru") for p in (1, 4)]
    configurations += [("lfu", "25%", 1), ("lfu", "25%", 4)]
    expert_nbytes = None
    for system, memory, segments in configurations:
        model, _ = expertly.load(
            str(folder),
            system=system,
            memory=memory,
            segments=segments,
            device="cuda",
            host_memory="100%",
            learned="off",
        )
        decode(model, ids, args.tokens)  # fills the host tier
        before = expertly.stats(model).as_dict()["phases"]["decode"]
        ttft, tpot, choices = decode(model, ids, args.tokens)
        stats = expertly.stats(model).as_dict()
        after = stats["phases"]["decode"]
        demands = [sum(one[k] for k in ("hits", "partial_hits", "misses")) for one in (before, after)]
        expert_nbytes = stats["expert_bytes"] // len(stats["layers"]) // 32
        rows.append(
            {
                "system": system,
                "memory": memory,
                "segments": segments,
                "ttft_s": ttft,
                "tpot_s": tpot,
                "hit_rate": (after["hits"] - before["hits"]) / (demands[1] - demands[0]),
                "bytes_per_token": (after["bytes_loaded"] - before["bytes_loaded"]) / (2 * args.tokens),
                "choices_equal": sum(a == b for a, b in zip(choices, expected, strict=True)) / len(expected),
            }
        )
        expertly.unload(model)
        del model
    assert expert_nbytes is not None
    bandwidth = copy_nbytes_per_s(expert_nbytes)
    by_key = {(row["system"], row["memory"], row.get("segments")): row["tpot_s"] for row in rows}
    for row in rows[1:]:
        row["against_resident"] = row["tpot_s"] / by_key["resident", "100%", row["segments"]]
        if row["memory"] != "100%":
            row["against_on_demand"] = row["tpot_s"] / by_key["on-demand", row["memory"], row["segments"]]
        row["least_copy_s"] = row["bytes_per_token"] / bandwidth
    settings = vars(args) | {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": bandwidth}
    print_report("gpu", rows, settings, args.out)


if __name__ == "__main__":
    main()

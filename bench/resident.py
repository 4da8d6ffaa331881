"""`resident` against plain transformers with the same model in RAM: decode, and prefill of 256 tokens.

    python bench/resident.py [--experts-gib 3] [--rounds 7] [--kernels auto] [--segments 1,4]
    python bench/resident.py --kernels native,torch --segments 1    what the compiled products gain

Bounds: decode within 1.10x of transformers' fastest experts implementation for P = 1 and P = 4, prefill within 1.15x.
All models are in one process and take turns, so that the machine's drift meets them alike; ratios are of medians.
`--clock cpu` counts processor time instead, for one thread on a machine that does other things, too.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import CLOCKS, inflated_model, options, print_report
from transformers import AutoModelForCausalLM

from expertly.engine.process import keep_off_trapped_instructions
from expertly.native.kernels import VARIABLE

IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")


def decode_seconds(model: Any, ids: torch.Tensor, num_tokens: int, clock: Callable[[], float]) -> float:
    """Median seconds of a decode step, the prompt's cache in place."""
    times = []
    with torch.no_grad():
        out = model(ids[:, :16], use_cache=True)
        cache = out.past_key_values
        for i in range(num_tokens):
            start = clock()
            out = model(ids[:, 16 + i : 17 + i], past_key_values=cache, use_cache=True)
            times.append(clock() - start)
    return statistics.median(times)


def prefill_seconds(model: Any, ids: torch.Tensor, clock: Callable[[], float]) -> float:
    """Seconds of one forward pass over the prompt."""
    with torch.no_grad():
        start = clock()
        model(ids, use_cache=True)
        return clock() - start


def main() -> None:
    keep_off_trapped_instructions()
    args = options(
        __doc__, experts_gib=3.0, rounds=7, prefill=256, decode=16, threads=torch.get_num_threads(), segments="1,4",
        kernels="auto", clock=tuple(CLOCKS),
    )  # fmt: skip
    clock = CLOCKS[args.clock]
    torch.set_num_threads(args.threads)
    folder = inflated_model(args.experts_gib)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    models: dict[str, Any] = {f"transformers {name}": plain for name in IMPLEMENTATIONS}
    kernels = args.kernels.split(",")
    for wanted in kernels:
        os.environ[VARIABLE] = wanted
        for segments in map(int, args.segments.split(",")):
            model, _ = expertly.load(str(folder), system="resident", segments=segments, device="cpu")
            models[f"resident P={segments}, {expertly.stats(model).as_dict()['kernels']['name']}"] = model
    ids = torch.randint(0, plain.config.vocab_size, (1, args.prefill), generator=torch.Generator().manual_seed(0))
    decode: dict[str, list[float]] = {name: [] for name in models}
    prefill: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(args.rounds + 1):
        for name, model in models.items():
            if model is plain:
                plain.set_experts_implementation(name.split()[1])
            decoded = decode_seconds(model, ids, args.decode, clock)
            if name != "transformers batched_mm":  # copies every token's experts: hopeless in prefill
                filled = prefill_seconds(model, ids, clock)
            if round_number:  # the first warms up
                decode[name].append(decoded)
                if name != "transformers batched_mm":
                    prefill[name].append(filled)
    rows: list[dict[str, Any]] = []
    for name in models:
        filled_ms = 1e3 * statistics.median(prefill[name]) if prefill[name] else None
        rows.append({"name": name, "decode_ms": 1e3 * statistics.median(decode[name]), "prefill_ms": filled_ms})
    theirs = [row for row in rows if row["name"].startswith("transformers")]
    fastest_decode = min(row["decode_ms"] for row in theirs)
    fastest_prefill = min(row["prefill_ms"] for row in theirs if row["prefill_ms"])
    for row in rows:
        row["decode_ratio"] = row["decode_ms"] / fastest_decode
        row["prefill_ratio"] = row["prefill_ms"] / fastest_prefill if row["prefill_ms"] else None
    print_report("resident", rows, vars(args))


if __name__ == "__main__":
    main()

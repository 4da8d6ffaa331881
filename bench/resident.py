"""`resident` against plain transformers with the same model in RAM: decode, and prefill of 256 tokens.

    python bench/resident.py [--experts-gib 3] [--rounds 7] [--kernels auto] [--cached 25%,50%]
    python bench/resident.py --kernels auto,torch    what the compiled products gain
    python bench/resident.py --experts-gib 0 --cached 50% --decode 48    a layer of small experts
    python bench/resident.py --experts-gib 0 --programs on,off           what programs of layers gain

Bounds: decode within 1.10x of transformers' fastest experts implementation for P = 1 and P = 4, prefill within 1.15x;
the demo model's own small experts (0 GiB) 0.2 ms a layer, and 0.35 ms beside an `lru` cache of half of them. What a
layer takes beyond its bytes is its time less that of reading its weights, at the measured rate of weights.
All models take turns in one process and read what the model sampled; ratios are of medians. `--clock cpu` counts
processor time, for one thread on a machine that does other things, too.
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

from expertly.api import handle
from expertly.data import demo_folder
from expertly.engine.process import keep_off_trapped_instructions
from expertly.hardware.measure import measure_weights_rate
from expertly.model.hooks import CACHE
from expertly.native.kernels import VARIABLE

IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
PAST = 16  # tokens


def seconds(model: Any, ids: torch.Tensor, cache: Any, clock: Callable[[], float]) -> float:
    """Of one forward pass."""
    start = clock()
    model(ids, use_cache=True, **{CACHE: cache})
    return clock() - start


def without_programs(model: Any) -> None:
    for module in model.modules():
        if "_expertly_graphs" in module.__dict__:
            module._expertly_graphs = None


def layer_nbytes(model: Any) -> float:
    """Weights that one token reads in a decoder layer, in the mean."""
    geometry, layers = handle(model).engine.executor.geometry, model.get_decoder().layers
    dense = sum(tensor.nbytes for tensor in layers.parameters())
    return float(dense + sum(layer.top_k * layer.expert_nbytes for layer in geometry.layers)) / len(layers)


@torch.no_grad()
def main() -> None:
    keep_off_trapped_instructions()
    args = options(
        __doc__, experts_gib=3.0, rounds=7, prefill=256, decode=16, threads=torch.get_num_threads(),
        kernels="auto", cached="", programs="on", clock=tuple(CLOCKS),
    )  # fmt: skip
    clock = CLOCKS[args.clock]
    torch.set_num_threads(args.threads)
    folder = inflated_model(args.experts_gib) if args.experts_gib else demo_folder()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    models: dict[str, Any] = {f"transformers {name}": plain for name in IMPLEMENTATIONS}
    systems = [("resident", "100%"), *(("lru", memory) for memory in args.cached.split(",") if memory)]
    for kernels in args.kernels.split(","):
        os.environ[VARIABLE] = kernels
        for system, memory in systems:
            for programs in args.programs.split(","):
                model, tokenizer = expertly.load(str(folder), system=system, memory=memory, device="cpu")
                how = expertly.stats(model).as_dict()["kernels"]["name"]
                if programs == "off":
                    how += ", no programs"
                    without_programs(model)
                models[f"{system} {'' if system == 'resident' else memory + ' '}{how}"] = model
    torch.manual_seed(0)
    first, num_tokens = tokenizer("The", return_tensors="pt")["input_ids"], PAST + args.decode
    most = max(args.prefill, (args.rounds + 1) * num_tokens)
    text = plain.generate(first, do_sample=True, temperature=0.8, min_new_tokens=most, max_new_tokens=most)
    decode, prefill = ({name: list[float]() for name in models} for _ in range(2))
    for number in range(args.rounds + 1):
        for name, model in models.items():
            if model is plain:
                plain.set_experts_implementation(name.split()[1])
            ids = text[:, number * num_tokens : (number + 1) * num_tokens]
            cache = getattr(model(ids[:, :PAST], use_cache=True), CACHE)
            decoded = [seconds(model, token, cache, clock) for token in ids[:, PAST:].split(1, dim=1)]
            filled = []
            if name != "transformers batched_mm":  # copies every token's experts: hopeless in prefill
                filled.append(seconds(model, text[:, : args.prefill], None, clock))
            if number:  # the first warms up
                decode[name] += decoded
                prefill[name] += filled
    rows: list[dict[str, Any]] = []
    rate = measure_weights_rate(torch.device("cpu"), torch.bfloat16, 2.0)
    for name, model in models.items():
        decode_ms = 1e3 * statistics.median(decode[name])
        filled_ms = 1e3 * statistics.median(prefill[name]) if prefill[name] else None
        rows.append({"name": name, "decode_ms": decode_ms, "layer_ms": decode_ms / plain.config.num_hidden_layers})
        hits = None if model is plain else expertly.stats(model).as_dict()["phases"]["decode"]["hit_rate"]
        rows[-1] |= {"prefill_ms": filled_ms, "hits": hits}
        if model is not plain:
            rows[-1]["beyond_ms"] = rows[-1]["layer_ms"] - 1e3 * layer_nbytes(model) / rate
    for key in ("decode", "prefill"):
        fastest = min(row[f"{key}_ms"] for row in rows[: len(IMPLEMENTATIONS)] if row[f"{key}_ms"])
        for row in rows:
            row[f"{key}_ratio"] = row[f"{key}_ms"] / fastest if row[f"{key}_ms"] else None
    print_report("resident", rows, vars(args))


if __name__ == "__main__":
    main()

"""A model with a table of 1 GiB, in a cgroup that is 800 MiB smaller where the table stays in the store.

    python bench/tables.py [--tokens 60] [--rounds 3] [--out bench/results/tables.json]

A Gemma 4 of random weights, whose per-layer embeddings are the table. `resident`: it is in memory, as other weights
are; `rows`: it is read by row, as by default. Each in a process and a memory cgroup of its own, in turns; the first
tokens are not timed. `to_resident`: tokens a second over those of the resident one, the median of the rounds. The
tokens are the same. Bound: 0.95, and the smaller cgroup is too small for the resident table.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import bench_folder, child, memory_cgroup, options, print_report, run

MIB = 1 << 20
LESS_NBYTES = 800 * MIB
NUM_ROWS, NUM_LAYERS, WIDTH = 65536, 16, 512
PROMPT_TOKENS, WARM_TOKENS = 16, 8


def make_model(folder: Any) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING["gemma4_text"](
        vocab_size=NUM_ROWS, vocab_size_per_layer_input=NUM_ROWS, hidden_size=WIDTH, hidden_size_per_layer_input=WIDTH,
        num_hidden_layers=NUM_LAYERS, intermediate_size=WIDTH, moe_intermediate_size=WIDTH, enable_moe_block=True,
        num_experts=32, top_k_experts=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, global_head_dim=64,
        num_kv_shared_layers=0, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def decode(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tokens, and how many a second."""
    from expertly.model import tables

    if arguments["is_resident"]:
        tables.TABLE_NBYTES = 1 << 40
    model, _ = expertly.load(arguments["store"], memory="50%", device="cpu", verify="never")
    ids = torch.randint(4, NUM_ROWS, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    number = arguments["tokens"]
    model.generate(ids, max_new_tokens=WARM_TOKENS, do_sample=False)
    begin = time.perf_counter()
    tokens = model.generate(ids, max_new_tokens=number, min_new_tokens=number, do_sample=False)[0].tolist()
    return {"tokens": tokens, "per_s": number / (time.perf_counter() - begin)}


def main() -> None:
    args = options(__doc__, tokens=60, rounds=3, out=None)
    from expertly.model.packing import pack
    from expertly.store.packed import PackedStore

    source = bench_folder() / "table-of-1-gib"
    folder = source.with_name(f"{source.name}-store")
    if not (source / "config.json").exists():
        make_model(source)
    store = PackedStore.open(folder) if (folder / "manifest.json").exists() else pack(source, folder)
    whole = store.dense_nbytes + store.experts_nbytes // 2 + 400 * MIB  # beside weights
    rates: dict[str, list[float]] = {"resident": [], "rows": []}
    texts = []
    for _ in range(args.rounds):
        for kind, limit in (("resident", whole), ("rows", whole - LESS_NBYTES)):
            asked = {"store": str(folder), "is_resident": kind == "resident", "tokens": args.tokens}
            with memory_cgroup(limit) as group:
                made = child("tables.py", asked, group)
            rates[kind].append(made["per_s"])
            texts.append(made["tokens"])
    if any(text != texts[0] for text in texts):
        raise SystemExit("the tokens differ")
    rows = [
        {
            "table": kind,
            "limit_mib": (whole - LESS_NBYTES * (kind == "rows")) // MIB,
            "tokens_per_s": statistics.median(rates[kind]),
            "to_resident": statistics.median(
                rate / other for rate, other in zip(rates[kind], rates["resident"], strict=True)
            ),
        }
        for kind in rates
    ]
    rows.append(refused(folder, whole - LESS_NBYTES, args.tokens))
    print_report("tables", rows, {"tokens": args.tokens, "rounds": args.rounds}, args.out)


def refused(folder: Any, limit: int, num_tokens: int) -> dict[str, Any]:
    """The resident table in the smaller cgroup."""
    try:
        with memory_cgroup(limit) as group:
            child("tables.py", {"store": str(folder), "is_resident": True, "tokens": num_tokens}, group)
        ended = "ran"
    except (OSError, RuntimeError, SystemExit) as error:
        ended = str(error).rpartition(": ")[2]
    return {"table": "resident", "limit_mib": limit // MIB, "status": ended}


if __name__ == "__main__":
    run(main, decode)

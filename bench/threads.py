"""What leaving readers that decode some of the processors brings: passes with all threads of torch, and with fewer.

    python bench/threads.py [--memory 25%] [--prompts 16,128,512,1024,2048] [--rounds 6] [--steps 6] [--experts-gib 3]

One process, one model with compressed experts, random tokens: prompts, and steps of decode, with and without
`ComputeThreads`, in turns; medians. Rounds in which the virtual machine's host took over 2 % of the processors' time
are repeated.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from typing import Any

import torch
from common import inflated_model, print_report, quietly

import expertly
from expertly.api import handle


def run_prompt(model: Any, dice: random.Random, length: int) -> dict[str, float]:
    ids = torch.tensor([[dice.randrange(5, 2000) for _ in range(length)]])
    start = time.perf_counter()
    model(ids, use_cache=False, logits_to_keep=1)
    return {"seconds": time.perf_counter() - start}


def run_steps(model: Any, dice: random.Random, num_steps: int) -> dict[str, float]:
    """A step after a short prompt; the first one is not timed."""
    cache = model(torch.tensor([[dice.randrange(5, 2000) for _ in range(16)]]), use_cache=True).past_key_values
    start = 0.0
    for number in range(num_steps + 1):
        if number == 1:
            start, before = time.perf_counter(), expertly.stats(model).as_dict()
        model(torch.tensor([[dice.randrange(5, 2000)]]), past_key_values=cache, use_cache=True)
    seconds, after = time.perf_counter() - start, expertly.stats(model).as_dict()
    mb = (after["bytes_loaded"] - before["bytes_loaded"]) / num_steps / 1e6
    return {"seconds": seconds / num_steps, "mb_loaded": mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="25%")
    parser.add_argument("--prompts", default="16,128,512,1024,2048", help="their tokens, commas between")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6, help="of decode, in each round")
    parser.add_argument("--experts-gib", type=float, default=3.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    path = inflated_model(args.experts_gib, no_zeros=True)
    model, _ = expertly.load(str(path), system="lru", memory=args.memory, codec="planes", device="cpu")
    engine, dice = handle(model).engine, random.Random(0)
    fewer = engine.threads
    assert fewer is not None
    rule = fewer.max_tokens_per_expert
    works = {"a step": partial(run_steps, model, dice, args.steps)}
    works |= {f"{n} tokens": partial(run_prompt, model, dice, n) for n in map(int, args.prompts.split(","))}
    rows = []
    with torch.no_grad():
        works["a step"]()
        fewer.max_tokens_per_expert = float("inf")  # what the rule would be decided by is measured here
        for name, work in works.items():
            seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for turn in range(args.rounds):
                for is_fewer in (True, False) if turn % 2 else (False, True):
                    engine.threads = fewer if is_fewer else None
                    found, stolen = quietly(work, tries=3)
                    seen[is_fewer].append(found | {"stolen": stolen})
            row: dict[str, Any] = {"pass": name}
            for is_fewer, runs in seen.items():
                threads = fewer.num_beside if is_fewer else torch.get_num_threads()
                row |= {f"{key}_{threads}_threads": statistics.median(run[key] for run in runs) for key in runs[0]}
            few, all_ = (statistics.median(run["seconds"] for run in seen[is_fewer]) for is_fewer in (True, False))
            rows.append(row | {"fewer_to_all": few / all_})
    expertly.unload(model)
    print_report("threads", rows, vars(args) | {"max_tokens_per_expert": rule}, args.out)


if __name__ == "__main__":
    main()

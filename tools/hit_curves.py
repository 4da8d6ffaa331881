"""Hit rate of an LRU cache a layer at each share of the experts, from recorded routing: what `expertly doctor` expects.

    python tools/hit_curves.py FAMILY=NAME=FILE.npz ... [--tokens 6000]

FAMILY is transformers' model type, and NAME is shown. A file has `experts` [tokens, layers, top-k] and `seq_len`, as
routing of gpt-oss-20b and DeepSeek-V2-Lite is published. Writes src/expertly/data/hit_curves.json.

An expert is a hit where fewer others of its layer were used since its last use than there are places (stack distance,
Mattson et al. 1970): one pass gives the curve. The first uses of all are left out: they are the start of a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

OUT = Path(__file__).resolve().parent.parent / "src" / "expertly" / "data" / "hit_curves.json"
SHARES = [round(0.05 * step, 2) for step in range(1, 21)]


def curve(experts: np.ndarray) -> list[float]:
    """`experts`: [tokens, layers, top-k]. The hit rate at each of SHARES, between whole places interpolated."""
    num_experts = int(experts.max()) + 1
    at_distance = np.zeros(num_experts)
    for layer in range(experts.shape[1]):
        stack: list[int] = []
        for chosen in experts[:, layer].tolist():
            for expert in chosen:
                if expert in stack:
                    distance = stack.index(expert)
                    at_distance[distance] += 1
                    del stack[distance]
                stack.insert(0, expert)
    hits = [0.0, *(at_distance.cumsum() / at_distance.sum())]
    return [round(float(np.interp(share * num_experts, range(num_experts + 1), hits)), 3) for share in SHARES]


def main() -> None:
    arguments = sys.argv[1:]
    num_tokens = int(arguments.pop(arguments.index("--tokens") + 1)) if "--tokens" in arguments else 6000
    curves = []
    for text in (one for one in arguments if one != "--tokens"):
        family, name, file = text.split("=")
        experts = np.load(file)["experts"][:num_tokens]
        of = {"family": family, "name": name, "num_experts": int(experts.max()) + 1, "top_k": experts.shape[2]}
        curves.append({**of, "tokens": len(experts), "hit_rate": curve(experts)})
    if not curves:
        sys.exit(__doc__)
    rows = ",\n  ".join(json.dumps(one) for one in curves)
    OUT.write_text(f'{{"shares": {json.dumps(SHARES)},\n "curves": [\n  {rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()

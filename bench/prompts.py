"""The prompts of the recorded benchmarks: 240 of five public sets, by category.

    python bench/prompts.py FOLDER prompts.jsonl
    expertly trace record --prompts prompts.jsonl --out TRACE --full --max-new-tokens 64 --temperature 0.8

FOLDER holds the sets as gzipped JSON Lines with a "prompt" each, under the names below; 600 characters of each count.
"""

from __future__ import annotations

import gzip
import json
import sys
from itertools import islice
from pathlib import Path

SETS = (
    ("mt_bench", "mt_bench.jsonl.gz", 60),
    ("self_instruct", "self_instruct_user_oriented_252.jsonl.gz", 60),
    ("gsm8k", "gsm8k_test.jsonl.gz", 40),
    ("codegen", "codegen_instruct.jsonl.gz", 40),
    ("flan", "flan_cot_sample.jsonl.gz", 40),
)
MAX_CHARACTERS = 600


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, out = map(Path, sys.argv[1:])
    with out.open("w", encoding="utf-8") as file:
        for category, name, count in SETS:
            with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
                for line in islice(lines, count):
                    prompt = json.loads(line)["prompt"][:MAX_CHARACTERS]
                    file.write(json.dumps({"prompt": prompt, "category": category}) + "\n")


if __name__ == "__main__":
    main()

"""The prompts of the recorded benchmarks: of five public sets, by category; 240, unless said.

    python bench/prompts.py FOLDER prompts.jsonl [--counts 60,60,40,40,40]
    expertly lab trace record --prompts prompts.jsonl --out TRACE --full --max-new-tokens 64 --temperature 0.8
    (docs/results.md: `demo240s`, with 128 tokens)
    python bench/prompts.py FOLDER long.jsonl --counts 10,10,8,8,8
    expertly lab trace record --prompts long.jsonl --out LONG --full --max-new-tokens 256 --temperature 0.8

FOLDER holds the sets as gzipped JSON Lines with a "prompt" each, under the names below; the first of each are taken,
and 600 characters of each count.
"""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

from common import options

SETS = {
    "mt_bench": "mt_bench.jsonl.gz",
    "self_instruct": "self_instruct_user_oriented_252.jsonl.gz",
    "gsm8k": "gsm8k_test.jsonl.gz",
    "codegen": "codegen_instruct.jsonl.gz",
    "flan": "flan_cot_sample.jsonl.gz",
}
MAX_CHARACTERS = 600


def main() -> None:
    args = options(__doc__, "folder", "out", counts="60,60,40,40,40")
    counts = [int(count) for count in args.counts.split(",")]
    with Path(args.out).open("w", encoding="utf-8") as file:
        for (category, name), count in zip(SETS.items(), counts, strict=True):
            with gzip.open(Path(args.folder) / name, "rt", encoding="utf-8") as lines:
                for line in islice(lines, count):
                    prompt = json.loads(line)["prompt"][:MAX_CHARACTERS]
                    file.write(json.dumps({"prompt": prompt, "category": category}) + "\n")


if __name__ == "__main__":
    main()

"""How long a session takes to come back from `--kv-disk`: its pages are read, not from the page cache, checked and put
into a cache's memory, as a server does before it computes what is new.

    python bench/kv_pages.py --tokens 8000 --folder DIR
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from expertly.native.kernels import STEP_NBYTES
from expertly.serve.memory import PAGE_TOKENS
from expertly.store.pages import NUM_READERS, KeptPages

SHAPES = {"demo": (12, 2, 32), "Qwen3-30B-A3B": (48, 4, 128)}
"""Layers, key heads and numbers of a head."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for name, (layers, heads, width) in SHAPES.items():
        for kind, row_nbytes in (("bfloat16", 2 * width), ("8 bits", width + STEP_NBYTES)):
            nbytes = PAGE_TOKENS * layers * heads * 2 * row_nbytes
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                seconds = sorted(_read(Path(folder), nbytes, args.tokens) for _ in range(args.rounds))
            total = args.tokens // PAGE_TOKENS * nbytes
            print(f"{name}, {kind}: {total / 2**20:.0f} MiB in {seconds[len(seconds) // 2]:.2f} s", flush=True)


def _read(folder: Path, page_nbytes: int, num_tokens: int) -> float:
    """Seconds."""
    tokens, num_pages = range(num_tokens), num_tokens // PAGE_TOKENS
    pages = KeptPages(folder, 2 * num_pages * (page_nbytes + 64), b"")
    for page in pages.names(tokens, PAGE_TOKENS):
        if page not in pages:
            pages.write(page, os.urandom(page_nbytes))
    pages.close()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pages, memory = KeptPages(folder, 1 << 60, b""), torch.zeros(num_pages, page_nbytes, dtype=torch.uint8)
    begin = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        assert all(
            readers.map(pages.read, pages.names(tokens, PAGE_TOKENS), [memoryview(row.numpy()) for row in memory])
        )
    seconds = time.perf_counter() - begin
    pages.close()
    return seconds


if __name__ == "__main__":
    main()

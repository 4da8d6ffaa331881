"""How small and how fast zstd's parameters make experts: those that stores are made with, and its levels, in turns.

    python bench/decode.py STORE... [--rounds 5] [--out FILE]

Each STORE is a packed one in codec planes. Frames of some of its experts are encoded again with each set of parameters
and decoded by one thread, each to a place of its own, round by round in turns; the best round counts. `to_level_1` is
the decoding speed over that of level 1, `to_numpy` over that with planes joined by NumPy; `zstd_gb_per_s` is
decompressing alone, per byte of weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from common import print_report

from expertly.store.codec_choice import index_of, sampled
from expertly.store.frames import EncodedFrame, FrameDecoder, FrameEncoder, read_frames, zstd_parameters
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile

LEVELS = (1, 3, -1)


def best_s(works: list[Callable[[], None]], rounds: int) -> list[float]:
    """Of each, in turns."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for number, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def decoding(
    frames: list[EncodedFrame], frame_nbytes: int, itemsize: int, out: memoryview, is_compiled: bool = True
) -> Callable[[], None]:
    index = index_of(frames, frame_nbytes, itemsize)
    stored = [memoryview(frame.stored) for frame in frames]
    decoder = FrameDecoder(is_compiled)

    def work() -> None:
        for number, one in enumerate(stored):
            decoder.decode(index, number, 0, one, out[number * frame_nbytes : (number + 1) * frame_nbytes])

    return work


def decompressing(frames: list[EncodedFrame], plane_nbytes: int) -> Callable[[], None]:
    decompressor, plane = zstandard.ZstdDecompressor(), np.empty(plane_nbytes, np.uint8)

    def work() -> None:
        for frame in frames:
            begin = 0
            for nbytes in frame.plane_nbytes:
                if nbytes < plane_nbytes:
                    decompressor.stream_reader(frame.stored[begin : begin + nbytes]).readinto(plane)
                begin += nbytes

    return work


def rows_of(folder: Path, rounds: int) -> list[dict[str, Any]]:
    store = PackedStore.open(folder)
    layer = store.manifest.layers[0]
    frame_nbytes = store.frames[0].frame_nbytes
    experts = []
    for one, expert in sampled(store.manifest.layers):
        with closing(ExpertFile(store.frames[one].path)) as file:
            experts.append([decoded.copy() for _, decoded in read_frames(file, store.frames[one], [expert])])
    named = {f"level {level}": zstandard.ZstdCompressionParameters.from_level(level) for level in LEVELS}
    named["as stored"] = zstd_parameters()
    encoded = {
        name: [frame for expert in experts for frame in FrameEncoder(frame_nbytes, layer.itemsize, one).encode(expert)]
        for name, one in named.items()
    }
    total = len(next(iter(encoded.values()))) * frame_nbytes
    out = memoryview(bytearray(total))
    works = [decoding(frames, frame_nbytes, layer.itemsize, out) for frames in encoded.values()]
    works += [decompressing(frames, frame_nbytes // layer.itemsize) for frames in encoded.values()]
    works += [decoding(frames, frame_nbytes, layer.itemsize, out, is_compiled=False) for frames in encoded.values()]
    seconds = best_s(works, rounds)
    return [
        {
            "store": folder.name,
            "frame_bytes": frame_nbytes,
            "parameters": name,
            "ratio": sum(len(frame.stored) for frame in frames) / total,
            "gb_per_s": total / seconds[number] / 1e9,
            "zstd_gb_per_s": total / seconds[number + len(encoded)] / 1e9,
            "to_level_1": seconds[0] / seconds[number],
            "to_numpy": seconds[number + 2 * len(encoded)] / seconds[number],
        }
        for number, (name, frames) in enumerate(encoded.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = [row for folder in args.stores for row in rows_of(folder, args.rounds)]
    print_report("decode", rows, {"rounds": args.rounds}, args.out)


if __name__ == "__main__":
    main()

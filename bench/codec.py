"""Tokens per second with experts stored as they are and compressed; same tokens, in turns.

    python bench/codec.py TRACE [--systems lru,moepic] [--memory 25%] [--disk-mb-per-s 0]
                                [--requests 3] [--tokens 24] [--experts-gib 3]

Each configuration is a process of its own in a memory cgroup of the budget and 600 MB; they take turns, request by
request, so that the machine is the same for all. `ratio` is the median over requests of a configuration's tokens per
second to those of `none` with the same system. `--disk-mb-per-s` gives each process a disk of that rate by a blkio
cgroup (version 1; 0: the disk as it is); its row says what reads from it came at. The model's weights are as hard to
compress as trained ones (`tools/inflate_model.py --no-zeros`). The tokens fed are of requests of the demo model.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import cgroup, drop_page_cache, inflated_model, memory_cgroup, options, print_report
from tpot import requests_of

from expertly.engine.process import keep_off_trapped_instructions

MARGIN_NBYTES = 600 * 10**6
KEPT = ("bytes_loaded", "bytes_disk", "bytes_decoded", "decode_s", "stall_s")


class Player:
    """A process with one model, which runs a request when it is told to. Raises EOFError where it ends before."""

    def __init__(self, settings: dict[str, Any], groups: list[Path]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._end, its_end = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(its_end, settings, groups))
        self._process.start()
        its_end.close()
        self.loaded: dict[str, Any] = self._end.recv()

    def play(self, request: tuple[list[int], int]) -> dict[str, Any]:
        self._end.send(request)
        answer: dict[str, Any] = self._end.recv()
        return answer

    def close(self) -> None:
        self._end.close()
        self._process.join(60)


def throttled(folder: Path, mb_per_s: int) -> AbstractContextManager[Path]:
    """A blkio cgroup whose processes read the disk of `folder` so fast."""
    device = os.stat(folder).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {mb_per_s * 10**6}"
    return cgroup("blkio", "blkio.throttle.read_bps_device", limit)


def serve(pipe: Connection, arguments: dict[str, Any], groups: list[Path]) -> None:
    """In a child: load, and then run each request that comes in, until there are no more."""
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    keep_off_trapped_instructions()
    import torch

    import expertly
    from expertly.api import handle
    from expertly.engine.process import peak_rss_nbytes
    from expertly.store.codec_choice import disk_rate_of

    asked = {name: arguments[name] for name in ("system", "memory", "segments", "codec")}
    model, _ = expertly.load(arguments["model"], learned="off", device="cpu", **asked)
    rate = disk_rate_of(path for path, _ in handle(model).store.extents)
    chosen = expertly.stats(model).as_dict()
    pipe.send({"codec_is": chosen["codec"]["name"], "disk_bytes_per_s": rate, "why": chosen["codec"]["why"]})
    with torch.no_grad(), suppress(EOFError):
        while True:
            ids, num_prompt = pipe.recv()
            tokens, greedy = torch.tensor([ids]), []
            out = model(tokens[:, :num_prompt], use_cache=True, logits_to_keep=1)
            before, start = expertly.stats(model).as_dict(), time.perf_counter()
            for i in range(num_prompt, len(ids)):
                out = model(tokens[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
                greedy.append(int(out.logits[0, -1].argmax()))
            count, seconds = len(ids) - num_prompt, time.perf_counter() - start
            after = expertly.stats(model).as_dict()
            decode, earlier = after["phases"]["decode"], before["phases"]["decode"]
            hits, demands = (
                sum(decode[key] - earlier[key] for key in keys)
                for keys in (("hits",), ("hits", "partial_hits", "misses"))
            )
            answer = {f"{key}_a_token": (after[key] - before[key]) / count for key in KEPT}
            answer |= {"tokens_per_s": count / seconds, "hit_rate": hits / demands, "greedy": greedy}
            pipe.send(answer | {"peak_rss_bytes": peak_rss_nbytes()})
    expertly.unload(model)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a configuration."""
    from expertly.core.resources import parse_memory
    from expertly.model.packing import pack_cached
    from expertly.sim.schedule import Selection, make_schedule
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(args.trace))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=args.seed))
    requests = requests_of(trace, schedule, {"requests": args.requests + 1, "tokens": args.tokens})
    model = inflated_model(args.experts_gib, no_zeros=True)
    stores = [pack_cached(model, codec=codec) for codec in ("none", "planes")]
    for store in stores:
        drop_page_cache(store.folder)
    nbytes = parse_memory(args.memory, stores[0].experts_nbytes)
    assert nbytes is not None
    limit = nbytes + stores[0].dense_nbytes + MARGIN_NBYTES
    rows = [
        {"system": system, "codec": codec} for system in args.systems.split(",") for codec in ("none", "planes", "auto")
    ]
    with ExitStack() as stack:
        players = []
        for row in rows:
            groups = [stack.enter_context(memory_cgroup(limit))]
            if args.disk_mb_per_s:
                groups.append(stack.enter_context(throttled(stores[0].folder, args.disk_mb_per_s)))
            settings = row | {"model": str(model), "memory": args.memory, "segments": args.segments}
            players.append(Player(settings, groups))
            stack.callback(players[-1].close)
        answers: list[list[dict[str, Any]]] = [[] for _ in rows]
        for turn, request in enumerate(requests):
            order = [(turn + i) % len(rows) for i in range(len(rows))]
            for number in order:
                answers[number].append(players[number].play(request))
    same = {str([one.pop("greedy") for one in of_row]) for of_row in answers}
    assert len(same) == 1, "the codec changed a token"
    for row, player, of_row in zip(rows, players, answers, strict=True):
        warm = of_row[1:]  # the first request fills the caches
        row |= {key: player.loaded[key] for key in ("codec_is", "disk_bytes_per_s")}
        none = next(of for one, of in zip(rows, answers, strict=True) if one["system"] == row["system"])[1:]
        row["ratio"] = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(warm, none, strict=True))
        row |= {key: statistics.mean(one[key] for one in warm) for key in warm[0]}
        row["peak_rss_bytes"] = max(one["peak_rss_bytes"] for one in of_row)
        row |= {"limit_bytes": limit, "why": player.loaded["why"]}
    return rows


def main() -> None:
    args = options(
        __doc__, "trace", systems="lru,moepic", memory="25%", segments=None, disk_mb_per_s=0, requests=3, tokens=24,
        experts_gib=3.0, seed=0, out=None,
    )  # fmt: skip
    keep_off_trapped_instructions()
    args.segments = None if args.segments is None else int(args.segments)
    rows = measure(args)
    settings = {key: value for key, value in vars(args).items() if key not in ("trace", "out")}
    whys = {f"{row['system']} {row['codec']}": row.pop("why") for row in rows}
    print_report("codec", rows, settings | {"whole_model_gib": args.experts_gib, "whys": whys}, args.out)


if __name__ == "__main__":
    main()

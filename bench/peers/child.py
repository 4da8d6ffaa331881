"""What runs in a peer's process: load, and then a request for each line that comes in, until there are no more.

Imports nothing but what its peer needs: all of it counts as the peer's memory.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, Protocol

PEERS = {
    "expertly": "with_expertly",
    "accelerate": "with_accelerate",
    "llama.cpp": "with_llama_cpp",
    "ftllm": "with_ftllm",
    "neurostream": "with_neurostream",
}
"""Module of each; its `load(settings)` gives a Peer."""


class Peer(Protocol):
    """A loaded model with one sequence."""

    def begin(self, token_ids: list[int], num_threads: int) -> int:
        """Forget the sequence, run this prompt; the token it would choose."""
        ...

    def step(self, token_id: int) -> int:
        """Append a token; the token it would choose next."""
        ...

    def facts(self) -> dict[str, Any]:
        """What it says of itself; counters that grow are named in `counters`."""
        ...


def _io(name: str) -> int:
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def _peak_rss_nbytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def play(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Times in seconds; the tokens fed are those of the request, whatever the model would choose."""
    ids, num_prompt = request["ids"], request["num_prompt"]
    start = time.perf_counter()
    greedy = [peer.begin(ids[:num_prompt], request["threads"])]
    ttft = time.perf_counter() - start
    read, before = _io("read_bytes"), peer.facts()
    start = time.perf_counter()
    greedy += [peer.step(token) for token in ids[num_prompt:]]
    seconds, count = time.perf_counter() - start, len(ids) - num_prompt
    facts = peer.facts()
    counted = {
        f"{name}_a_token": (facts[name] - before[name]) / count for name in facts.get("counters", ()) if name in before
    }
    return {
        "ttft_s": ttft,
        "tpot_s": seconds / count,
        "bytes_read_a_token": (_io("read_bytes") - read) / count,
        **counted,
        "peak_rss_bytes": _peak_rss_nbytes(),
        "greedy": greedy,
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    start = time.perf_counter()
    try:
        peer: Peer = importlib.import_module(PEERS[settings["peer"]]).load(settings)
    except Exception as error:  # a process's entry: the parent says it
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    loaded = {"load_s": time.perf_counter() - start, "peak_rss_bytes": _peak_rss_nbytes(), "facts": peer.facts()}
    print(json.dumps(loaded), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(play(peer, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

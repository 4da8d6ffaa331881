"""A server under mixed load for minutes: does its memory grow, does it lose threads, descriptors or places?

    python bench/soak.py [--minutes 10] [--clients 12] [--memory 40%]

Bounds: less than 2 % growth of resident memory after the first fifth; as many threads and descriptors at the end as
then; nobody runs, waits or holds pages when all clients have gone; no request fails for a reason of ours.
Clients stream, ask for whole answers, several texts, samples and log probabilities, stop at strings, leave in the
middle, and send what is refused. The server is `expertly serve` in a process of its own, in float32.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import options, print_report

WORDS = ("the", "old", "sea", "king", "winter", "code", "river", "doctor", "ship", "garden", "letter", "small", "house")


class Client(threading.Thread):
    """Asks one thing after another until it is told to end."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__()
        self._port = port
        self._random = random.Random(seed)
        self.must_end = threading.Event()
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        while not self.must_end.is_set():
            kind = self._random.choice(("stream", "whole", "several", "sampled", "leaving", "refused", "large"))
            try:
                self.outcomes[f"{kind} {self._ask(kind)}"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[f"{kind} {type(error).__name__}"] += 1

    def _ask(self, kind: str) -> int:
        prompt = " ".join(self._random.choices(WORDS, k=self._random.randint(1, 60)))
        body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": self._random.randint(1, 48)}
        if kind in ("stream", "leaving"):
            body |= {"stream": True, "temperature": 0}
        elif kind == "several":
            body |= {"n": 3, "logprobs": 2}
        elif kind == "sampled":
            body |= {"top_p": 0.9, "seed": self._random.randint(0, 99), "stop": ["the"], "frequency_penalty": 0.5}
        elif kind == "refused":
            body |= self._random.choice([{"temperature": 9}, {"model": "other"}, {"prompt": None}, {"max_tokens": 0}])
        elif kind == "large":
            body |= {"prompt": "word " * 400}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if kind == "leaving":
                response.readline()
            else:
                response.read()
            return response.status
        finally:
            connection.close()


def reading(process: int) -> dict[str, int]:
    """Of a process: resident bytes, threads, descriptors."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]) << 10,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
    }


def state_of(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/state")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def main() -> None:
    args = options(__doc__, minutes=10.0, clients=12, memory="40%", system="fmoe")
    command = [sys.executable, "-m", "expertly", "serve", "--port", "0", "--json", "--dtype", "float32"]
    command += ["--memory", args.memory, "--system", args.system]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
    clients = [Client(port, seed) for seed in range(args.clients)]
    for client in clients:
        client.start()
    end = time.monotonic() + 60 * args.minutes
    readings = []
    while time.monotonic() < end:
        time.sleep(min(5.0, 6 * args.minutes))
        readings.append(reading(server.pid))
    for client in clients:
        client.must_end.set()
    for client in clients:
        client.join()
    time.sleep(2)
    readings.append(reading(server.pid))
    state = state_of(port)
    server.send_signal(signal.SIGTERM)
    status = server.wait(120)
    outcomes: Counter[str] = sum((client.outcomes for client in clients), Counter())
    warm = readings[len(readings) // 5]
    tail = readings[-max(3, len(readings) // 10) : -1] or readings[-1:]
    row: dict[str, Any] = {
        "minutes": args.minutes,
        "requests": sum(outcomes.values()),
        "rss_warm": warm["rss"],
        "rss_end": max(one["rss"] for one in tail),
        "growth": max(one["rss"] for one in tail) / warm["rss"] - 1,
        "threads_warm": warm["threads"],
        "threads_end": readings[-1]["threads"],
        "descriptors_warm": warm["descriptors"],
        "descriptors_end": readings[-1]["descriptors"],
        "running": state["running"],
        "waiting": state["waiting"],
        "pages_held": state["kv_pages"] - state["kv_pages_free"],
        "exit": status,
    }
    print_report("soak", [row], {**vars(args), "outcomes": dict(sorted(outcomes.items()))})


if __name__ == "__main__":
    main()

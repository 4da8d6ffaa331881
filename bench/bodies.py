"""Large and hostile requests to a server in a memory cgroup of exactly its --total-memory: nothing may be killed.

    python bench/bodies.py [--requests 1000] [--memory-mib 520] [--clients 4]

Needs memory cgroups of version 1. Fails where the server or a process of it was killed, a plain request was not
answered, or a hostile one got another status than its own. "closed": answered before the client had sent all.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from common import memory_cgroup, options, print_report

MIB = 1 << 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def schema(value: Any) -> dict[str, Any]:
    wish = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    return {"messages": user("Hi"), "response_format": wish}


Make = Callable[[random.Random], Any]

HOSTILE: list[tuple[str, Make]] = [
    (TEXT, lambda r: {"prompt": "a" * r.randint(MIB, 4 * MIB - 200)}),
    (TEXT, lambda r: {"prompt": "\N{SLIGHTLY SMILING FACE}" + "a" * r.randint(MIB, 4 * MIB - 200)}),
    (TEXT, lambda r: {"prompt": "hello world " * r.randint(2000, 5400)}),
    (CHAT, lambda r: {"messages": user("b " * r.randint(MIB // 2, 2 * MIB - 200))}),
    (CHAT, lambda r: {"messages": user([{"type": "text", "text": "c" * 4000}] * 250) * 4}),
    (CHAT, lambda r: {"messages": user([{"type": "text", "text": "a"}] * 250) * r.randint(100, 400)}),
    (CHAT, lambda r: {"messages": [[]] * r.randint(10_000, 1_300_000)}),
    (CHAT, lambda r: {"messages": [{}] * r.randint(10_000, 1_000_000)}),
    (TEXT, lambda r: {"prompt": [r.randint(1, 99)] * r.randint(2000, 900_000)}),
    (
        CHAT,
        lambda r: {
            "messages": user("x"),
            "max_tokens": 4,
            "extra": ["\N{SLIGHTLY SMILING FACE}" * 100] * r.randint(9, 1500),
        },
    ),
    (CHAT, lambda r: {"messages": user("x" * 40_000), "tools": [{}] * 60_000}),
    (CHAT, lambda r: schema({"properties": {f"p{n}": {} for n in range(r.randint(600, 9000))}})),
    (CHAT, lambda r: schema({"type": "integer", "multipleOf": r.randint(10**6, 10**7)})),
    (CHAT, lambda r: schema({"required": [f"p{n}" for n in range(r.randint(2000, 9000))]})),
]
PLAIN: list[tuple[str, Make]] = [
    (TEXT, lambda r: {"prompt": "The old man", "max_tokens": 8}),
    (CHAT, lambda r: {"messages": user("Hello there " * r.randint(1, 60)), "max_tokens": 8}),
    (CHAT, lambda r: schema({"properties": {"a": {"enum": ["b"]}}, "required": ["a"]}) | {"max_tokens": 8}),
]


RIGHT = ("plain 200", "hostile 200", "hostile 400", "hostile 429", "hostile closed")


def rss_mib(group: Path) -> dict[str, int]:
    """Of all processes of a cgroup together: the memory that they take, and what of it is not of files."""
    sums: Counter[str] = Counter()
    for pid in (group / "cgroup.procs").read_text().split():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sums.update({line.split(":")[0]: int(line.split()[1]) >> 10 for line in lines if line.startswith("Rss")})
    return {"rss_mib": sums["RssAnon"] + sums["RssFile"] + sums["RssShmem"], "anonymous_mib": sums["RssAnon"]}


def main() -> None:
    args = options(__doc__, requests=1000, memory_mib=520, clients=4, out=None)
    statuses: Counter[str] = Counter()
    times: list[float] = []
    with memory_cgroup(args.memory_mib * MIB) as group:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, "-m", "expertly", "serve", "--port", "0", "--json"]
        command += ["--total-memory", f"{args.memory_mib}MiB"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        before = rss_mib(group)

        def ask(number: int) -> None:
            dice, is_plain = random.Random(number), bool(number % 2)
            path, make = dice.choice(PLAIN if is_plain else HOSTILE)
            with httpx.Client(base_url=url, timeout=120) as client:
                begin = time.monotonic()
                try:
                    status = str(client.post(path, json={"model": "demo", **make(dice)}).status_code)
                except httpx.TransportError:  # a 413 or a 429 before the body was read
                    status = "closed"
                if is_plain:
                    times.append(time.monotonic() - begin)
            statuses[f"{'plain' if is_plain else 'hostile'} {status}"] += 1

        begin = time.monotonic()
        with ThreadPoolExecutor(args.clients) as clients:
            list(clients.map(ask, range(args.requests)))
        seconds = time.monotonic() - begin
        is_alive = server.poll() is None and httpx.get(f"{url}/health", timeout=60).status_code == 200
        control = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        peak_mib = int((group / "memory.max_usage_in_bytes").read_text()) / MIB
        after = rss_mib(group)
        server.terminate()
        server.wait(60)
        while (group / "cgroup.procs").read_text():  # children that end with it
            time.sleep(0.1)
    row = {
        "requests": args.requests,
        "seconds": seconds,
        "killed": int(control.get("oom_kill", 0)),
        "peak_mib": peak_mib,
    }
    row |= {f"{name} at first": value for name, value in before.items()} | after
    row |= {"plain_s": statistics.median(times), "longest plain_s": max(times)} | dict(sorted(statuses.items()))
    print_report("bodies", [row], vars(args), args.out)
    wrong = [name for name in statuses if name not in RIGHT]
    if wrong or not is_alive or row["killed"]:
        sys.exit(f"wrong: {wrong}, alive: {is_alive}, killed: {row['killed']}")


if __name__ == "__main__":
    main()

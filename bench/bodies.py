"""Large and hostile requests to a server in a memory cgroup of exactly its --total-memory: nothing may be killed.

    python bench/bodies.py --requests 1000

Needs memory cgroups of version 1. Prints one JSON object; fails where the server ended, or a request was answered by
anything but its own status.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

CGROUPS = Path("/sys/fs/cgroup/memory")
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


def sizes_of(group: Path) -> list[dict[str, int]]:
    """MiB of each process: all, at most so far, and what is not of files."""
    found = []
    for pid in (group / "cgroup.procs").read_text().split():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        about = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line and len(line.split()) > 1}
        found.append({name: int(about[name]) >> 10 for name in ("VmRSS", "VmHWM", "RssAnon")})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--memory", type=int, default=520, help="MiB, of the server and of its cgroup")
    parser.add_argument("--clients", type=int, default=4)
    arguments = parser.parse_args()
    group = Path(tempfile.mkdtemp(prefix="expertly-bodies-", dir=CGROUPS))
    (group / "memory.limit_in_bytes").write_text(str(arguments.memory * MIB))
    command = [sys.executable, "-m", "expertly", "serve", "--port", "0", "--json"]
    server = subprocess.Popen(
        [*command, "--total-memory", f"{arguments.memory}MiB"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: Path(group, "cgroup.procs").write_text("0") and None,
    )
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    before = sizes_of(group)
    statuses: Counter[str] = Counter()
    times: list[float] = []

    def ask(number: int) -> None:
        random_ = random.Random(number)
        kind = "plain" if number % 2 else "hostile"
        path, make = random_.choice(PLAIN if number % 2 else HOSTILE)
        body = {"model": "demo", **make(random_)}
        with httpx.Client(base_url=url, timeout=120) as client:
            begin = time.monotonic()
            try:
                status = str(client.post(path, json=body).status_code)
            except httpx.TransportError:  # a 413 or a 429 before the body was read
                status = "closed"
            if number % 2:
                times.append(time.monotonic() - begin)
        statuses[f"{kind} {status}"] += 1

    begin = time.monotonic()
    with ThreadPoolExecutor(arguments.clients) as clients:
        list(clients.map(ask, range(arguments.requests)))
    seconds = time.monotonic() - begin
    is_alive = server.poll() is None and httpx.get(f"{url}/health", timeout=60).status_code == 200
    control = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    usage = int((group / "memory.max_usage_in_bytes").read_text())
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    after = sizes_of(group)
    server.terminate()
    code = server.wait(60)
    for _ in range(50):
        try:
            os.rmdir(group)
            break
        except OSError:
            time.sleep(0.1)
    result = {
        "requests": arguments.requests,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(statuses.items())),
        "is_alive": is_alive,
        "exit_code": code,
        "oom_kills": int(control.get("oom_kill", 0)),
        "limit_mib": arguments.memory,
        "peak_mib": usage / MIB,
        "anonymous_mib": int(fields["total_rss"]) / MIB,
        "processes_mib": {"before": before, "after": after},
        "plain_s": {"median": round(sorted(times)[len(times) // 2], 3), "longest": round(max(times), 3)},
    }
    print(json.dumps(result))
    wrong = [
        name
        for name in statuses
        if name not in ("plain 200", "hostile 200", "hostile 400", "hostile 429", "hostile closed")
    ]
    if wrong or not is_alive or result["oom_kills"]:
        sys.exit(f"wrong: {wrong}, alive: {is_alive}, killed: {result['oom_kills']}")


if __name__ == "__main__":
    main()

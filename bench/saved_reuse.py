"""What `expertly` loads in a process that begins with what earlier ones learned, beside one that begins with nothing.

    python bench/saved_reuse.py TRACE [--memory 25%,50%] [--learn 0,4,16,64] [--requests 16] [--tokens 64] [--seed 1]

The trace is of the demo model (see prompts.py). A process (here: a loaded model that is unloaded again) is fed requests
of the training part, --learn of them; another one then begins with the file that this left, and is fed requests of the
test part, the same tokens each time. With --learn 0 there is no file. `lru` is fed them beside it. Counts only: bytes
loaded a decode step, and hits. They hardly depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import child, child_arguments
from report import print_report


def run(system: str, memory: str, maps: str, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """What decoding them takes, and from how many tokens it had learned before and after."""
    import expertly
    from expertly.lab.playing import feed

    model, _ = expertly.load(None, system=system, memory=memory, maps=maps, codec="none", device="cpu")
    for tokens, num_prompt in requests:
        feed(model, tokens, num_prompt)
    told = expertly.stats(model).as_dict()
    expertly.unload(model)
    decode, reuse = told["phases"]["decode"], told["reuse"] or {}
    return {
        "system": system,
        "memory": memory,
        "learned_from": reuse.get("tokens_read"),
        "loaded_kib_a_step": decode["bytes_loaded"] / max(1, decode["iterations"]) / 1024,
        "hit_rate": decode["hit_rate"],
    }


def measure(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    from tpot import requests_of

    from expertly.sim.schedule import Schedule, Selection, make_schedule
    from expertly.trace.reader import Trace

    trace = Trace.open(Path(arguments["trace"]))
    schedule = make_schedule(trace, Selection(split=(7, 3), seed=arguments["seed"]))
    earlier = Schedule([], schedule.training)
    training = requests_of(trace, earlier, arguments | {"requests": max(arguments["learn"])})
    requests = requests_of(trace, schedule, arguments)
    rows = []
    for memory in arguments["memory"]:
        plain = run("lru", memory, "off", requests)
        rows.append(plain)
        for num in arguments["learn"]:
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "demo.reuse")
                if num:
                    run("expertly", memory, file, training[:num])
                row = run("expertly", memory, file, requests)
            ratio = row["loaded_kib_a_step"] / plain["loaded_kib_a_step"]
            rows.append({**row, "requests_learned_from": num, "to_lru": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE")
    add("--memory", default="25%,50%")
    add("--learn", default="0,4,16,64", help="requests of the training part")
    add("--requests", type=int, default=16)
    add("--tokens", type=int, default=64, help="of each answer")
    add("--seed", type=int, default=1)
    add("--out", metavar="FILE")
    args = parser.parse_args()
    settings = {
        **vars(args),
        "trace": str(args.trace.resolve()),
        "memory": args.memory.split(","),
        "learn": [int(num) for num in args.learn.split(",")],
    }
    print_report("saved_reuse", child("saved_reuse.py", settings, timeout=3000), settings, args.out)


if __name__ == "__main__":
    given = child_arguments()
    if given is None:
        main()
    else:
        print(json.dumps(measure(given)))

"""What recording costs: decode steps of the demo model with and without `expertly lab trace record`'s recorder.

    python bench/record.py [--rounds 15] [--decode 64]

Bound: 1.10 of the step without it, where no routing scores are recorded. On and off take turns in one process, so that
the machine's drift meets them alike; a ratio is the median over the rounds of (median step on / median step off).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from common import print_report

import expertly
from expertly.lab.recording import record

SYSTEMS = {"resident": "100%", "lru": "50%"}
MODES = ("off", "on", "full")


def step_seconds(model: Any, ids: torch.Tensor, num_steps: int) -> float:
    """Median seconds of a decode step, the prompt's cache in place."""
    times = []
    with torch.no_grad():
        cache = model(ids[:, :16], use_cache=True).past_key_values
        for i in range(16, 16 + num_steps):
            start = time.perf_counter()
            model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model: Any, ids: torch.Tensor, num_steps: int, mode: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        recording = nullcontext() if mode == "off" else record(model, Path(folder), full=mode == "full")
        with recording as recorder:
            if recorder is not None:
                recorder.begin_request()
            return step_seconds(model, ids, num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for system, memory in SYSTEMS.items():
        model, _ = expertly.load(None, system=system, memory=memory, device="cpu")
        ids = torch.randint(0, model.config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(0))
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for round_number in range(args.rounds + 1):
            for mode in MODES[round_number % 3 :] + MODES[: round_number % 3]:
                took = measure(model, ids, args.decode, mode)
                if round_number:  # the first warms up
                    seconds[mode].append(took)
        expertly.unload(model)
        row: dict[str, Any] = {"system": system, "memory": memory}
        row |= {f"{mode}_ms": 1e3 * statistics.median(seconds[mode]) for mode in MODES}
        for mode in MODES[1:]:
            row[f"{mode}_ratio"] = statistics.median(
                on / off for on, off in zip(seconds[mode], seconds["off"], strict=True)
            )
        rows.append(row)
    print_report("record", rows, vars(args))


if __name__ == "__main__":
    main()

"""What `expertly lab simulate` counts, of every preset, memory and P, on two traces.

The demo trace is in this folder: a short `--full` recording of the demo model, so every preset runs on it. Half of its
requests are learned from, half are simulated, on a made-up machine whose link is slow enough for these small experts
to be late, or there in part. The other trace is real routing of gpt-oss-20b, which is no part of the repository: it is
imported anew, and its first tokens are simulated from empty caches and profiles. What its routers were asked about is
not known, so systems with lookaheads or trained predictors cannot run on it: what they say is recorded.
"""

from __future__ import annotations

import math
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expertly
from tests.golden.cases import MEMORIES, Case, case_name, first_words, run_command

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[2]
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", REPOSITORY.parent / "shared" / "data")) / "routing"
ROUTING = DATA / "gpt_oss_20b" / "experts.npz"
DEMO_TRACE = FOLDER / "demo-trace.tar.xz"
MACHINE = FOLDER / "machine.toml"
DEMO_PREDICTOR = Path(expertly.__file__).parent / "data" / "predictors" / "demo.safetensors"
"""The trained weights that ship with the demo model."""

WITH_WEIGHTS = ("promoe", "pre-gated")
NUM_ROUTING_TOKENS = 120


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, and with which options it is simulated."""

    file: str  # of the golden cases
    trace: Path
    options: tuple[str, ...]
    predictor: Path | None = None


def demo_replay(folder: Path) -> Replay:
    """The recorded trace of the demo model, unpacked in `folder`."""
    with tarfile.open(DEMO_TRACE) as archive:
        archive.extractall(folder, filter="data")
    options = ("--hardware", str(MACHINE), "--split", "1:1")
    return Replay("simulator-demo.json", folder / "demo-trace", options, DEMO_PREDICTOR)


def routing_replay(folder: Path) -> Replay:
    """The routing of gpt-oss-20b, imported into `folder`."""
    trace = folder / "gpt-oss-20b"
    status, printed = run_command("lab", "trace", "import", str(ROUTING), str(trace), "--geometry", "gpt-oss-20b")
    assert status == 0, printed
    options = ("--hardware", "rtx3090", "--tokens", str(NUM_ROUTING_TOKENS))
    return Replay("simulator-routing.json", trace, options)


def simulate(
    replay: Replay, systems: Sequence[str], segments: int, memories: Sequence[str] = MEMORIES
) -> dict[str, Case]:
    """A case for each system and memory. All run in one command; where that cannot run, each has its own, and the first
    words of the error are its case.
    """
    result = _run(replay, systems, ",".join(memories), segments)
    if isinstance(result, dict):
        return result
    cases: dict[str, Case] = {}
    for memory in memories:
        for system in systems:
            each = _run(replay, [system], memory, segments)
            cases |= each if isinstance(each, dict) else {case_name(system, memory, segments): {"error": each}}
    return cases


def _run(replay: Replay, systems: Sequence[str], memories: str, segments: int) -> dict[str, Case] | str:
    """The cases of one command, or the first words of its error."""
    options = ["--system", ",".join(systems), "--memory", memories, "--segments", str(segments), *replay.options]
    if replay.predictor is not None and any(system in WITH_WEIGHTS for system in systems):
        options += ["--predictor", str(replay.predictor)]
    status, printed = run_command("lab", "simulate", str(replay.trace), *options)
    if status != 0:
        return first_words(printed["error"]["message"])
    rows = [row for row in printed["results"] if row["system"] in systems]  # bounds run beside them
    return {case_name(row["system"], row["memory"], segments): _case(row, printed["trace"]) for row in rows}


def _case(row: dict[str, Any], trace: dict[str, Any]) -> Case:
    """Whole numbers of a row of results. Counts without a phase in their name are of decode, bytes and times of prefill
    and decode.

    Rates are printed as fractions. Each request ran alone, one token an iteration: what they are fractions of is known.
    Times are in nanoseconds, fractions in billionths.
    """
    if row["skipped"] is not None:
        return {"error": first_words(row["skipped"])}
    demands = row["decode_iterations"] * trace["layers"] * trace["top_k"]
    expert_nbytes = trace["expert_bytes"] // (trace["layers"] * trace["experts"])
    hits, partial_hits = _part(row["hit_rate"], demands), _part(row["partial_hit_rate"], demands)
    names = ("prediction_accuracy", "fetch_rate", "recall", "coverage", "accuracy", "timeliness")
    of_requests = row["times_by_request"]
    case = {
        "hits": hits,
        "partial_hits": partial_hits,
        "misses": demands - hits - partial_hits,
        "hit_bytes": _part(row["byte_hit_rate"], demands * expert_nbytes),
        "memory_bytes": row["memory_bytes"],
        "loaded_bytes": row["bytes_loaded"],
        "demand_bytes": row["bytes_loaded"] - row["prefetched_bytes"],
        "prefetched_bytes": row["prefetched_bytes"],
        "wasted_bytes": row["wasted_bytes"],
        **{name: round(row[name] * 1e9) for name in names if row[name] is not None},
        "decode_ns": round(row["tpot_s"] * 1e9 * row["decode_iterations"]),
        "decode_stall_ns": round(row["decode_stall_s"] * 1e9),
        "stall_share": round(row["stall_share"] * 1e9),
        "floor_tpot_ns": round(row["floor_tpot_s"] * 1e9),
        "ttft_ns": [
            round(of_request["ttft_s"] * 1e9) for of_request in of_requests if of_request["ttft_s"] is not None
        ],
        "latency_ns": [round(of_request["latency_s"] * 1e9) for of_request in of_requests],
        "request_hits": [round(rate * 1e9) for rate in row["hit_rate_by_request"] if rate is not None],
        **{f"{phase}_{name}": num for phase, counts in row["phases"].items() for name, num in counts.items()},
        "layer_experts": (row["allocation"] or {}).get("experts"),
    }
    return {field: value for field, value in case.items() if value not in (None, [])}


def _part(share: float, whole: int) -> int:
    part = round(share * whole)
    assert math.isclose(share * whole, part, rel_tol=1e-12, abs_tol=1e-6), f"{share} of {whole} is no whole number"
    return part

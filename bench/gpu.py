"""On an accelerator: time per token of each system and budget against `resident` and `on-demand`; link and kernels.

    python bench/gpu.py [--experts-gib 8] [--tokens 24] [--seconds 280] [--out FILE] [--prepare]

Two models: an inflated demo model in bfloat16, and gpt-oss-20b's shape in MXFP4 with random weights and as many layers
as come to those bytes. All decode the same tokens; the host has room for all experts. Kernel rows: what the kernels
over slots reach, and its share of the memory's bandwidth. `least_copy_s`: a step's bytes over the bandwidth of
pinned copies.

Rows are measured one after the other in a process of their own, what matters most first, and the file is written after
each. A row that fails, or takes too long, says why; the next ones run in a new process. What the time does not suffice
for is named and left out. `--prepare` only makes and packs both models, if they are not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import GIB, child_arguments, inflated_model, options, play, predictor_of, print_report, write_report
from real_shape import make_checkpoint, work_folder
from torch.nn.functional import silu

from expertly.api import handle
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import cuda
from expertly.engine.slots import layer_rows
from expertly.formats import expert_format
from expertly.native.kernels import choose_kernels

SYSTEMS = ("on-demand", "expertly-ahead", "expertly", "lru", "moe-infinity", "moepic", "fmoe", "promoe")
KERNELS = tuple(
    (*one, top_k)
    for top_k in (8, 64)
    for one in (("", 2048, 768), ("mxfp4", 2880, 2880), ("fp8", 2048, 768), ("int4_g32", 2048, 768))
)
"""Formats, hidden and intermediate sizes, and experts that are computed in one call."""

NUM_PROMPT = 16
PREPARE_S, ROW_S = 200.0, 75.0
"""Most that making and packing a model takes, and any other row."""

Job = dict[str, Any]


def rate(nbytes: int, work: Callable[[], object], settle: Callable[[], object]) -> float:
    """Bytes a second, the best of some rounds of 8."""
    times = []
    for _ in range(5):
        settle()
        start = time.perf_counter()
        for _ in range(8):
            work()
        settle()
        times.append(time.perf_counter() - start)
    return 8 * nbytes / min(times)


def bandwidths(device: str) -> dict[str, float]:
    """Of the device's memory, reading and writing, and of pinned host memory to it."""
    settle = (lambda: None) if device == "cpu" else torch.accelerator.synchronize
    here, there = (torch.ones(256 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(16 << 20, dtype=torch.uint8, pin_memory=device != "cpu")
    memory = rate(2 * len(here), lambda: here.copy_(there), settle)
    link = rate(len(host), lambda: here[: len(host)].copy_(host, non_blocking=True), settle)
    return {"memory_bytes_per_s": memory, "link_bytes_per_s": link}


def kernels(form: str, hidden: int, width: int, top_k: int, device: str) -> dict[str, Any]:
    """Calls for one token each that find their experts, of 64 that no cache holds, as one CUDA graph: so that nothing
    of the host is measured.
    """
    shape = LayerGeometry(64, top_k, hidden, width, 3, 2)
    shape = expert_format(form).geometry(shape) if form else shape
    flat = torch.full((shape.nbytes,), 0x3C, dtype=torch.uint8, device=device)
    rows, chosen = layer_rows(flat, Geometry((shape,)), 0, torch.bfloat16), choose_kernels(runs_on_host=device == "cpu")
    layer = chosen.slots(shape, torch.bfloat16, 1, rows, lambda gate, up: silu(gate) * up, (), None)
    if layer is None:
        return {"no_kernel": f"{chosen.name}: {chosen.reason}"}
    x, out = (torch.ones(num, hidden, dtype=torch.bfloat16, device=device) for num in (1, top_k))
    spans = [Span(0, expert, 0, 1, expert) for expert in range(64)]
    choices = torch.arange(64, device=device).split(top_k)

    def work() -> None:
        for choice in choices:
            layer.begin(x, out).find(choice[None], spans)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return {"experts_a_call": top_k, "experts_bytes_per_s": rate(shape.nbytes, graph.replay, torch.cuda.synchronize)}


def measure(folder: Path, system: str, memory: str, num_tokens: int, device: str) -> dict[str, Any]:
    """Behind a long prompt of other tokens. All experts are in the host's memory before: none is read from disk."""
    settings: dict[str, Any] = {"memory": memory, "device": device}
    settings |= {} if device == "cpu" else {"host_memory": "100%"}
    if system == "resident without graphs":
        system, cuda.KIND.recorder = "resident", lambda device: None  # type: ignore[method-assign]
    if system == "promoe":
        model, _ = expertly.load(str(folder), system="lru", **settings)
        settings["predictor"] = predictor_of(model, folder.parent)
        expertly.unload(model)
    model, _ = expertly.load(str(folder), system=system, **settings)
    if device != "cpu":
        engine = handle(model).engine
        for layer, shape in enumerate(engine.executor.geometry.layers):
            engine.device.hold(layer, range(shape.num_experts))
    ids = torch.arange(NUM_PROMPT + num_tokens).mul(37).add(240).remainder(model.config.vocab_size).tolist()
    play(model, list(range(240 + num_tokens)), 240)
    row = play(model, ids, NUM_PROMPT)
    row["hit_rate"] = row["hits"] / (row["hits"] + row["misses"] + row["partial_hits"])
    row["loaded_a_token"] = row["bytes_loaded"] / row["steps"]
    told = expertly.stats(model).as_dict()
    row |= {"synchronisations": told["synchronisations_per_pass"], "graphs": told["kernels"]["graphs"]}
    expertly.unload(model)
    return row


# -- one after the other -----------------------------------------------------------------------------------------------


def work(job: Job, device: str, gib: float, num_tokens: int) -> dict[str, Any]:
    """In the process that measures: what a job finds."""
    system, memory = job["system"], job.get("memory", "")
    if system == "bandwidths":
        return bandwidths(device)
    if system == "kernel":
        return kernels(*job["kernel"], device)
    num_layers = max(1, round(gib * GIB / (32 * 13.2e6)))
    folder = work_folder().parent / f"gpt-oss-{num_layers}-layers"
    begin = time.perf_counter()
    if job["model"] == "mxfp4":
        make_checkpoint(folder, num_layers)
    else:
        folder = inflated_model(gib)
    if system == "prepare":
        expertly.unload(expertly.load(str(folder), device=device, system="lru", memory="25%")[0])
        return {"seconds": time.perf_counter() - begin}
    return measure(folder, system, memory, num_tokens, device)


def jobs(device: str) -> list[Job]:
    """What the bounds ask for comes first, of both models."""
    found: list[Job] = [{"system": "bandwidths"}]
    found += [
        {"system": "kernel", "model": one[0] or "bfloat16", "kernel": one}
        for one in KERNELS[: 1 if device == "cpu" else None]
    ]
    first = [("prepare", ""), ("resident", "100%"), ("resident without graphs", "100%")]
    first += [("expertly-ahead", "50%"), ("on-demand", "25%"), ("expertly-ahead", "25%"), ("on-demand", "50%")]
    models = ("bfloat16", "mxfp4")
    found += [{"system": system, "memory": memory, "model": model} for model in models for system, memory in first]
    for memory in ("50%", "25%", "75%"):
        for system in SYSTEMS:
            of = models[: 1 if system == "promoe" else 2]  # no predictor of mxfp4
            found += [{"system": system, "memory": memory, "model": one} for one in of if (system, memory) not in first]
    return found


def child(jobs: Sequence[Job], more: dict[str, Any]) -> subprocess.Popen[str]:
    """A process that does these jobs, and writes a line for each."""
    command = [sys.executable, __file__, "--child", json.dumps(more | {"jobs": jobs})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def prepared(more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Both models, at once."""
    todo = [{"system": "prepare", "model": model} for model in ("bfloat16", "mxfp4")]
    for job, process in [(job, child([job], more)) for job in todo]:
        line, _ = process.communicate()
        yield job | (json.loads(line) if line else {"error": f"exit {process.returncode}"})


def measured(todo: Sequence[Job], more: dict[str, Any], ends_at: float) -> Iterator[dict[str, Any]]:
    """A row for each job that the time suffices for, from a process that is started again where it fails."""
    todo = list(todo)
    while todo and time.monotonic() < ends_at:
        with child(todo, more) as process:
            assert process.stdout is not None
            while todo and time.monotonic() < ends_at:
                job, late = todo[0], threading.Event()
                limit = min(PREPARE_S if job["system"] == "prepare" else ROW_S, max(1.0, ends_at - time.monotonic()))
                timer = threading.Timer(limit, lambda process=process, late=late: (late.set(), process.kill()))
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                if line:
                    row = json.loads(line)
                else:
                    row = {"error": f"not done in {limit:.0f} s" if late.is_set() else f"exit {process.wait()}"}
                yield {**todo.pop(0), **row}
                if "error" in row:
                    break
            process.kill()


def compared(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """The same rows with how they stand to each other."""
    tpot = {(row["model"], row["system"], row["memory"]): row["tpot_s"] for row in rows if "tpot_s" in row}
    made = []
    for row in rows:
        more: dict[str, Any] = {}
        if "experts_bytes_per_s" in row and "memory_bytes_per_s" in found:
            more["share_of_memory"] = row["experts_bytes_per_s"] / found["memory_bytes_per_s"]
        if "tpot_s" in row:
            for name, memory in (("resident", "100%"), ("on-demand", row["memory"])):
                if (other := tpot.get((row["model"], name, memory))) is not None:
                    more[f"against_{name.replace('-', '_')}"] = row["tpot_s"] / other
        if "loaded_a_token" in row and "link_bytes_per_s" in found:
            more["least_copy_s"] = row["loaded_a_token"] / found["link_bytes_per_s"]
        made.append({name: value for name, value in row.items() if name != "kernel"} | more)
    return made


def main() -> None:
    args = options(__doc__, experts_gib=8.0, tokens=24, seconds=280.0, out=None, prepare=False)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    if accelerator is None:
        print("bench/gpu.py: no GPU is here; a run on a CPU shows that the benchmark works, and measures none")
    more = {"device": device, "gib": args.experts_gib, "num_tokens": args.tokens}
    if args.prepare:
        for row in prepared(more):
            print(json.dumps(row), flush=True)
        return
    todo, ends_at = jobs(device), time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    name = device if accelerator is None else torch.get_device_module(device).get_device_name()
    found: dict[str, Any] = {"device": name, "left_out": [name_of(one) for one in todo]}
    for row in measured(todo, more, ends_at):
        print(json.dumps(row), flush=True)
        found["left_out"].pop(0)
        if row["system"] == "bandwidths" and "error" not in row:
            found |= {name: value for name, value in row.items() if name != "system"}
        else:
            rows.append(row)
        write_report("gpu", compared(rows, found), vars(args) | found, args.out)
    print_report("gpu", compared(rows, found), vars(args) | found, args.out)


def name_of(job: Job) -> str:
    return ", ".join(job[key] for key in ("model", "system", "memory") if job.get(key))


if __name__ == "__main__":
    if (given := child_arguments()) is None:
        main()
    else:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what else is printed
        for one in given.pop("jobs"):
            try:
                answer = work(one, **given)
            except Exception as error:  # the device may be in any state: what is left is another process's
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(json.dumps(answer), file=answers, flush=True)
            if "error" in answer:
                sys.exit(1)

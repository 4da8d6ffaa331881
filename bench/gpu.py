"""On an accelerator: time per token of each system and budget against `resident` and `on-demand`; link and kernels.

    python bench/gpu.py [--experts-gib 8] [--tokens 24] [--seconds 280] [--out FILE]

Two models: an inflated demo model in bfloat16, and gpt-oss-20b's shape in MXFP4 with random weights and as many layers
as come to those bytes. All decode the same tokens; the host has room for all experts. What the time does not
suffice for is named and left out; so is promoe of the second, which has no predictor. Kernel rows: what the kernels
over slots reach, and its share of the memory's bandwidth. `least_copy_s`: a step's bytes over the bandwidth of
pinned copies. The package `moe_infinity`, if it is installed, decodes the first model, too.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import GIB, inflated_model, options, play, predictor_of, print_report
from real_shape import make_checkpoint, work_folder
from torch.nn.functional import silu

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine.reading import layer_rows
from expertly.formats import expert_format
from expertly.native.kernels import choose_kernels

SYSTEMS = ("on-demand", "expertly-ahead", "expertly", "lru", "moe-infinity", "moepic", "fmoe", "promoe")
NUM_PROMPT = 16


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


def kernels(form: str, hidden: int, width: int, device: str, bytes_per_s: float) -> dict[str, Any]:
    """A row: a call for one token of each of 64 experts, more than any cache holds, so that the host runs ahead."""
    shape = LayerGeometry(64, 64, hidden, width, 3, 2)
    shape = expert_format(form).geometry(shape) if form else shape
    flat = torch.full((shape.nbytes,), 0x3C, dtype=torch.uint8, device=device)
    rows, chosen = layer_rows(flat, Geometry((shape,)), 0, torch.bfloat16), choose_kernels(runs_on_host=device == "cpu")
    layer = chosen.slots(shape, torch.bfloat16, 1, rows, lambda gate, up: silu(gate) * up, (), None)
    row: dict[str, Any] = {"model": form or "bfloat16", "system": f"kernel: {chosen.name}"}
    if layer is None:
        return row
    x, out = (torch.ones(num, hidden, dtype=torch.bfloat16, device=device) for num in (1, 64))
    works = [(Span(0, expert, 0, 1, expert), (0,), (expert,)) for expert in range(64)]
    found = rate(shape.nbytes, lambda: layer.begin(x, out).add(works), torch.accelerator.synchronize)
    return row | {"experts_bytes_per_s": found, "share_of_memory": found / bytes_per_s}


def measure(folder: Path, system: str, memory: str, num_tokens: int, device: str) -> dict[str, Any]:
    """A row: behind a long prompt of other tokens, which brings most experts into the host's memory."""
    settings: dict[str, Any] = {"memory": memory, "device": device, "learned": "off"}
    settings |= {} if device == "cpu" else {"host_memory": "100%"}
    if system == "promoe":
        model, _ = expertly.load(str(folder), system="lru", **settings)
        settings["predictor"] = predictor_of(model, folder.parent)
        expertly.unload(model)
    model, _ = expertly.load(str(folder), system=system, **settings)
    ids = torch.arange(NUM_PROMPT + num_tokens).mul(37).add(240).remainder(model.config.vocab_size).tolist()
    play(model, list(range(240 + num_tokens)), 240)
    row: dict[str, Any] = {"system": system, "memory": memory, **play(model, ids, NUM_PROMPT)}
    row["hit_rate"] = row["hits"] / (row["hits"] + row["misses"] + row["partial_hits"])
    row["loaded_a_token"] = row["bytes_loaded"] / row["steps"]
    row["synchronisations"] = expertly.stats(model).as_dict()["synchronisations_per_pass"]
    expertly.unload(model)
    return row


def moe_infinity(folder: Path, system: str, memory: str, num_tokens: int, device: str) -> dict[str, Any]:
    """MoE-Infinity's own package, used as its README has it, with the same share of the device's memory."""
    config = {"offload_path": f"{folder}-moe-infinity", "device_memory_ratio": int(memory[:-1]) / 100}
    made = importlib.import_module("moe_infinity").MoE(str(folder), config)
    ids = torch.arange(NUM_PROMPT, device=device)[None]
    ends = [time.perf_counter()]
    for num_new in (2, 2, 2 + num_tokens):
        made.generate(ids, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False)
        ends.append(time.perf_counter())
    return {"system": system, "memory": memory, "tpot_s": (ends[3] - 2 * ends[2] + ends[1]) / num_tokens}


def main() -> None:
    args = options(__doc__, experts_gib=8.0, tokens=24, seconds=280.0, out=None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    if accelerator is None:
        print("bench/gpu.py: no GPU is here; a run on a CPU shows that the benchmark works, and measures none")
    ends_at, found = time.monotonic() + args.seconds, bandwidths(device)
    num_layers = max(1, round(args.experts_gib * GIB / (32 * 13.2e6)))
    mxfp4 = work_folder().parent / f"gpt-oss-{num_layers}-layers"
    left_out, sizes = list[str](), (("", 2048, 768), ("mxfp4", 2880, 2880), ("fp8", 2048, 768), ("int4_g32", 2048, 768))
    rows = [kernels(*one, device, found["memory_bytes_per_s"]) for one in (sizes if accelerator else sizes[:1])]
    wanted = [("resident", "100%"), *((system, memory) for memory in ("50%", "25%", "75%") for system in SYSTEMS)]
    if importlib.util.find_spec("moe_infinity") is not None and device == "cuda":
        wanted[9:9] = [("moe_infinity", memory) for memory in ("25%", "50%", "75%")]
    for name, folder in (("bfloat16", inflated_model(args.experts_gib)), ("mxfp4", mxfp4)):
        if name == "mxfp4":
            make_checkpoint(mxfp4, num_layers)
        tpot: dict[tuple[str, str], float] = {}
        for system, memory in wanted:
            if (tpot and time.monotonic() > ends_at) or (name == "mxfp4" and system in ("promoe", "moe_infinity")):
                left_out.append(f"{name}, {system}, {memory}")
                continue
            row = (moe_infinity if system == "moe_infinity" else measure)(folder, system, memory, args.tokens, device)
            tpot[system, memory] = row["tpot_s"]
            row["against_resident"] = row["tpot_s"] / tpot["resident", "100%"]
            if ("on-demand", memory) in tpot:
                row["against_on_demand"] = row["tpot_s"] / tpot["on-demand", memory]
            if "loaded_a_token" in row:
                row["least_copy_s"] = row["loaded_a_token"] / found["link_bytes_per_s"]
            rows.append({"model": name} | row)
    print_report("gpu", rows, vars(args) | found | {"device": device, "left_out": left_out}, args.out)


if __name__ == "__main__":
    main()

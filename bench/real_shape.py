"""A real model's shape and a real model's routing: gpt-oss-20b, whose experts' bytes are random, through the engine.

    python bench/real_shape.py [--shares 50%,25%] [--systems lru,expertly] [--requests 4] [--tokens 48] [--out FILE]
                               [--routing FOLDER] [--dtype bfloat16]

A checkpoint of exactly its geometry (bench/models/gpt-oss-20b: 24 layers x 32 experts of 13.2 MB in MXFP4) is made once
in $EXPERTLY_BENCH_DIR and packed. What its routers choose is replaced, token by token, by what the released model chose
(--routing, default $EXPERTLY_TEST_DATA/routing/gpt_oss_20b: sequences without repetitions, the first tokens of
each as the prompt), so that hit rates, bytes and speed are those of the real model, while the text is nonsense. Without
that folder experts are drawn at random, some more often than others (Zipf), and the rows say "synthetic".

Each system runs in a process of its own, in a memory cgroup of dense part + experts' share + 1 GiB, or of the size that
stands in place of a share (6GiB); the first request only fills caches. A router that is asked early (`expertly-ahead`)
names what was recorded, each expert with the accuracy .905 that ProMoE measured, and the row says "modelled"; a gate
stops that where steps are slower for it (not with `:gate=none`). `floor`: the larger of the time of computing when all
experts are resident and of Belady's bytes at the disk's rate, both measured in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import GIB, ROOT, child, memory_cgroup, options, print_report, run
from safetensors.torch import save_file

MODEL = ROOT / "bench" / "models" / "gpt-oss-20b"
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", ROOT.parent / "shared" / "data"))
ROUTING = DATA / "routing" / "gpt_oss_20b"
PROMPT_TOKENS = 16
BESIDE_NBYTES = GIB
ACCURACY = 0.905


def work_folder() -> Path:
    return Path(os.environ.get("EXPERTLY_BENCH_DIR", Path(tempfile.gettempdir()) / "expertly-bench")) / "gpt-oss-20b"


# -- the model ---------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, num_layers: int | None = None) -> None:
    """A shard a layer, of random numbers; finished where its index is there. `num_layers`: of all, so many."""
    from expertly.model.structure import build_meta_model

    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    config["num_hidden_layers"] = num_layers or config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    state = build_meta_model(folder, torch.bfloat16).state_dict()
    shards: dict[str, list[str]] = {}
    for name in state:
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append(name)
    weight_map, dice = {}, torch.Generator().manual_seed(0)
    for shard, names in shards.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            shape = tuple(state[name].shape)
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, columns, rows = shape
                of_blocks = (experts, rows, columns // 32)
                tensors[f"{name}_blocks"] = torch.randint(0, 256, (*of_blocks, 16), dtype=torch.uint8, generator=dice)
                tensors[f"{name}_scales"] = torch.randint(116, 121, of_blocks, dtype=torch.uint8, generator=dice)
            else:
                noise = torch.randn(shape, generator=dice) * 0.02
                tensors[name] = (1 + noise if "norm" in name else noise).bfloat16()
        save_file(tensors, folder / f"model-{shard}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# -- its routing -------------------------------------------------------------------------------------------------------


def recorded(folder: Path, num_requests: int, num_tokens: int) -> tuple[list[np.ndarray], str]:
    """[PROMPT_TOKENS + num_tokens, L, K] experts of each request, and where they are from."""
    length = PROMPT_TOKENS + num_tokens
    if not (folder / "experts.npz").exists():
        dice, weights = np.random.default_rng(0), 1 / np.arange(1, 33)
        orders = [dice.permutation(32) for _ in range(24)]
        draw = [[dice.choice(32, 4, False, weights / weights.sum()) for _ in range(24)] for _ in range(length)]
        one = np.stack([np.stack([orders[i][k] for i, k in enumerate(row)]) for row in draw])
        return [one] * num_requests, "synthetic"
    with np.load(folder / "experts.npz") as file:
        experts, lengths = file["experts"], file["seq_len"]
    begins = np.concatenate(([0], np.cumsum(lengths)))
    known = json.loads((folder / "sequences.json").read_text())
    repeats = [bool(one.get("rep")) for one in known]
    fit = [n for n in range(len(lengths)) if lengths[n] >= length and not repeats[n]]
    chosen = fit[:: max(1, len(fit) // num_requests)][:num_requests]
    return [experts[begins[n] : begins[n] + length] for n in chosen], "recorded"


class Router:
    """Routers of a loaded model that choose what was recorded. Scores fall by a half from choice to choice."""

    def __init__(self, model: Any) -> None:
        self.chosen = np.zeros((0, 0, 0))  # of the tokens that the next pass reads: [T, L, K]
        self._calls, self._dice = threading.local(), np.random.default_rng(0)  # by the model; a thread asks early
        for layer, block in enumerate(model.model.layers):
            block.mlp.router.register_forward_pre_hook(lambda *_: setattr(self._calls, "is_run", True))
            block.mlp.router.forward = lambda hidden, layer=layer: self._route(hidden, layer)

    def _route(self, hidden: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, is_run = self.chosen[:, layer].astype(np.int64), vars(self._calls).pop("is_run", False)
        if not is_run:
            others = [self._dice.permutation(np.setdiff1d(np.arange(32), row))[:4] for row in rows]
            rows = np.where(self._dice.random(rows.shape) < ACCURACY, rows, others)
        index = torch.from_numpy(rows)
        logits = torch.full((len(hidden), 32), -9.0, dtype=hidden.dtype)
        logits.scatter_(1, index, torch.tensor([2.0, 1.3, 0.6, 0.0], dtype=hidden.dtype).expand(len(hidden), 4))
        return logits, logits.gather(1, index).softmax(dim=1), index


# -- one process -------------------------------------------------------------------------------------------------------


def play(arguments: dict[str, Any]) -> dict[str, Any]:
    """In a child: the seconds of each decode step, and what was loaded."""
    torch.set_num_threads(arguments["threads"])
    model, _ = expertly.load(
        arguments["store"], memory=arguments["memory"], system=arguments["system"], device="cpu", verify="never",
        learned="off",
    )  # fmt: skip
    router, steps, first_token_s, before = Router(model), [], [], {}
    requests, _ = recorded(Path(arguments["routing"]), arguments["requests"] + 1, arguments["tokens"])
    with torch.no_grad():
        for number, chosen in enumerate(requests):
            if number == 1:
                before = expertly.stats(model).as_dict()["phases"]["decode"]
            ids = torch.randint(0, 200_000, (1, len(chosen)), generator=torch.Generator().manual_seed(number))
            router.chosen, start = chosen[:PROMPT_TOKENS], time.perf_counter()
            out = model(ids[:, :PROMPT_TOKENS], use_cache=True, logits_to_keep=1)
            first_token_s.append(time.perf_counter() - start)
            for at in range(PROMPT_TOKENS, len(chosen)):
                router.chosen, start = chosen[at : at + 1], time.perf_counter()
                out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
                if number:
                    steps.append(time.perf_counter() - start)
    after, keys = expertly.stats(model).as_dict(), ("hits", "misses", "bytes_loaded", "prefetched_bytes")
    decode = {key: after["phases"]["decode"][key] - before[key] for key in keys}
    return {"steps": steps, "ttft": statistics.median(first_token_s[1:]), "kernels": after["kernels"]["name"], **decode}


def belady_nbytes(requests: list[np.ndarray], capacity: int, expert_nbytes: int) -> float:
    """A token, of the decode steps after the first request."""
    from expertly.sim.future import belady_hits

    demands = [
        layer * 32 + expert
        for request in requests[1:]
        for token in request[PROMPT_TOKENS:]
        for layer, row in enumerate(token)
        for expert in row.tolist()
    ]
    num_tokens = sum(len(request) - PROMPT_TOKENS for request in requests[1:])
    return (len(demands) - belady_hits(demands, capacity)) * expert_nbytes / num_tokens


def main() -> None:
    args = options(
        __doc__, shares="50%,25%", systems="lru,expertly", requests=4, tokens=48, threads=2, routing=str(ROUTING),
        dtype=None, out=None,
    )  # fmt: skip
    from expertly.core.resources import parse_memory
    from expertly.model.packing import pack
    from expertly.store.codec_choice import disk_rate_of
    from expertly.store.packed import PackedStore

    source = work_folder()
    make_checkpoint(source)
    folder = source.with_name(f"{source.name}-{args.dtype or 'mxfp4'}-store")
    is_packed = (folder / "manifest.json").exists()
    store = PackedStore.open(folder) if is_packed else pack(source, folder, args.dtype)
    requests, origin = recorded(Path(args.routing), args.requests + 1, args.tokens)
    layer = store.manifest.layers[0]
    disk = disk_rate_of(path for path, _ in store.extents)
    common = {"store": str(folder)} | {key: vars(args)[key] for key in ("routing", "requests", "tokens", "threads")}
    resident = child("real_shape.py", common | {"memory": "100%", "system": "resident"}, timeout=3600)
    floor_compute = statistics.median(resident["steps"])
    speed = {"tokens_per_s": 1 / floor_compute, "ttft_s": resident["ttft"]}
    rows: list[dict[str, Any]] = [{"what": "all resident", **speed}]
    for share in args.shares.split(","):
        beside = store.dense_nbytes + BESIDE_NBYTES
        memory = parse_memory(share, store.experts_nbytes) - (0 if share.endswith("%") else beside)
        if memory < layer.expert_nbytes * 16:
            raise SystemExit(f"--shares {share}: beside experts the model takes {beside / GIB:.1f} GiB")
        loads = belady_nbytes(requests, memory // layer.expert_nbytes, layer.expert_nbytes)
        floor = max(floor_compute, loads / disk)
        for system in args.systems.split(","):
            settings = common | {"memory": memory, "system": system}
            with memory_cgroup(beside + memory) as group:
                found = child("real_shape.py", settings, group, timeout=3600)
            taken = statistics.fmean(found["steps"])
            rows.append(
                {
                    "what": system,
                    "memory": share,
                    "routing": origin + (", modelled ahead" if "-ahead" in system else ""),
                    "tokens_per_s": 1 / taken,
                    "hit_rate": found["hits"] / (found["hits"] + found["misses"]),
                    "mb_a_token": found["bytes_loaded"] / len(found["steps"]) / 1e6,
                    "prefetched_mb_a_token": found["prefetched_bytes"] / len(found["steps"]) / 1e6,
                    "belady_mb_a_token": loads / 1e6,
                    "floor_tokens_per_s": 1 / floor,
                    "of_floor": taken / floor,
                    "ttft_s": found["ttft"],
                }
            )
    common |= {"stored_as": store.manifest.stored_as, "experts_gib": store.experts_nbytes / GIB}
    print_report("real_shape", rows, common | {"disk_gb_per_s": disk / 1e9, "kernels": resident["kernels"]}, args.out)


if __name__ == "__main__":
    run(main, play)

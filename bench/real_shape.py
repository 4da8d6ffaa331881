"""A real model's shape and a real model's routing, with random bytes of experts, through the engine.

    python bench/real_shape.py [--model gpt-oss-20b] [--shares 50%,6GiB] [--systems lru,expertly] [--requests 4]
                               [--tokens 48] [--out FILE] [--routing FOLDER] [--dtype bfloat16]

A checkpoint of exactly the geometry of `--model` (bench/models) is made once in $EXPERTLY_BENCH_DIR and packed:
gpt-oss-20b with 24 layers x 32 experts of 13.2 MB in MXFP4, Qwen3-30B-A3B with 48 x 128 of 2.4 MB in INT4 (groups of
128). What its routers choose is replaced, token by token, by what the released gpt-oss-20b chose (--routing, default
$EXPERTLY_TEST_DATA/routing/gpt_oss_20b: sequences without repetitions, the first tokens of each as the prompt), so that
hit rates, bytes and speed are those of the real model, while the text is nonsense. Of Qwen3-30B-A3B no routing is at
hand: each quarter of a layer's experts plays the two best of gpt-oss-20b's choices in a sequence and layer of its own.
Without that folder experts are drawn at random, some more often than others (Zipf), and the rows say "synthetic".

Each system runs in a process of its own, in a memory cgroup of dense part + experts' share + 1 GiB, or of the size that
stands in place of a share (6GiB); the first request only fills caches. A router that is asked early (`expertly-ahead`)
names what was recorded, each expert with the accuracy .905 that ProMoE measured, and the row says "modelled". `floor`:
the larger of the time of computing when all experts are resident and of Belady's bytes at the disk's rate, both
measured in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import GIB, ROOT, bench_folder, child, memory_cgroup, options, print_report, run
from safetensors.torch import save_file

from expertly.model.playing import forward

MODELS = ROOT / "bench" / "models"
GROUP = 128
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True},
        }
    },
}
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", ROOT.parent / "shared" / "data"))
ROUTING = DATA / "routing" / "gpt_oss_20b"
PROMPT_TOKENS = 16
BESIDE_NBYTES = GIB
ACCURACY = 0.905


def work_folder(model: str = "gpt-oss-20b") -> Path:
    return bench_folder() / model


# -- the model ---------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, num_layers: int | None = None, model: str = "gpt-oss-20b") -> None:
    """A shard a layer, of random numbers; finished where its index is there. `num_layers`: of all, so many."""
    from expertly.model.structure import build_meta_model

    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODELS / model / "config.json").read_text())
    config["num_hidden_layers"] = num_layers or config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    state = build_meta_model(folder, torch.bfloat16).state_dict()
    if config["model_type"] == "qwen3_moe":
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": INT4}))
    shards: dict[str, list[str]] = {}
    for name in state:
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append(name)
    weight_map, dice = {}, torch.Generator().manual_seed(0)
    for shard, names in shards.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            shape = tuple(state[name].shape)
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                noise = torch.randn(shape, generator=dice) * 0.02
                tensors[name] = (1 + noise if "norm" in name else noise).bfloat16()
            elif config["model_type"] == "qwen3_moe":
                tensors |= int4_experts(name, shape, dice)
            else:
                experts, columns, rows = shape
                of_blocks = (experts, rows, columns // 32)
                tensors[f"{name}_blocks"] = torch.randint(0, 256, (*of_blocks, 16), dtype=torch.uint8, generator=dice)
                tensors[f"{name}_scales"] = torch.randint(116, 121, of_blocks, dtype=torch.uint8, generator=dice)
        save_file(tensors, folder / f"model-{shard}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def int4_experts(name: str, shape: tuple[int, ...], dice: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of each expert, [rows, columns] of 4 bits with a scale a group, that transformers fuses to `name`."""
    stem, fused = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    rows, columns, found = shape[1] // len(parts), shape[2], {}
    for expert in range(shape[0]):
        for part in parts:
            words = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), generator=dice)
            found[f"{stem}.{expert}.{part}.weight_packed"] = words.int()
            found[f"{stem}.{expert}.{part}.weight_scale"] = torch.full((rows, columns // GROUP), 0.004).bfloat16()
            found[f"{stem}.{expert}.{part}.weight_shape"] = torch.tensor([rows, columns])
    return found


# -- its routing -------------------------------------------------------------------------------------------------------


def recorded(folder: Path, num_requests: int, num_tokens: int, model: str) -> tuple[list[np.ndarray], str]:
    """[PROMPT_TOKENS + num_tokens, L, K] experts of each request, and where they are from."""
    length, parts = PROMPT_TOKENS + num_tokens, 4 if model == "Qwen3-30B-A3B" else 1
    if not (folder / "experts.npz").exists():
        dice, weights = np.random.default_rng(0), 1 / np.arange(1, 33)
        orders = [dice.permutation(32) for _ in range(24)]
        draw = [[dice.choice(32, 4, False, weights / weights.sum()) for _ in range(24)] for _ in range(length)]
        of_sequences, origin = (
            [np.stack([np.stack([o[k] for o, k in zip(orders, row, strict=True)]) for row in draw])],
            "synthetic",
        )
    else:
        with np.load(folder / "experts.npz") as file:
            experts, lengths = file["experts"], file["seq_len"]
        begins = np.concatenate(([0], np.cumsum(lengths)))
        known = json.loads((folder / "sequences.json").read_text())
        fit = [n for n in range(len(lengths)) if lengths[n] >= length and not known[n].get("rep")]
        chosen = fit[:: max(1, len(fit) // (num_requests * parts))]
        of_sequences, origin = [experts[begins[n] : begins[n] + length] for n in chosen], "recorded"
    if parts == 1:
        return [of_sequences[n % len(of_sequences)] for n in range(num_requests)], origin
    found = []
    for request in range(num_requests):
        quarters = []
        for part in range(parts):
            one = of_sequences[(request * parts + part) % len(of_sequences)]
            quarters.append(
                32 * part + np.concatenate([one, np.roll(one, part + 1, axis=1)], axis=1)[:, :, :2].astype(int)
            )
        found.append(np.concatenate(quarters, axis=2))
    return found, f"{origin}, of gpt-oss-20b"


class Router:
    """Routers of a loaded model that choose what was recorded. Scores fall by a half from choice to choice."""

    def __init__(self, model: Any) -> None:
        self.chosen = np.zeros((0, 0, 0))  # of the tokens that the next pass reads: [T, L, K]
        self._calls, self._dice = threading.local(), np.random.default_rng(0)  # by the model; a thread asks early
        for layer, block in enumerate(model.model.layers):
            router = block.mlp.router if hasattr(block.mlp, "router") else block.mlp.gate
            self._num_experts = router.num_experts
            router.register_forward_pre_hook(lambda *_: setattr(self._calls, "is_run", True))
            router.forward = lambda hidden, layer=layer: self._route(hidden, layer)

    def _route(self, hidden: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, is_run = self.chosen[:, layer].astype(np.int64), vars(self._calls).pop("is_run", False)
        hidden, num = hidden.reshape(-1, hidden.shape[-1]), self._num_experts
        if not is_run:
            others = [self._dice.permutation(np.setdiff1d(np.arange(num), row))[: len(row)] for row in rows]
            rows = np.where(self._dice.random(rows.shape) < ACCURACY, rows, others)
        index = torch.from_numpy(rows)
        logits = torch.full((len(hidden), num), -9.0, dtype=hidden.dtype)
        falling = torch.arange(index.shape[1], 0, -1, dtype=hidden.dtype) * 0.7
        logits.scatter_(1, index, falling.expand(len(hidden), -1))
        return logits, logits.gather(1, index).softmax(dim=1), index


# -- one process -------------------------------------------------------------------------------------------------------


def play(arguments: dict[str, Any]) -> dict[str, Any]:
    """In a child: the seconds of each decode step, and what was loaded."""
    torch.set_num_threads(arguments["threads"])
    model, _ = expertly.load(
        arguments["store"], memory=arguments["memory"], system=arguments["system"], device="cpu", verify="never",
    )  # fmt: skip
    router, steps, first_token_s, before = Router(model), [], [], {}
    requests, _ = recorded(
        Path(arguments["routing"]), arguments["requests"] + 1, arguments["tokens"], arguments["model"]
    )
    with torch.no_grad():
        for number, chosen in enumerate(requests):
            if number == 1:
                before = expertly.stats(model).as_dict()["phases"]["decode"]
            ids = torch.randint(0, 150_000, (1, len(chosen)), generator=torch.Generator().manual_seed(number))
            router.chosen, start = chosen[:PROMPT_TOKENS], time.perf_counter()
            _, cache = forward(model, ids[:, :PROMPT_TOKENS], None)
            first_token_s.append(time.perf_counter() - start)
            for at in range(PROMPT_TOKENS, len(chosen)):
                router.chosen, start = chosen[at : at + 1], time.perf_counter()
                _, cache = forward(model, ids[:, at : at + 1], cache)
                if number:
                    steps.append(time.perf_counter() - start)
    after, keys = expertly.stats(model).as_dict(), ("hits", "misses", "bytes_loaded", "prefetched_bytes")
    decode = {key: after["phases"]["decode"][key] - before[key] for key in keys}
    return {"steps": steps, "ttft": statistics.median(first_token_s[1:]), "kernels": after["kernels"]["name"], **decode}


def belady_nbytes(requests: list[np.ndarray], capacity: int, num_experts: int, expert_nbytes: int) -> float:
    """A token, of the decode steps after the first request; `num_experts` of a layer."""
    from expertly_lab.sim.future import belady_hits

    demands = [
        layer * num_experts + expert
        for request in requests[1:]
        for token in request[PROMPT_TOKENS:]
        for layer, row in enumerate(token)
        for expert in row.tolist()
    ]
    num_tokens = sum(len(request) - PROMPT_TOKENS for request in requests[1:])
    return (len(demands) - belady_hits(demands, capacity)) * expert_nbytes / num_tokens


def main() -> None:
    args = options(
        __doc__, model=("gpt-oss-20b", "Qwen3-30B-A3B"), shares="50%,25%", systems="lru,expertly", requests=4,
        tokens=48, threads=2, routing=str(ROUTING), dtype=None, out=None,
    )  # fmt: skip
    from expertly.core.resources import parse_memory
    from expertly.hardware.measure import measure_disk
    from expertly.model.packing import pack
    from expertly.store.packed import PackedStore

    source = work_folder(args.model)
    make_checkpoint(source, model=args.model)
    folder = source.with_name(f"{source.name}-{args.dtype or 'released'}-store")
    is_packed = (folder / "manifest.json").exists()
    store = PackedStore.open(folder) if is_packed else pack(source, folder, args.dtype)
    requests, origin = recorded(Path(args.routing), args.requests + 1, args.tokens, args.model)
    layer = store.manifest.layers[0]
    disk = measure_disk(store.extents[0][0], 1 << 20, 4, 0.3).nbytes_per_s
    common = {"store": str(folder)} | {
        key: vars(args)[key] for key in ("model", "routing", "requests", "tokens", "threads")
    }
    resident = child("real_shape.py", common | {"memory": "100%", "system": "resident"}, timeout=3600)
    floor_compute = statistics.median(resident["steps"])
    speed = {"tokens_per_s": 1 / floor_compute, "ttft_s": resident["ttft"]}
    rows: list[dict[str, Any]] = [{"what": "all resident", **speed}]
    for share in args.shares.split(","):
        beside = store.dense_nbytes + BESIDE_NBYTES
        memory = parse_memory(share, store.experts_nbytes) - (0 if share.endswith("%") else beside)
        if memory < layer.expert_nbytes * 16:
            raise SystemExit(f"--shares {share}: beside experts the model takes {beside / GIB:.1f} GiB")
        loads = belady_nbytes(requests, memory // layer.expert_nbytes, layer.num_experts, layer.expert_nbytes)
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

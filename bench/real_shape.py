"""A real model's shape and a real model's routing, with random bytes of experts, through the engine.

    python bench/real_shape.py [--model gpt-oss-20b] [--shares 50%,6GiB] [--systems lru,expertly] [--requests 4]
                               [--tokens 48] [--out FILE] [--routing FOLDER] [--dtype bfloat16] [--disk 60GiB]

A checkpoint of exactly the geometry of `--model` (bench/models), in the format that it ships in, is made once in
$EXPERTLY_BENCH_DIR and packed: gpt-oss-20b with 24 layers x 32 experts of 13.2 MB in MXFP4, Qwen3-30B-A3B with 48 x 128
of 2.4 MB in INT4 (groups of 128), GLM-4.5-Air with 45 x 128 of 35 MB and the text part of Qwen3.8-Flash-Next with 48 x
512 of 9.8 MB in bfloat16, DeepSeek-V4-Flash with 43 x 256 of 13.4 MB in FP4. Where checkpoint and store take more than
`--disk` it has the first layers only, as many as fit, and that share of the rows of n-gram tables; all rows say so.

What routers choose is replaced, token by token, by what the released gpt-oss-20b chose (--routing, default
$EXPERTLY_TEST_DATA/routing/gpt_oss_20b: sequences without repetitions, the first tokens of each as the prompt), so that
hit rates, bytes and speed are those of the real model, while the text is nonsense. Of Qwen3-30B-A3B no routing is at
hand: each quarter of a layer's experts plays the two best of gpt-oss-20b's choices in a sequence and layer of its own.
Without that folder experts are drawn at random, some more often than others (Zipf), and the rows say "synthetic". The
routers of the three others choose by themselves, with random weights, and the rows say so.

Each system runs in a process of its own, in a memory cgroup of dense part + experts' share + 1 GiB, or of the size that
stands in place of a share (6GiB); the first request only fills caches. A router that is asked early (`expertly-ahead`)
names what was recorded, each expert with the accuracy .905 that ProMoE measured, and the row says "modelled". `floor`:
the larger of the time of computing when all experts are resident and of Belady's bytes at the disk's rate, both
measured in the same run; where routers choose by themselves, the former.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import statistics
import tempfile
import threading
import time
from bisect import bisect_right
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import expertly  # isort: skip  (before torch: how its threads wait)
import torch
from common import GIB, ROOT, bench_folder, child, memory_cgroup, options, print_report, run

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
FEWEST_LAYERS = {
    **dict.fromkeys(("gpt-oss-20b", "Qwen3-30B-A3B", "GLM-4.5-Air"), 2),
    "Qwen3.8-Flash-Next": 4,
    "DeepSeek-V4-Flash": 5,
}
"""With which a model has layers of each kind."""
PLAYED = ("gpt-oss-20b", "Qwen3-30B-A3B")
"""Models whose routers choose what was recorded."""
PROMPT_TOKENS = 16
BESIDE_NBYTES = GIB
ACCURACY = 0.905


def work_folder(model: str = "gpt-oss-20b") -> Path:
    return bench_folder() / model


# -- the model ---------------------------------------------------------------------------------------------------------

Stored = dict[str, tuple[str, tuple[int, ...], np.ndarray]]
"""Tensors by name: dtype, shape, and what its bytes are, again and again."""
_DICE = np.random.default_rng(0)
_NOISE = torch.from_numpy(_DICE.standard_normal(1 << 20).astype(np.float32)) * 0.02


def _bytes(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


NOISE, NEAR_1, CODES = _bytes(_NOISE.bfloat16()), _bytes(1 + _NOISE.bfloat16()), _DICE.bytes(1 << 20)
CODES, EXPONENTS = np.frombuffer(CODES, np.uint8), _DICE.integers(116, 121, 1 << 20, np.uint8)
FP8 = _bytes((_NOISE * 50).to(torch.float8_e4m3fn))


def config_of(model: str, num_layers: int | None = None) -> dict[str, Any]:
    """Of the first layers."""
    config = json.loads((MODELS / model / "config.json").read_text())
    whole = config["num_hidden_layers"]
    num = num_layers or whole
    config = {key: value[:num] if isinstance(value, list) and len(value) == whole else value
              for key, value in config.items()} | {"num_hidden_layers": num}  # fmt: skip
    if "ngram_vocab_size_base" in config:
        config["ngram_vocab_size_base"] = config["ngram_vocab_size_base"] * num // whole
    return config


def tensors_of(config: dict[str, Any], folder: Path) -> dict[str, Stored]:
    """Of a checkpoint, by shard: one for each layer, and "rest". Writes the config into the folder."""
    from expertly.model.structure import build_meta_model

    folder.mkdir(parents=True, exist_ok=True)
    is_int4, shards = config["model_type"] == "qwen3_moe", dict[str, Stored]()
    (folder / "config.json").write_text(json.dumps(config))
    model: Any = build_meta_model(folder, torch.bfloat16)
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        shard = shards.setdefault(parts[2] if parts[1] == "layers" else "rest", {})
        path, _, last = name.rpartition(".")
        if path.endswith(".ple_embedding") and not tensor.is_floating_point():
            known = vars(model.get_submodule(path)).get(last.replace("ngram_heads", "head"))
            values = np.arange(1, 2 * len(tensor), 2) if known is None else np.array(known)
            shard[name] = "I64", tuple(tensor.shape), values.view(np.uint8)
        else:
            shard |= stored(name, tuple(tensor.shape), tensor.dtype, config)
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": INT4} if is_int4 else {})))
    return shards


def stored(name: str, shape: tuple[int, ...], dtype: torch.dtype, config: dict[str, Any]) -> Stored:
    """How a parameter lies in the released checkpoint."""
    kind = config["model_type"]
    is_experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    if is_experts and kind == "gpt_oss":
        of_blocks = (shape[0], shape[2], shape[1] // 32)
        return {f"{name}_blocks": ("U8", (*of_blocks, 16), CODES), f"{name}_scales": ("U8", of_blocks, EXPONENTS)}
    if is_experts and kind == "qwen3_moe":
        return int4_experts(name, shape)
    if is_experts and kind == "deepseek_v4":
        *lead, columns = shape
        scales = "U8", (*lead, columns // 32), EXPONENTS
        return {name: ("I8", (*lead, columns // 2), CODES), f"{name}_scale_inv": scales}
    if kind == "deepseek_v4" and name.endswith("_proj.weight") and not any(size % GROUP for size in shape):
        small = np.array([0.02], np.float32).view(np.uint8)
        blocks = tuple(size // GROUP for size in shape)
        return {name: ("F8_E4M3", shape, FP8), f"{name}_scale_inv": ("F32", blocks, small)}
    if not dtype.is_floating_point:  # experts of tokens
        return {name: ("I64", shape, _DICE.integers(0, config["n_routed_experts"], 1 << 17).view(np.uint8))}
    return {name: ("BF16", shape, NEAR_1 if "norm" in name else NOISE)}


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * {"I64": 8, "F32": 4, "I32": 4, "BF16": 2}.get(dtype, 1)


def checkpoint_nbytes(model: str, folder: Path, num_layers: int) -> int:
    shards = tensors_of(config_of(model, num_layers), folder)
    return sum(nbytes_of(dtype, shape) for shard in shards.values() for dtype, shape, _ in shard.values())


def make_checkpoint(folder: Path, num_layers: int | None = None, model: str = "gpt-oss-20b") -> None:
    """A shard a layer, of random numbers; finished where its index is there. `num_layers`: of all, so many."""
    if (folder / "model.safetensors.index.json").exists():
        return
    weight_map = {}
    for shard, tensors in tensors_of(config_of(model, num_layers), folder).items():
        header, end = {}, 0
        for name, (dtype, shape, _) in tensors.items():
            begin, end = end, end + nbytes_of(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        raw = json.dumps(header).encode()
        with (folder / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for dtype, shape, values in tensors.values():
                nbytes = nbytes_of(dtype, shape)
                for begin in range(0, nbytes, values.nbytes):
                    file.write(values[: nbytes - begin].data)
        weight_map |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def int4_experts(name: str, shape: tuple[int, ...]) -> Stored:
    """The tensors of each expert, [rows, columns] of 4 bits with a scale a group, that transformers fuses to `name`."""
    stem, fused = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    rows, columns, made = shape[1] // len(parts), shape[2], Stored()
    for expert in range(shape[0]):
        for part in parts:
            path = f"{stem}.{expert}.{part}.weight"
            made[f"{path}_packed"] = "I32", (rows, columns // 8), CODES
            made[f"{path}_scale"] = "BF16", (rows, columns // GROUP), _bytes(torch.tensor([0.004]).bfloat16())
            made[f"{path}_shape"] = "I64", (2,), np.array([rows, columns]).view(np.uint8)
    return made


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
    steps, first_token_s, before = [], [], {}
    asked = Path(arguments["routing"]), arguments["requests"] + 1, arguments["tokens"], arguments["model"]
    is_played = arguments["model"] in PLAYED
    requests = recorded(*asked)[0] if is_played else [np.zeros(PROMPT_TOKENS + asked[2])] * asked[1]
    router: Any = Router(model) if is_played else SimpleNamespace()
    num_words = min(150_000, model.config.vocab_size)
    with torch.no_grad():
        for number, chosen in enumerate(requests):
            if number == 1:
                before = expertly.stats(model).as_dict()["phases"]["decode"]
            ids = torch.randint(0, num_words, (1, len(chosen)), generator=torch.Generator().manual_seed(number))
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
    """A token, of the decode steps after the first request, at best: a cache that begins with what is needed soonest,
    and keeps what is needed again soonest (Belady, 1966). `num_experts` of a layer.
    """
    demands = [
        layer * num_experts + expert
        for request in requests[1:]
        for token in request[PROMPT_TOKENS:]
        for layer, row in enumerate(token)
        for expert in row.tolist()
    ]
    following, next_use = [len(demands)] * len(demands), dict[int, int]()
    for at in reversed(range(len(demands))):
        following[at] = next_use.get(demands[at], len(demands))
        next_use[demands[at]] = at
    kept = dict(sorted(next_use.items(), key=lambda item: item[1])[:capacity])
    latest, loads = [(-use, expert) for expert, use in kept.items()], 0
    heapq.heapify(latest)
    for expert, use in zip(demands, following, strict=True):
        loads += expert not in kept
        kept[expert] = use
        heapq.heappush(latest, (-use, expert))
        while len(kept) > capacity:
            last, candidate = heapq.heappop(latest)
            if kept.get(candidate) == -last:  # else the entry is from before it was needed again
                del kept[candidate]
    return loads * expert_nbytes / sum(len(request) - PROMPT_TOKENS for request in requests[1:])


def main() -> None:
    args = options(
        __doc__, model=tuple(FEWEST_LAYERS), shares="50%,25%", systems="lru,expertly", requests=4,
        tokens=48, threads=2, routing=str(ROUTING), dtype=None, disk="60GiB", out=None,
    )  # fmt: skip
    from expertly.core.resources import parse_memory
    from expertly.hardware.measure import measure_disk
    from expertly.model.packing import pack
    from expertly.store.packed import PackedStore

    every, fewest = config_of(args.model)["num_hidden_layers"], FEWEST_LAYERS[args.model]
    with tempfile.TemporaryDirectory() as scratch:
        size, room = partial(checkpoint_nbytes, args.model, Path(scratch)), parse_memory(args.disk, 0) // 2
        num_layers = fewest + bisect_right(range(fewest, every + 1), room, key=size) - 1
        if num_layers < fewest:
            least = 2 * size(fewest) / GIB
            raise SystemExit(f"--disk {args.disk}: {fewest} layers and their store take {least:.1f} GiB")
    layers = f"{num_layers} of {every}"
    source = work_folder(args.model if num_layers == every else f"{args.model}-{num_layers}-layers")
    make_checkpoint(source, num_layers, args.model)
    folder = source.with_name(f"{source.name}-{args.dtype or 'released'}-store")
    is_packed = (folder / "manifest.json").exists()
    store = PackedStore.open(folder) if is_packed else pack(source, folder, args.dtype)
    requests, origin = [], "random weights"
    if args.model in PLAYED:
        requests, origin = recorded(Path(args.routing), args.requests + 1, args.tokens, args.model)
    layer = store.manifest.layers[0]
    disk = measure_disk(store.extents[0][0], 1 << 20, 4, 0.3).nbytes_per_s
    common = {"store": str(folder)} | {
        key: vars(args)[key] for key in ("model", "routing", "requests", "tokens", "threads")
    }
    resident = child("real_shape.py", common | {"memory": "100%", "system": "resident"}, timeout=3600)
    floor_compute = statistics.median(resident["steps"])
    speed = {"tokens_per_s": 1 / floor_compute, "ttft_s": resident["ttft"]}
    rows: list[dict[str, Any]] = [{"what": "all resident", "layers": layers, **speed}]
    for share in args.shares.split(","):
        beside = store.dense_nbytes + BESIDE_NBYTES
        memory = parse_memory(share, store.experts_nbytes) - (0 if share.endswith("%") else beside)
        if memory < layer.expert_nbytes * 16:
            raise SystemExit(f"--shares {share}: beside experts the model takes {beside / GIB:.1f} GiB")
        sizes = memory // layer.expert_nbytes, layer.num_experts, layer.expert_nbytes
        loads = belady_nbytes(requests, *sizes) if requests else 0.0
        floor = max(floor_compute, loads / disk)
        for system in args.systems.split(","):
            settings = common | {"memory": memory, "system": system}
            with memory_cgroup(beside + memory) as group:
                found = child("real_shape.py", settings, group, timeout=3600)
            taken = statistics.fmean(found["steps"])
            rows.append(
                {
                    "what": system,
                    "layers": layers,
                    "memory": share,
                    "routing": origin + (", modelled ahead" if "-ahead" in system else ""),
                    "tokens_per_s": 1 / taken,
                    "hit_rate": found["hits"] / (found["hits"] + found["misses"]),
                    "mb_a_token": found["bytes_loaded"] / len(found["steps"]) / 1e6,
                    "prefetched_mb_a_token": found["prefetched_bytes"] / len(found["steps"]) / 1e6,
                    "belady_mb_a_token": loads / 1e6 if requests else None,
                    "floor_tokens_per_s": 1 / floor,
                    "of_floor": taken / floor,
                    "ttft_s": found["ttft"],
                }
            )
    common |= {
        "layers": layers,
        "disk": args.disk,
        "stored_as": store.manifest.stored_as,
        "experts_gib": store.experts_nbytes / GIB,
    }
    print_report("real_shape", rows, common | {"disk_gb_per_s": disk / 1e9, "kernels": resident["kernels"]}, args.out)


if __name__ == "__main__":
    run(main, play)

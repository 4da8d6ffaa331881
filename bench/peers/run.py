"""`expertly` against llama.cpp's mmap, ftllm, neurostream and accelerate's offload: the same model, cgroup and tokens.

    python bench/peers/run.py [--sizes 4x,2x] [--peers expertly,llama.cpp,ftllm,neurostream,accelerate]
                              [--systems lru,expertly,expertly-ahead] [--formats none,mxfp4] [--threads 1,2]
                              [--model like|qwen3|3gib] [--gguf Q4_0|Q4_K_M] [--requests 3] [--tokens 32]

`4x`: a memory cgroup (version 1) of a quarter of the whole model's bytes, for each process, from its first byte on;
`ram`: all the memory there is, half of which must hold the models of all peers at once. Peers take turns, request by
request, and each request with each number of threads; what is fed does not depend on what a model would choose, but
for ftllm, which decodes its own text. `--model qwen3`: layers of Qwen3-30B-A3B's shape (tools/widen_model.py).
`--gguf`: a file that llama.cpp quantises, as published ones are, for `expertly`, llama.cpp and neurostream;
`--formats` mxfp4, int4, int8: experts rounded to it. `--memory`: of `expertly`; auto is what is left in its cgroup.
The first request only fills caches. llama.cpp and accelerate are the extra `peers`; ftllm and neurostream are
installed into $EXPERTLY_BENCH_DIR, where only their processes find them. What is not there is left out, and said so.
Columns: docs/peers.md. Beside another commit: bench/beside.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the other benchmarks' helpers

from common import bench_folder, drop_page_cache, inflated_model, memory_cgroup, options, print_report
from floor import Floor
from pages import make_requests, record_requests
from players import Ended, Player

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MODELS = ("like", "qwen3", "3gib")
INFLATED = {"like": {"gib": 4.0, "num_layers": 8}, "3gib": {"gib": 3.0, "num_layers": None}}
NEEDS = {"expertly": "expertly", "llama.cpp": "llama_cpp", "accelerate": "accelerate"}
PACKAGES = {"ftllm": "ftllm==1.9.0", "neurostream": "neurostream==0.2.1"}
"""Each in a folder of its own, without what it asks for: that would replace the torch which all share."""
COMPUTES = {
    "expertly": "bfloat16, or what a format's kernel says",
    "accelerate": "bfloat16",
    "llama.cpp": "bfloat16; activations in 8 bits with 4-bit weights",
    "ftllm": "bfloat16",
    "neurostream": "float32",
}
TAKE_GGUF = ("llama.cpp", "neurostream")
ARENA_NBYTES = 128 << 20
"""neurostream's buffers for reading."""
BESIDE_NBYTES = 400 << 20
"""What Python, torch and transformers take beside weights: what accelerate is not given for weights."""


@dataclass(slots=True)
class Entry:
    """A peer in one size: its process, and what it answered, by number of threads."""

    row: dict[str, Any]
    settings: dict[str, Any]
    player: Player | None = None
    status: str = "ran"
    answers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def play(self, request: dict[str, Any], threads: int) -> None:
        if self.player is None:
            return
        try:
            self.answers.setdefault(threads, []).append(self.player.play(request | {"threads": threads}))
        except Ended as ended:
            self.status, self.player = f"{ended} in request {len(self.answers.get(threads, ())) + 1}", None

    def start(self, group: Path | None) -> None:
        try:
            self.player = Player(self.settings, group, packages_of(self.settings["peer"]))
        except Ended as ended:
            self.status = f"{ended} while loading"


def main() -> None:
    args = options(
        __doc__, sizes="4x,2x", peers="expertly,llama.cpp,ftllm,neurostream,accelerate",
        systems="lru,expertly,expertly-ahead", formats="none", memory="auto", threads="1,2", model=MODELS,
        gguf=None, requests=3, prompt=256, tokens=32, out=None,
    )  # fmt: skip
    peers = [peer for peer in args.peers.split(",") if _is_there(peer)]
    if args.gguf:
        args.formats = "none"
        peers = [peer for peer in peers if peer in ("expertly", *TAKE_GGUF)]
    model = widened_model() if args.model == "qwen3" else inflated_model(**INFLATED[args.model])
    requests = make_requests(model, args.requests + 1, args.prompt, args.tokens)
    context = -(-(args.prompt + args.tokens) // 256) * 256
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        bench = Bench(args, model, requests, context, Path(scratch), peers)
        rows = [row for size in args.sizes.split(",") for row in bench.run(size, peers)]
        bench.compare(rows)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    print_report("peers", rows, settings | bench.facts, args.out)


class Bench:
    """All sizes on one model."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: Path,
        requests: list[dict[str, Any]],
        context: int,
        scratch: Path,
        peers: list[str],
    ) -> None:
        import expertly
        from expertly.model.packing import pack_cached

        self._args, self._model, self._requests = args, model, requests
        self._context, self._scratch = context, scratch
        if args.gguf:
            self._model = model = self._gguf
        self._store = pack_cached(model)
        self._layers = self._store.manifest.layers
        self._nbytes = self._store.experts_nbytes + self._store.dense_nbytes
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
        if "ram" in args.sizes.split(",") and len(peers) * self._nbytes > memory // 2:
            raise SystemExit(f"--peers {','.join(peers)}: so many models do not fit in half of {memory >> 30} GiB")
        self._disk: list[float] = []
        loaded, _ = expertly.load(str(model), system="lru", memory="25%", device="cpu")
        record_requests(loaded, requests, scratch / "routing", full=False)
        expertly.unload(loaded)
        self._floor = Floor(scratch / "routing", self._layers)
        self.facts: dict[str, Any] = {"whole_model_bytes": self._nbytes, "computes_in": COMPUTES, "packages": PACKAGES}

    def run(self, size: str, peers: list[str]) -> list[dict[str, Any]]:
        """The rows of one size; no processes are left."""
        limit = None if size == "ram" else int(self._nbytes / float(size.removesuffix("x")))
        entries = [entry for peer in peers for entry in self._entries(peer, limit)]
        threads = [int(number) for number in self._args.threads.split(",")]
        with ExitStack() as stack:
            files = {self._model, self._store.folder}
            files |= {Path(entry.settings["gguf"]).parent for entry in entries if "gguf" in entry.settings}
            for folder in files:
                drop_page_cache(folder)
            for entry in entries:
                entry.start(None if limit is None else stack.enter_context(memory_cgroup(limit)))
                if entry.player is not None:
                    stack.callback(entry.player.close)
            for turn, request in enumerate(self._requests):
                self._disk.append(self._disk_rate())
                for i in range(len(entries)):
                    entry = entries[(turn + i) % len(entries)]
                    for number in threads if turn % 2 else threads[::-1]:
                        entry.play(request, number)
            return [row for entry in entries for row in self._rows(entry, size, limit, threads)]

    @property
    def _gguf(self) -> Path:
        if self._model.suffix == ".gguf":
            return self._model
        folder = self._model.with_name(f"{self._model.name}-gguf")
        whole, kind = folder / "model.gguf", self._args.gguf
        if not whole.exists() and importlib.util.find_spec("gguf") is not None:
            sys.path.insert(0, str(TOOLS))
            from write_gguf import write_gguf

            folder.mkdir(exist_ok=True)
            write_gguf(self._model, whole)
        if kind is None:
            return whole
        quantised = folder / f"{kind}.gguf"
        if not quantised.exists():
            import llama_cpp

            asked = llama_cpp.llama_model_quantize_default_params()
            asked.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
            partial = quantised.with_suffix(".partial")
            if llama_cpp.llama_model_quantize(str(whole).encode(), str(partial).encode(), asked):
                raise OSError(f"llama.cpp cannot quantise {whole} to {kind}")
            partial.rename(quantised)
        return quantised

    @property
    def _untied(self) -> Path:
        """The model with a head of its own, which ftllm needs; the rest is linked."""
        config = json.loads((self._model / "config.json").read_text())
        if not config["tie_word_embeddings"]:
            return self._model
        folder = self._model.with_name(f"{self._model.name}-untied")
        if not folder.exists():
            write_untied(self._model, folder, config)
        return folder

    def _entries(self, peer: str, limit: int | None) -> list[Entry]:
        base = {"peer": peer, "model": str(self._model), "context": self._context}
        if peer == "llama.cpp":
            return [Entry({"peer": peer, "kind": "mmap"}, base | {"gguf": str(self._gguf), "copies": limit is None})]
        if peer == "neurostream":
            cache = 0 if limit is None else max(0, limit - BESIDE_NBYTES - ARENA_NBYTES)
            budgets = {"mem_budget": ARENA_NBYTES, "ram_budget": cache if limit else 2 * self._nbytes}
            return [Entry({"peer": peer, "kind": "streaming"}, base | {"gguf": str(self._gguf), "budgets": budgets})]
        if peer == "ftllm":
            cache = None if limit is None else max(0, limit - BESIDE_NBYTES - self._store.dense_nbytes)
            kind = "cpu" if limit is None else "disk"
            return [Entry({"peer": peer, "kind": kind}, base | {"model": str(self._untied), "cache_bytes": cache})]
        if peer == "accelerate":
            folder = Path(tempfile.mkdtemp(dir=self._scratch))
            layer = max(one.nbytes for one in self._layers)
            cpu = None if limit is None else max(0, limit - BESIDE_NBYTES - layer)  # a layer's working copy
            kind = "transformers" if limit is None else "disk offload"
            return [Entry({"peer": peer, "kind": kind}, base | {"cpu_bytes": cpu, "offload_folder": str(folder)})]
        if limit is None:
            return [Entry({"peer": peer, "kind": "resident"}, base | _ours("resident", "none", "100%"))]
        return [
            Entry({"peer": peer, "kind": f"{system}, {form}"}, base | _ours(system, form, self._args.memory))
            for system in self._args.systems.split(",")
            for form in self._args.formats.split(",")
        ]

    def _rows(self, entry: Entry, size: str, limit: int | None, threads: list[int]) -> list[dict[str, Any]]:
        found = []
        for number in threads:
            answers = entry.answers.get(number, [])
            row = {"size": size, **entry.row, "threads": number, "status": entry.status, "limit_bytes": limit}
            if len(answers) > 1:
                warm = answers[1:]
                row["tokens_per_s"] = len(warm) / sum(one["tpot_s"] for one in warm)
                row |= {key: statistics.median(one[key] for one in warm) for key in ("tpot_s", "ttft_s")}
                row |= {key: statistics.mean(one[key] for one in warm) for key in warm[0] if key.endswith("_a_token")}
                row["peak_rss_bytes"] = max(one["peak_rss_bytes"] for one in answers)
                row |= {"tpots": [one["tpot_s"] for one in warm], "greedy": [one["greedy"] for one in answers]}
                facts = entry.player.loaded["facts"] if entry.player is not None else {}
                row |= {key: facts[key] for key in ("memory_bytes", "dense_bytes", "why") if key in facts}
            found.append(row)
        return found

    def compare(self, rows: list[dict[str, Any]]) -> None:
        """Ratios between rows; `greedy` and `tpots` go."""
        self.facts["disk_bytes_per_s"] = disk = statistics.median(self._disk)
        resident = [row for row in rows if row["kind"] == "resident" and "tpots" in row]
        reference = next((row["greedy"] for row in [*resident, *rows] if "greedy" in row), None)
        for row in rows:
            if "greedy" not in row:
                continue
            chosen = [a == b for x, y in zip(row["greedy"], reference, strict=False) for a, b in zip(x, y, strict=True)]
            row["greedy_agreement"] = sum(chosen) / len(chosen)
            alike = [one for one in rows if (one["size"], one["threads"]) == (row["size"], row["threads"])]
            for peer in COMPUTES.keys() - {"expertly"}:
                theirs = [one for one in alike if one["peer"] == peer and "tpots" in one]
                if theirs and row["peer"] != peer:
                    best = min(theirs, key=lambda one: one["tpot_s"])
                    pairs = zip(best["tpots"], row["tpots"], strict=False)
                    row[f"to_{peer}"] = statistics.median(a / b for a, b in pairs)
                    row[f"ttft_to_{peer}"] = row["ttft_s"] / best["ttft_s"]
            if row["peer"] != "expertly":
                continue
            row["beside_bytes"] = row["peak_rss_bytes"] - row["memory_bytes"] - row["dense_bytes"]
            if row["kind"] == "resident" or not resident:
                continue
            compute = min(one["tpot_s"] for one in resident if one["threads"] == row["threads"])
            row["floor_bytes_a_token"] = self._floor.nbytes_a_token(row["memory_bytes"])
            row["to_bound"] = row["tpot_s"] / max(compute, row["bytes_read_a_token"] / disk)
            row["to_floor"] = row["tpot_s"] / max(compute, row["floor_bytes_a_token"] / disk)
        for row in rows:
            row.pop("greedy", None)
            row.pop("tpots", None)
        self.facts["whys"] = {f"{row['size']} {row['kind']}": row.pop("why") for row in rows if "why" in row}

    def _disk_rate(self) -> float:
        from expertly.hardware.measure import measure_disk

        return measure_disk(self._store.extents[0][0], 1 << 20, 4, 0.3).nbytes_per_s


def _ours(system: str, form: str, memory: str) -> dict[str, Any]:
    return {"system": system, "memory": memory, "quantize": None if form == "none" else form}


def widened_model() -> Path:
    """Four layers of Qwen3-30B-A3B's shape that route like the demo model, made once."""
    sys.path.insert(0, str(TOOLS))
    from widen_model import Shape, widen

    folder = bench_folder() / "demo-as-qwen3-30b-a3b-4-layers"
    if not folder.exists():
        widen(folder, Shape(), num_layers=4)
    return folder


def write_untied(model: Path, folder: Path, config: dict[str, Any]) -> None:
    """`folder` appears when it is complete."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    index = json.loads((model / "model.safetensors.index.json").read_text())
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors.index.json"):
            os.link(file, partial / file.name)
    with safe_open(model / index["weight_map"]["model.embed_tokens.weight"], "pt") as opened:
        head = opened.get_tensor("model.embed_tokens.weight")
    save_file({"lm_head.weight": head}, partial / "model-head.safetensors", {"format": "pt"})
    index["weight_map"]["lm_head.weight"] = "model-head.safetensors"
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    (partial / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    partial.rename(folder)


def packages_of(peer: str) -> Path | None:
    """Where the packages are that only this peer finds; None: among everybody's."""
    return bench_folder() / "packages" / PACKAGES[peer] if peer in PACKAGES else None


def _is_there(peer: str) -> bool:
    if peer not in COMPUTES:
        raise SystemExit(f"--peers {peer}: accepted: {', '.join(COMPUTES)}")
    if (folder := packages_of(peer)) is not None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, PACKAGES[peer]]
        if not folder.exists() and subprocess.run(command, check=False).returncode != 0:
            print(f"{peer} is left out: {PACKAGES[peer]} cannot be installed", file=sys.stderr)
            return False
        return True
    if importlib.util.find_spec(NEEDS[peer]) is None:
        print(f"{peer} is left out: {NEEDS[peer]} is not installed (pip install 'expertly[peers]')", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()

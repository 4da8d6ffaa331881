"""Experts of every weight format times one token, from memory: what share of the read rate their weights pass at.

    python bench/products.py [--formats q4_0,bfloat16] [--hidden 256,1024,2048] [--threads 1,2] [--kernels auto]
                             [--mib 512] [--rounds 9] [--out bench/results/products.json]

A layer's experts lie one after the other, --mib of them and at least 16 times the last cache; each token has the next
eight. `read`: GB/s at which torch sums the same memory up; `share`: of that, the experts' bytes. In turns, the best
quarter of the rounds; with one thread its processor time counts, with several the time that passes. With xllamacpp
installed `llama_cpp` is the rate of llama.cpp's own products with the same GGUF blocks, and `beside` ours over it.

--out keeps what other kinds of processors measured, in `others`. Bounds: `share` 0.80 with one thread and 0.90 with
two; of Q2_K, Q3_K, IQ4_NL and IQ4_XS 0.60 with two, and `beside` 1 for the rest.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import expertly  # noqa: F401  # isort: skip  (before torch: how its threads wait)
import numpy as np
import torch
from common import ROOT, options, print_report
from torch.nn.functional import silu

from expertly.core.geometry import LayerGeometry
from expertly.engine.process import keep_off_trapped_instructions
from expertly.formats import FORMATS, expert_format
from expertly.formats.gguf import GGUF_FORMATS
from expertly.formats.matrix import Matrix
from expertly.native.activations import recognise
from expertly.native.kernels import NO_DOWN, ExpertProducts, Kernels, choose_kernels

sys.path.insert(0, str(ROOT))
from tests.formats.matrices import MATRICES  # of a checkpoint: bytes as they may be

DTYPES = ("bfloat16", "float16", "float32")
NEURONS = {256: 256, 1024: 512, 2048: 768}
TOP_K = 8
CACHES = 16

Pass = Callable[[], None]


def matrices(name: str, hidden: int, width: int) -> list[Matrix]:
    """Up, which gate equals, and down."""
    dice, made = torch.Generator().manual_seed(0), []
    for shape in ((width, hidden), (hidden, width)):
        matrix, _ = MATRICES[name](dice, *shape)
        if name.startswith("fp8"):  # few small weights, as real ones have
            codes = (torch.randn(shape, generator=dice) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            matrix = Matrix(codes, torch.full_like(matrix.scales, 2**-9))
        made.append(matrix)
    return made


def experts(name: str, hidden: int, width: int, nbytes: int) -> tuple[torch.Tensor, LayerGeometry, list[Matrix]]:
    """`nbytes` of experts [E, bytes]."""
    dtype = getattr(torch, name) if name in DTYPES else torch.float32
    layer, parts = LayerGeometry(TOP_K, TOP_K, hidden, width, 3, dtype.itemsize), []
    if name in FORMATS:
        layer, form = expert_format(name).geometry(layer), FORMATS[name]
        parts = matrices(name, hidden, width)
        up, down = map(form.parts_of, parts)
        blocks = torch.from_numpy(np.concatenate(list(expert_format(name).pack((up, up), down))))
    else:
        blocks = (torch.randn(width, 3, hidden) * 0.02).to(dtype).view(torch.uint8)
    num = -(-nbytes // blocks.nbytes // TOP_K) * TOP_K
    return blocks.view(1, -1).repeat(num, 1), layer, parts


def experts_pass(stored: torch.Tensor, layer: LayerGeometry, dtype: torch.dtype, kernels: Kernels) -> Pass:
    activation = recognise(lambda gate, up: silu(gate) * up, dtype, is_gated=True)
    assert activation is not None
    formats = expert_format(layer.format).kernels if layer.format else (NO_DOWN,) * 3
    row_nbytes = layer.block_nbytes or 3 * layer.hidden_size * dtype.itemsize
    shape = 2, layer.hidden_size
    products = ExpertProducts(formats, shape, row_nbytes, layer.hidden_size * dtype.itemsize, activation, (), None)
    x, out = torch.randn(1, layer.hidden_size).to(dtype), torch.empty(TOP_K, layer.hidden_size, dtype=dtype)
    first, rows, size = array("q", TOP_K * [0]), array("q", range(TOP_K)), stored.shape[1]
    library, calls = kernels.library, []
    assert library is not None
    for begin in range(stored.data_ptr(), stored.data_ptr() + stored.nbytes, TOP_K * size):
        tasks = array("q", [number for expert in rows for number in (begin + expert * size, 1, expert)])
        numbers = (*products.formats, products.num_inner, layer.intermediate_size, *products.addresses, 0)
        places = (tasks.buffer_info()[0], TOP_K, first.buffer_info()[0], rows.buffer_info()[0])
        calls.append((array("q", (*numbers, *places, x.data_ptr(), x.nbytes, out.data_ptr(), 0)), tasks))

    def run(kept: Any = (stored, first, rows, x, out, products)) -> None:
        """As a program's step does it: a Python call would be a tenth of a small layer's time."""
        for call, _ in calls:
            library.call.experts(library.level, library.dtypes[dtype], torch.get_num_threads(), call.buffer_info()[0])

    return run


class Ggml:
    """llama.cpp's products, by the library of the package xllamacpp, which is built for AVX2."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "xllamacpp.abi3.so"))
        self._library.ggml_cpu_init()
        for name in ("init", "new_tensor_2d", "mul_mat", "new_graph_custom", "get_data"):
            getattr(self._library, f"ggml_{name}").restype = ctypes.c_void_p

    def experts_pass(self, kind: int, mats: list[Matrix], shape: tuple[int, int], nbytes: int) -> tuple[Pass, int]:
        """Gate, up and down of experts one after the other, without what is between them; and their bytes."""

        class Settings(ctypes.Structure):
            _fields_ = (("nbytes", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("is_empty", ctypes.c_bool))

        base, address, long = self._library, ctypes.c_void_p, ctypes.c_int64
        of_expert = 2 * mats[0].numbers.nbytes + mats[1].numbers.nbytes
        num = -(-nbytes // of_expert)
        context = address(base.ggml_init(Settings(num * (of_expert + 65536) + (64 << 20), None, False)))
        graph = address(base.ggml_new_graph_custom(context, ctypes.c_size_t(8 * num), ctypes.c_bool(False)))
        inputs = [address(base.ggml_new_tensor_2d(context, 0, long(size), long(1))) for size in shape]
        for tensor, size in zip(inputs, shape, strict=True):
            values = np.random.default_rng(0).standard_normal(size, np.float32)
            ctypes.memmove(address(base.ggml_get_data(tensor)), values.ctypes.data, values.nbytes)
        for number in range(3 * num):
            matrix, x = mats[number % 3 == 2], inputs[number % 3 == 2]
            sizes = shape if number % 3 < 2 else shape[::-1]
            tensor = address(base.ggml_new_tensor_2d(context, kind, *map(long, sizes)))
            ctypes.memmove(
                address(base.ggml_get_data(tensor)), address(matrix.numbers.data_ptr()), matrix.numbers.nbytes
            )
            base.ggml_build_forward_expand(graph, address(base.ggml_mul_mat(context, tensor, x)))

        def run() -> None:
            self._library.ggml_graph_compute_with_ctx(context, graph, torch.get_num_threads())

        run.free = lambda: base.ggml_free(context)  # type: ignore[attr-defined]
        return run, num * of_expert


def ggml() -> Ggml | None:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        print("xllamacpp is not installed: llama.cpp's own rates are left out")
        return None
    return Ggml(Path(spec.origin).parent)


def last_cache_nbytes() -> int:
    sizes = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.strip()[:-1]) << 10 for size in sizes), default=32 << 20)


def rates_of(name: str, hidden: int, args: Any, peer: Ggml | None) -> list[dict[str, Any]]:
    nbytes, width = max(args.mib << 20, CACHES * last_cache_nbytes()), NEURONS.get(hidden, 768)
    stored, layer, mats = experts(name, hidden, width, nbytes)
    words, rows, context = stored.view(-1)[: stored.nbytes // 8 * 8].view(torch.int64), [], None
    passes: dict[str, tuple[Pass, int]] = {"read": (lambda: words.sum(), stored.nbytes)}
    dtype = getattr(torch, name if name in DTYPES else "float32" if FORMATS[name] in GGUF_FORMATS else args.dtype)
    if name.endswith("_f16"):
        dtype = torch.float16
    for kernels in map(choose_kernels, args.kernels.split(",")):
        if kernels.most_tokens(dtype, layer.format or ""):
            passes[kernels.name] = experts_pass(stored, layer, dtype, kernels), stored.nbytes
    if peer is not None and name in FORMATS and FORMATS[name] in GGUF_FORMATS:
        from gguf import GGMLQuantizationType

        context, size = peer.experts_pass(GGMLQuantizationType[FORMATS[name].type], mats, (hidden, width), nbytes)
        passes["llama_cpp"] = context, size
    for num_threads in map(int, args.threads.split(",")):
        torch.set_num_threads(num_threads)
        clock = time.thread_time if num_threads == 1 else time.perf_counter
        seconds: dict[str, list[float]] = {key: [] for key in passes}
        for number in range(args.rounds + 1):
            for key, (run, _) in passes.items():
                begin = clock()
                run()
                if number:  # the first warms up
                    seconds[key].append(clock() - begin)
        quarter = max(1, args.rounds // 4)
        best = {key: size / statistics.mean(sorted(seconds[key])[:quarter]) / 1e9 for key, (_, size) in passes.items()}
        for key in passes:
            if key in ("read", "llama_cpp"):
                continue
            row = {"format": name, "hidden": hidden, "intermediate": width, "threads": num_threads, "kernels": key}
            row |= {"dtype": str(dtype).removeprefix("torch."), "gb_per_s": best[key], "read": best["read"]}
            row |= {"share": best[key] / best["read"], "llama_cpp": best.get("llama_cpp")}
            rows.append(row | {"beside": best[key] / best["llama_cpp"] if "llama_cpp" in best else None})
    if context is not None:
        context.free()  # type: ignore[attr-defined]
    return rows


def main() -> None:
    keep_off_trapped_instructions()
    args = options(
        __doc__, formats=",".join((*DTYPES, *FORMATS)), hidden=",".join(map(str, NEURONS)), threads="1,2",
        kernels="auto", dtype="bfloat16", mib=512, rounds=9, out=None,
    )  # fmt: skip
    peer, rows = ggml(), []
    for name in args.formats.split(","):
        for hidden in map(int, args.hidden.split(",")):
            rows += rates_of(name, hidden, args, peer)
    report = print_report("products", rows, vars(args) | {"out": None})
    if args.out is not None:
        kept = [json.loads(Path(args.out).read_text())] if Path(args.out).exists() else []
        kept += [old for last in kept for old in last.pop("others")]
        others = [old for old in kept if old["machine"]["processor"] != report["machine"]["processor"]]
        Path(args.out).write_text(json.dumps(report | {"others": others}, indent=1) + "\n")


if __name__ == "__main__":
    main()

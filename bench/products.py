"""An expert's products at one token (and a few): the compiled ones against torch's, in GB/s of weights, in turns.

    python bench/products.py [--hidden 2048] [--intermediate 768] [--dtypes bfloat16,mxfp4,fp8,int4_g128] [--threads 1]
    python bench/products.py --kernels avx512,avx2,generic    each instruction set of this processor

`experts`: all experts of a layer's token in one call, from slots as the engine has them, more than a cache holds;
`linear`: a dense matrix (torch's nn.Linear). `read` is the speed at which the same memory is summed up, the most that
one could hope for; `of_read` is the share of it. Bounds in bfloat16: 22 GB/s with one thread and 26 with two, where
llama.cpp reaches 25 and 28; in a weight format of 4 bits 65 % of `read` with one thread and 75 % with two, in one of 8
bits 80 %.

`--clock cpu` counts processor time instead, for one thread on a machine that does other things, too.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
from collections.abc import Callable
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import expertly  # noqa: F401  # isort: skip  (before torch: how its threads wait)
import torch
from common import CLOCKS, options, print_report
from transformers.integrations.moe import _default_apply_gate

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine.compute import LayerCompute
from expertly.engine.process import keep_off_trapped_instructions
from expertly.engine.reading import layer_rows
from expertly.formats import FORMATS, expert_format
from expertly.model.dense import use_kernels
from expertly.native.kernels import choose_kernels

Pass = Callable[[], None]
SCALES = {"mxfp4": (112, 127)}
"""Bytes that make usual scales where some of them are scales; of formats whose scales are floats, 56 to 62."""


def layer_of(args: argparse.Namespace, name: str) -> tuple[LayerGeometry, torch.dtype]:
    """As many experts in a dtype or format as make --mib, and what they are computed in."""
    dtype = torch.bfloat16 if name in FORMATS else getattr(torch, name)
    layer = LayerGeometry(args.top_k, args.top_k, args.hidden, args.intermediate, 3, dtype.itemsize)
    layer = expert_format(name).geometry(layer) if name in FORMATS else layer
    return replace(layer, num_experts=max(args.top_k, (args.mib << 20) // layer.expert_nbytes)), dtype


def weights(layer: LayerGeometry, dtype: torch.dtype) -> torch.Tensor:
    """Rows as the engine has them, [E * I, 3, H] or blocks of a format, in pages as it takes them."""
    region = mmap.mmap(-1, layer.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    rows = layer_rows(torch.frombuffer(region, dtype=torch.uint8), Geometry((layer,)), 0, dtype)
    generator = torch.Generator().manual_seed(0)
    if layer.format:
        return rows.random_(*SCALES.get(layer.format, (56, 63)), generator=generator)
    for start in range(0, len(rows), layer.intermediate_size):
        part = rows[start : start + layer.intermediate_size]
        part.copy_(torch.randn(part.shape, generator=generator) * 0.02)
    return rows


def experts_pass(
    rows: torch.Tensor, geometry: LayerGeometry, dtype: torch.dtype, args: argparse.Namespace, kernels: str, n: int
) -> Pass:
    """Every expert once, for n tokens, `top_k` at a time where the products take several."""
    num_experts = geometry.num_experts
    module: Any = SimpleNamespace(act_fn=torch.nn.functional.silu, has_bias=False)
    module._apply_gate = MethodType(_default_apply_gate, module)
    compute = LayerCompute(module, geometry, 1, rows, dtype, None, choose_kernels(kernels))
    x = torch.randn(n, args.hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.empty(args.top_k, args.hidden, dtype=dtype)
    spans = [Span(0, expert, 0, 1, expert) for expert in range(num_experts)]

    def run() -> None:
        if n == 1 and compute.is_native(x):
            for start in range(0, num_experts, args.top_k):
                some = spans[start : start + args.top_k]
                compute.multiply(x, [(span, (0,), (k,)) for k, span in enumerate(some)], out)
        else:
            for span in spans:
                compute.whole(x, span, torch.empty(n, args.hidden, dtype=dtype))

    return run


def linear_pass(rows: torch.Tensor, args: argparse.Namespace, kernels: str, num_tokens: int) -> Pass:
    """The same memory as matrices [H, H]."""
    flat = rows.view(-1, args.hidden)
    x = torch.randn(num_tokens, args.hidden, generator=torch.Generator().manual_seed(1)).to(rows.dtype)
    layers = []
    for start in range(0, len(flat) - args.hidden + 1, args.hidden):
        layer = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        layer.weight = torch.nn.Parameter(flat[start : start + args.hidden], requires_grad=False)
        layers.append(layer)
    use_kernels(torch.nn.ModuleList(layers), choose_kernels(kernels))

    def run() -> None:
        with torch.no_grad():
            for layer in layers:
                layer(x)

    return run


def main() -> None:
    keep_off_trapped_instructions()
    args = options(
        __doc__, hidden=2048, intermediate=1408, top_k=4, mib=512, dtypes="bfloat16,float16,float32", threads="1,2",
        tokens="1", kernels="native", rounds=9, clock=tuple(CLOCKS),
    )  # fmt: skip
    clock = CLOCKS[args.clock]
    found = []
    for stored_as in args.dtypes.split(","):
        layer, dtype = layer_of(args, stored_as)
        rows = weights(layer, dtype)
        nbytes = rows.numel() * rows.element_size()
        words = rows.view(-1).view(torch.int64)
        for num_tokens in map(int, args.tokens.split(",")):
            passes: dict[tuple[str, str], Pass] = {("read", "torch"): lambda words=words: words.sum()}
            for name in (() if layer.format else ("torch",)) + tuple(args.kernels.split(",")):
                passes["experts", name] = experts_pass(rows, layer, dtype, args, name, num_tokens)
                if not layer.format:
                    passes["linear", name] = linear_pass(rows, args, name, num_tokens)
            for num_threads in map(int, args.threads.split(",")):
                torch.set_num_threads(num_threads)
                seconds: dict[tuple[str, str], list[float]] = {key: [] for key in passes}
                for number in range(args.rounds + 1):
                    for key, run in passes.items():
                        start = clock()
                        run()
                        if number:  # the first warms up
                            seconds[key].append(clock() - start)
                rates = {key: nbytes / statistics.median(taken) / 1e9 for key, taken in seconds.items()}
                for (what, name), rate in rates.items():
                    found.append(
                        {
                            "what": what,
                            "kernels": name,
                            "dtype": stored_as,
                            "threads": num_threads,
                            "tokens": num_tokens,
                            "gb_per_s": rate,
                            "of_torch": rate / rates[what, "torch"] if (what, "torch") in rates else None,
                            "of_read": rate / rates["read", "torch"],
                        }
                    )
    print_report("products", found, vars(args))


if __name__ == "__main__":
    main()

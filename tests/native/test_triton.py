"""The Triton kernels over slots: in Triton's interpreter, against sums in float64, formats' own decoders, torch's path
and the unmodified models; and compiled to machine code for the cards that they are for, which needs no card.

Triton interprets where TRITON_INTERPRET is set when it is first imported: these tests run in a process of their own,
which `test_in_the_interpreter` starts. What the interpreter forgives a compiler does not (types, constants, shapes of
blocks): so every kernel is compiled as it is launched, for sm_80 and sm_90.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import relu, silu

import expertly
from expertly.core.geometry import LayerGeometry
from expertly.core.messages import Span
from expertly.engine import shard
from expertly.formats import expert_format
from expertly.native.kernels import choose_kernels
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.engine.streams import put_in_place
from tests.engine.test_compute import relative_error
from tests.families import generate, logits_of
from tests.formats.test_formats import made
from tests.tables import crossed

triton = pytest.importorskip("triton")

from expertly.native import triton_slots  # noqa: E402
from expertly.native.triton_slots import MAX_TOKENS, Program, SlotCall, SlotProducts, TritonKernels  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the interpreter's process")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="not in the interpreter's process")
pytestmark = pytest.mark.timeout(600)

FORMATS = sorted(triton_slots._DECODERS)
COMPILED = ("", *(form for form in FORMATS if not form.startswith("int4")), "int4_g32")
COMPILED += ("int4_g128_zeros", "int4_g32_zeros_f16")


@compiled
def test_in_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=590)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-6000:] + ran.stderr[-2000:]


# -- a layer whose weights are known -----------------------------------------------------------------------------------


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def ungated(up: torch.Tensor) -> torch.Tensor:
    """nemotron_h's."""
    return relu(up).square()


class Layer:
    """Two experts of weights [E, I, M, H] in slots, one segment a slot, in any order, with garbage in the others."""

    def __init__(
        self,
        weights: torch.Tensor,
        activate: Callable[..., torch.Tensor],
        segments: int = 1,
        blocks: torch.Tensor | None = None,
        form: str = "",
        has_bias: bool = True,
    ) -> None:
        """`blocks` [E, I / B, nbytes]: the same in a format."""
        dice = torch.Generator().manual_seed(7)
        (num, width, matrices, hidden), self.dtype = weights.shape, weights.dtype
        self.weights, self.activate, self.segments = weights, activate, segments
        shape = LayerGeometry(num, 1, hidden, width, matrices, self.dtype.itemsize)
        shape = expert_format(form).geometry(shape) if form else shape
        stored = weights if blocks is None else blocks
        num_rows = stored.shape[1] // segments
        self.slots = torch.randperm(2 * num * segments, generator=dice)[: num * segments].view(num, segments).tolist()
        garbage = torch.full((2 * num * segments, num_rows, *stored.shape[2:]), 0xFF, dtype=torch.uint8)
        rows = garbage if form else torch.full(garbage.shape, torch.nan, dtype=self.dtype)
        for expert, of_expert in enumerate(self.slots):
            for segment, slot in enumerate(of_expert):
                rows[slot] = stored[expert, segment * num_rows : (segment + 1) * num_rows]
        biases = [torch.randn(num, width, generator=dice).to(self.dtype) for _ in range(matrices - 1)]
        self.inner_bias = biases if has_bias else []
        self.down_bias = torch.randn(num, hidden, generator=dice).to(self.dtype) if has_bias else None
        made = TritonKernels("").slots(
            shape, self.dtype, segments, rows.flatten(0, 1), activate, self.inner_bias, self.down_bias
        )
        assert isinstance(made, SlotProducts)
        self.products = made

    def span(self, expert: int, segment: int) -> Span:
        return Span(0, expert, segment, 1, self.slots[expert][segment])

    def exact(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Of inputs [n, H], rounded where the reference rounds."""
        rows = self.weights[expert].double()
        inner = [(x.double() @ rows[:, m].T).to(self.dtype) for m in range(rows.shape[1] - 1)]
        if self.down_bias is not None:
            inner = [values + bias[expert] for values, bias in zip(inner, self.inner_bias, strict=True)]
        out = (self.activate(*inner).double() @ rows[:, -1]).to(self.dtype)
        return out if self.down_bias is None else out + self.down_bias[expert]

    def check(self, num_tokens: int) -> None:
        """Both experts, of all tokens and of the last one, in calls as segments may come."""
        dice = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, self.weights.shape[-1], generator=dice).to(self.dtype)
        out = torch.full((num_tokens + 2, x.shape[1]), torch.nan, dtype=self.dtype)
        call = self.products.begin(x, out)
        assert isinstance(call, SlotCall)
        rows = (range(num_tokens), range(1, num_tokens + 1)), ([num_tokens - 1], [0])
        works = [(self.span(e, s), *rows[e]) for s in range(self.segments) for e in (0, 1)]
        first = len(works) // 2 + 1 if self.segments > 1 else len(works)
        for some in (works[:first], works[first : first + 1], works[first + 1 :]):
            if some:
                call.add(some)
        assert self.products.kernels.counts.native == len(works)
        self.products.kernels.counts.native = 0
        for found, expert, inputs in ((out[1:-1], 0, x), (out[:1], 1, x[-1:])):
            error = relative_error(found, self.exact(inputs, expert))
            assert error < {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}[self.dtype]
        assert out[-1].isnan().all(), "nothing else is written"


def layer_of(dtype: torch.dtype, activate: Callable[..., torch.Tensor], num_experts: int = 2, **more: Any) -> Layer:
    matrices = 2 if activate is ungated else 3
    dice = torch.Generator().manual_seed(3)
    return Layer((torch.randn(num_experts, 40, matrices, 72, generator=dice) / 6).to(dtype), activate, **more)


@interpreted
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 32])
@pytest.mark.parametrize("segments", [1, 4])
def test_experts_in_slots(segments: int, num_tokens: int) -> None:
    """Sizes that are no whole blocks of a program; parts that come in several calls."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer_of(dtype, gated, segments=segments).check(num_tokens)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_programs_that_share_a_sum(dtype: torch.dtype) -> None:
    """Wide experts' down rows are summed by several programs: always in the same order."""
    weights = (torch.randn(2, 640, 3, 72, generator=torch.Generator().manual_seed(3)) / 6).to(dtype)
    for segments in (1, 4):
        layer = Layer(weights, gated, segments=segments)
        for num_tokens in (1, 3):
            layer.check(num_tokens)
        products = layer.products
        assert products._num_parts > 1 and products._turns is not None and not products._turns.any()
    x, outs = torch.ones(1, 72, dtype=dtype), torch.empty(2, 72, dtype=dtype)
    for number in range(2):
        call = products.begin(x, outs[number : number + 1])
        assert isinstance(call, SlotCall)
        call.add([(layer.span(1, segment), [0], [0]) for segment in range(4)])
    assert torch.equal(*outs)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "ids_dtype"), [(1, torch.int64), (4, torch.int32)])
def test_experts_that_the_device_finds(num_tokens: int, ids_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Of three experts the second has no slots: others' outputs are there, and zeros of what is no expert. The rest may
    come by the same call.
    """
    layer = layer_of(dtype, gated, num_experts=3)
    spans = [layer.span(0, 0), None, layer.span(2, 0)]
    ids = torch.tensor([[2, 1, 0, 3], [0, 2, 2, -1], [1, 1, 1, 1], [3, 0, 1, 2]], dtype=ids_dtype)[:num_tokens]
    x = torch.randn(num_tokens, 72, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.full((ids.numel(), 72), torch.nan, dtype=dtype)
    call = layer.products.begin(x, out)
    assert isinstance(call, SlotCall)
    call.find(ids, spans)
    chosen = [(row, row // 4, expert) for row, expert in enumerate(ids.flatten().tolist())]
    missing = [(row, token) for row, token, expert in chosen if expert == 1]
    assert all(out[row].isnan().all() for row, _ in missing), "nothing is written"
    call.add([(layer.span(1, 0), [token for _, token in missing], [row for row, _ in missing])])
    for row, token, expert in chosen:
        if expert in (-1, 3):
            assert (out[row] == 0).all()
        else:
            error = relative_error(out[row], layer.exact(x[token : token + 1], expert)[0])
            assert error < {torch.bfloat16: 4e-3, torch.float32: 2e-6}[dtype]
    tables = [layer.products.table(some) for some in (list(spans), [None, *spans[1:]], [None, *spans[1:]])]
    assert [int(table[0]) for table in tables] == [spans[0].slot if spans[0] else 0, -1, -1]
    assert tables[1] is tables[2], "it is copied when it has changed"


@interpreted
@pytest.mark.parametrize("activate", [gated, clamped, ungated])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_of_all_kinds(has_bias: bool, activate: Callable[..., torch.Tensor]) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        layer = layer_of(dtype, activate, segments=2, has_bias=has_bias)
        for num_tokens in (1, 3):
            layer.check(num_tokens)


@interpreted
@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    """Of random bytes: weights are the format's own, so that outputs are those of the decoded experts."""
    group = expert_format(form).down.group
    hidden = 1 if form in ("q4_k", "q6_k") else 2 if group > 32 else 3  # the interpreter is slow
    blocks, weights = made(expert_format(form), 2, hidden, 3)
    blocks = torch.stack((blocks, blocks.flip(0)))
    weights = torch.stack((weights, weights.unflatten(0, (2, -1)).flip(0).flatten(0, 1)))
    dtypes = [torch.float16] if form.endswith("_f16") else [torch.bfloat16, torch.float32]
    for dtype in dtypes[1:] if form.startswith("q") else dtypes[: 1 if group > 32 else 2]:
        layer = Layer(weights.to(dtype), gated, 2, blocks, form)
        for num_tokens in (1, 5):
            layer.check(num_tokens)


@interpreted
def test_outputs_are_weighed_as_torch_does() -> None:
    """To the bit, ties among them: halves of numbers that are odd in their last place."""
    kernels = TritonKernels("")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for weights_dtype in {dtype, torch.float32}:
            for num_tokens, top_k, width in ((1, 8, 2048), (5, 1, 3), (32, 4, 100), (0, 2, 16)):
                rows = torch.randn(num_tokens * top_k, width).to(dtype)
                weights = torch.rand(num_tokens, top_k).to(weights_dtype)
                weights[: num_tokens // 2] = 0.5 + 2**-8
                found = kernels.combine(rows, weights, dtype)
                expected = (rows.view(num_tokens, top_k, width) * weights[..., None]).sum(dim=1).to(dtype)
                assert found.dtype == dtype
                if dtype == torch.float32:
                    torch.testing.assert_close(found, expected)
                else:
                    assert float((found != expected).float().mean() if found.numel() else 0) < 2e-3, "order of sums"


@interpreted
def test_what_is_not_theirs_is_torchs() -> None:
    kernels = TritonKernels("")
    shape, rows = LayerGeometry(1, 1, 256, 256, 3, 4), torch.zeros(256, 3, 256)
    for activate, dtype in ((clamped, torch.float32), (gated, torch.float64), (torch.maximum, torch.bfloat16)):
        assert kernels.slots(shape, dtype, 1, rows.to(dtype), activate, (), None) is None
    q5_1 = expert_format("q5_1").geometry(shape)
    blocks = torch.zeros(q5_1.num_blocks, q5_1.block_nbytes, dtype=torch.uint8)
    assert kernels.slots(q5_1, torch.float32, 1, blocks, gated, (), None) is None
    of_other = torch.zeros(1, 256, dtype=torch.bfloat16)
    assert kernels.slots(shape, torch.float32, 1, rows, gated, (of_other, of_other), None) is None
    layer = layer_of(torch.float32, gated).products
    x = torch.zeros(MAX_TOKENS + 1, 72)
    assert layer.begin(x, torch.zeros(MAX_TOKENS + 1, 72)) is None
    weights = torch.rand(MAX_TOKENS + 1, 1)
    assert torch.equal(kernels.combine(torch.ones_like(x), weights, x.dtype), weights.expand(-1, 72))


# -- models on a simulated accelerator ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("families"))


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels(runs_on_host=False).name == "triton", "they have been tried"
    monkeypatch.setattr(shard, "choose_kernels", lambda **_: TritonKernels("for a test"))


@interpreted
@pytest.mark.parametrize(
    ("system", "segments", "memory"), [("lru", 1, "45%"), ("expertly-ahead", 4, "45%"), ("resident", 1, "100%")]
)
@pytest.mark.usefixtures("triton_everywhere")
def test_tokens_are_the_references(
    system: str, segments: int, memory: str, families: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is in a slot until its copy was waited for. The host waits once a layer, for the router's choice, and for
    no layer of a token whose experts are all resident.
    """
    case, devices = families["qwen3_moe"], put_in_place(monkeypatch)
    with loaded(case.store, memory=memory, system=system, segments=segments) as model:
        assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        devices[0].tier.check()
        stats = expertly.stats(model).as_dict()
        kernels, decode, num_layers = stats["kernels"], stats["phases"]["decode"], len(stats["layers"])
        assert kernels["torch"] == 0 < kernels["early"] < kernels["native"]
        num_prompts = stats["phases"]["prefill"]["iterations"]
        num_waiting = num_prompts + decode["iterations"] * (system != "resident")
        waited = 2 * (num_prompts + decode["iterations"]) + num_layers * num_waiting  # two checks for NaN of a pass
        assert devices[0].stats()["synchronisations"] == waited
        assert system != "resident" or kernels["early"] == decode["hits"] > 0 == decode["misses"]


# -- the compiler ------------------------------------------------------------------------------------------------------

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
LEAST_SHARED_NBYTES = 99 << 10
"""That a program may take on every card from sm_80 on: an RTX 3090's."""


@compiled
@pytest.mark.parametrize(("form", "capability"), [*crossed(COMPILED, [80, 90]), ("", 90)])
def test_every_kernel_compiles(form: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is launched for a real model's sizes, down to machine code: in the shared memory of every such card, and
    with numbers below float32's normal ones kept, which decoding needs.
    """
    seen: set[str] = set()

    def compile(program: Program, _: Any, args: Sequence[Any]) -> None:
        kernel, constants, warps = program.kernel, program.constants, program.warps
        signature, constexprs, attributes = {}, {}, {}
        values = [*args, *(constants[name] for name in kernel.arg_names[len(args) :])]
        for place, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
            elif place < len(args) and value is not None:
                signature[name] = "i32"
            else:
                signature[name], constexprs[(place,)] = "constexpr", value
            if isinstance(value, torch.Tensor):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, constexprs, attributes)
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        found = triton.compile(source, target=target, options={"num_warps": warps})
        assert found.asm["cubin"] and found.metadata.shared <= LEAST_SHARED_NBYTES
        assert ".ftz" not in found.asm["ptx"]
        seen.add(kernel.__name__.rpartition(".")[2])

    monkeypatch.setattr(triton_slots, "_launch", compile)
    of_format = torch.float32 if form.startswith("q") else torch.float16 if form.endswith("_f16") else torch.bfloat16
    for dtype in (of_format,) if form else (torch.bfloat16, torch.float32):
        shape, rows = LayerGeometry(1, 1, 2048, 768, 3, dtype.itemsize), torch.zeros(768, 3, 2048, dtype=dtype)
        if form:
            shape = expert_format(form).geometry(shape)
            rows = torch.zeros(shape.num_blocks, shape.block_nbytes, dtype=torch.uint8)
        *inner_bias, down_bias = (torch.zeros(1, size, dtype=dtype) for size in (768, 768, 2048))
        activate = gated if dtype == torch.float32 else clamped
        kernels = TritonKernels("")
        layer = kernels.slots(shape, dtype, 2, rows, activate, inner_bias, down_bias)
        assert layer is not None
        for n in (1, 2):
            x, out = torch.zeros(n, 2048, dtype=dtype), torch.zeros(n, 2048, dtype=dtype)
            SlotCall(layer, x, out).add([(Span(0, 0, 0, n, 0), range(n), range(n))])  # of one token in part
            kernels.combine(out, torch.zeros(n, 1), dtype)
            SlotCall(layer, x, out).find(torch.zeros(n, 1, dtype=torch.int64), [Span(0, 0, 0, 2, 0)])
    assert seen == {"_inner_kernel", "_down_kernel", "_combine_kernel", "_find_kernel"}

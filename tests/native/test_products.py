"""The compiled products against sums in float64: every instruction set of this machine, sizes of all kinds."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from expertly.native import kernels as kernels_module
from expertly.native.kernels import ACCEPTED, NO_DOWN, TASK_TOKENS, Kernels, libraries, spins_shortly
from tests.native.between import activated, down_products, inner_products, with_biases

AVAILABLE = libraries()

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
WIDTHS = (1, 7, 16, 31, 32, 33, 64, 100, 257, 2048)
NEURONS = (1, 2, 3, 5, 16, 67, 300)


@pytest.fixture(params=AVAILABLE, ids=lambda library: library.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param, "for a test")


@pytest.fixture
def set_threads(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    kernels.max_threads = 8
    return lambda num_threads: monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)


def dtypes(kernels: Kernels) -> list[torch.dtype]:
    return [dtype for dtype in EPSILON if kernels.most_tokens(dtype)]


def values(dice: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=dice).to(dtype)


def dots(kernels: Kernels, rows: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, n, r] of rows [r, M, H] times x [n, H]."""
    out = torch.full((rows.shape[1], len(x), len(rows)), torch.nan, dtype=rows.dtype)
    size = rows.element_size()
    inner_products(kernels, (rows.data_ptr(), 0, len(x), 0), x, out, rows.stride(0) * size, rows.stride(1) * size, bias)
    return out


def sums(kernels: Kernels, rows: torch.Tensor, h: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """[n, H] of h [n, r] times rows [r, H]; or added to `total`."""
    out = torch.full((len(h), rows.shape[1]), torch.nan, dtype=rows.dtype) if total is None else total
    row_nbytes = rows.stride(0) * rows.element_size()
    down_products(kernels, (rows.data_ptr(), 0, len(h), 0), h, out, row_nbytes, adds=total is not None)
    return out


def of_doubles(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """These, and their magnitudes."""
    yield [tensor.double() for tensor in tensors]
    yield [tensor.double().abs() for tensor in tensors]


def assert_as_exact(actual: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, num_terms: int) -> None:
    """Within half a unit of the result's type, and what float32 sums of so many terms may lose."""
    bound = EPSILON[actual.dtype] * exact.abs() + 2**-24 * (2 + num_terms) * magnitude + 1e-30
    if actual.dtype == torch.float16:
        bound += 2**-25  # below its least normal number
    error = (actual.double() - exact).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max())} of what is allowed"


@pytest.mark.parametrize("num_tokens", range(1, TASK_TOKENS + 1))
@pytest.mark.parametrize("num_matrices", [1, 2])
def test_rows_times_tokens(kernels: Kernels, num_matrices: int, num_tokens: int) -> None:
    dice, pick = torch.Generator().manual_seed(num_tokens), random.Random(num_matrices)
    for dtype in dtypes(kernels):
        for width in WIDTHS:
            stored = values(dice, pick.choice(NEURONS) + 1, num_matrices + 1, width, dtype=dtype)
            rows = stored[1:, :num_matrices]  # a matrix besides, as the down rows are
            x = values(dice, num_tokens, width, dtype=dtype)
            exact, magnitude = (torch.einsum("rmh,nh->mnr", *pair) for pair in of_doubles(rows, x))
            assert_as_exact(dots(kernels, rows, x), exact, magnitude, width)


@pytest.mark.parametrize("num_tokens", range(1, TASK_TOKENS + 1))
def test_rows_weighed_and_summed(kernels: Kernels, num_tokens: int) -> None:
    dice = torch.Generator().manual_seed(num_tokens)
    for dtype in dtypes(kernels):
        for r in NEURONS:
            for width in (1, 33, 64, 500):
                stored, h = values(dice, r, 3, width, dtype=dtype), values(dice, num_tokens, r, dtype=dtype)
                rows = stored[:, 2]
                exact, magnitude = (torch.matmul(*pair) for pair in of_doubles(h, rows))
                assert_as_exact(sums(kernels, rows, h), exact, magnitude, r)
                total = sums(kernels, rows, h, torch.ones(num_tokens, width))
                assert_as_exact(total, exact + 1, magnitude + 1, r)


@pytest.mark.parametrize("num_inner", [1, 2])
def test_experts_in_one_call(kernels: Kernels, num_inner: int, set_threads: Callable[[int], None]) -> None:
    """Two products, biases and torch between them, of parts of experts, for any number of threads and tokens."""
    dice = torch.Generator().manual_seed(0)
    width, r, begin = 96, 300, 20
    for dtype in dtypes(kernels):
        rows = values(dice, 2, r, num_inner + 1, width, dtype=dtype) / 8
        x = values(dice, TASK_TOKENS, width, dtype=dtype)
        nbytes = (num_inner + 1) * width * dtype.itemsize, width * dtype.itemsize
        layer = with_biases(dtype, num_inner, width, begin + r, (NO_DOWN,) * 3, nbytes)
        for n, num_threads in ((1, 1), (1, 2), (3, 2), (TASK_TOKENS, 3)):
            set_threads(num_threads)
            tasks = (rows[0].data_ptr(), n, 1, rows[1].data_ptr(), 1, 1)
            x_rows, out_rows = [*reversed(range(n)), 1], [*range(n, 2 * n), 2 * n]
            out, added = torch.full((2 * n + 1, width), torch.nan, dtype=dtype), torch.ones(2 * n + 1, width)
            kernels.experts(layer.products, tasks, x_rows, out_rows, x, out, r, begin, adds=False)
            kernels.experts(layer.products, tasks, x_rows, out_rows, x, added, r, begin, adds=True)
            for number, x_of, place in ((0, x[:n].flip(0), slice(n, 2 * n)), (1, x[1:2], slice(2 * n, None))):
                inner = dots(kernels, rows[number, :, :num_inner], x_of)
                h = activated(*(one + bias[begin:] for one, bias in zip(inner, layer.inner_bias, strict=True)))
                expected = sums(kernels, rows[number, :, num_inner], h)
                layer.assert_same(out[place], expected + layer.down_bias)
                error = (added[place] - 1 - expected).abs()
                assert bool((error <= 2**-6 * (1 + expected.abs())).all()), "no bias, not rounded"
            assert out[:n].isnan().all() and bool((added[:n] == 1).all())


def test_outputs_are_weighed_as_torch_does(kernels: Kernels) -> None:
    for dtype in dtypes(kernels):
        for weights_dtype in {dtype, torch.float32}:
            for num_tokens, top_k, width in ((1, 8, 2048), (1, 1, 3), (5, 4, 100), (16, 6, 320)):
                rows, weights = torch.randn(num_tokens * top_k, width).to(dtype), torch.rand(num_tokens, top_k)
                weights = weights.to(weights_dtype)
                expected = (rows.view(num_tokens, top_k, width) * weights[..., None]).sum(dim=1).to(dtype)
                assert torch.equal(kernels.combine(rows, weights), expected)


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (8, 2), (16, 1), (33, 5), (64, 6), (128, 8), (512, 10)])
def test_experts_are_chosen_as_torch_does(kernels: Kernels, num_experts: int, top_k: int) -> None:
    """Those of equal scores, too: logits here are whole numbers."""
    dice = torch.Generator().manual_seed(num_experts)
    for dtype in dtypes(kernels):
        for n in (1, 3, TASK_TOKENS):
            weight, x = (
                torch.randint(-1, 2, shape, generator=dice).to(dtype) for shape in ((num_experts, 24), (n, 24))
            )
            bias = torch.randint(-1, 2, (num_experts,), generator=dice).to(dtype)
            expected = x @ weight.T + bias
            scores, ids = expected.float().softmax(-1).topk(top_k)
            for is_normalised in (False, True):
                found = kernels.router(x, weight, bias, top_k, torch.float32, is_normalised=is_normalised)
                assert found is not None
                assert torch.equal(found[0], expected) and torch.equal(found[2], ids)
                shares = scores / scores.sum(-1, keepdim=True) if is_normalised else scores
                assert torch.allclose(found[1], shares, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("case", "logits"),
    [
        ("no number", [1.0, torch.nan, 2.0]),
        ("infinite", [1.0, torch.inf, 2.0]),
        ("chosen, but nearly equal", [1.0, 2.0, 2.0 + 1e-6]),
        ("one chosen, one not", [1.0, 1.0 + 1e-6, 2.0]),
        ("torch sorts another way", [float(i) for i in range(128)]),
    ],
)
def test_torch_chooses_where_another_exp_may_decide(kernels: Kernels, case: str, logits: list[float]) -> None:
    weight = torch.tensor(logits)[:, None]
    assert kernels.router(torch.ones(1, 1), weight, None, 2, torch.float32, is_normalised=True) is None


def test_what_is_no_number_and_what_is_too_large_for_the_type(kernels: Kernels) -> None:
    for dtype in dtypes(kernels):
        rows = torch.ones(3, 1, 16, dtype=dtype)
        rows[1, 0, 3], rows[2] = torch.nan, torch.finfo(dtype).max
        out = dots(kernels, rows, torch.ones(1, 16, dtype=dtype))
        assert out[0, 0, 0] == 16 and out[0, 0, 1].isnan() and out[0, 0, 2].isinf()


def test_rounding_is_to_nearest_and_ties_go_to_even(kernels: Kernels) -> None:
    for dtype in dtypes(kernels):
        if dtype == torch.float32:
            continue
        x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(3))
        x[1] = x[0].to(dtype).float() * (1 + EPSILON[dtype])  # near, or at, the middle between two
        for line in x:
            parts = torch.stack([line.to(dtype), (line - line.to(dtype).float()).to(dtype)])  # their sum, nearly
            exact = parts[0].double() + parts[1].double()
            out = sums(kernels, parts, torch.ones(1, 2, dtype=dtype))
            assert torch.equal(out[0], exact.float().to(dtype))


def test_inputs_that_lie_anywhere_and_a_bias_that_is_added_before_rounding(kernels: Kernels) -> None:
    """Rows at odd addresses of the type, tokens of a wider tensor."""
    dice = torch.Generator().manual_seed(4)
    for dtype in dtypes(kernels):
        memory = values(dice, 1 + 9 * 51, dtype=dtype)[1:].view(9, 51)
        rows, x = memory[:, 1:50], values(dice, 3, 80, dtype=dtype)[:, 5 : 5 + 49]
        exact, magnitude = (torch.matmul(*pair) for pair in of_doubles(x, rows.T))
        assert_as_exact(dots(kernels, rows.unsqueeze(1), x)[0], exact, magnitude, 49)
        bias = values(dice, 9, dtype=dtype)
        biased = exact + bias.double(), magnitude + bias.double().abs()
        assert_as_exact(dots(kernels, rows.unsqueeze(1), x[:1], bias)[0], *(part[:1] for part in biased), 50)


def test_memory_is_given_back(kernels: Kernels) -> None:
    rows, x = torch.ones(3000, 3, 256, dtype=torch.bfloat16), torch.ones(1, 256, dtype=torch.bfloat16)

    def resident_nbytes(num_calls: int) -> int:
        for _ in range(num_calls):
            gate, up = dots(kernels, rows[:, :2], x)
            sums(kernels, rows[:, 2], gate * up)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_nbytes(50)
    assert resident_nbytes(500) - before < 8 << 20, "the calls took 500 times 50 KiB"


def test_what_is_not_theirs_is_refused_and_changes_nothing(kernels: Kernels) -> None:
    rows, x, out = torch.ones(2, 8), torch.ones(5, 8), torch.full((1, 5, 2), 7.0)
    for num_tokens in (0, TASK_TOKENS + 1):
        with pytest.raises(MemoryError):
            inner_products(kernels, (rows.data_ptr(), 0, num_tokens, 0), x, out, 32)
        with pytest.raises(MemoryError):
            down_products(kernels, (rows.data_ptr(), 0, num_tokens, 0), torch.ones(5, 2), out.view(5, 2), 8)
    assert bool((out == 7).all())
    assert not kernels.most_tokens(torch.float64)


def test_all_sets_of_a_processor_come_fastest_first() -> None:
    names = [library.name for library in AVAILABLE]
    assert names[-1] == "generic" and names == [name for name in ACCEPTED if name in names]


@pytest.fixture(params=["openmp", "team"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How products are shared out, whatever was imported first."""
    (path,) = Path(kernels_module.__file__).parent.glob("_products*.so")
    library = ctypes.CDLL(str(path))
    library.expertly_products_take_openmp(request.param == "openmp")
    yield request.param
    library.expertly_products_take_openmp(not spins_shortly())


@pytest.fixture
def shared_out(kernels: Kernels, set_threads: Callable[[int], None], way: str) -> Callable[[], bool]:
    """A product on four threads; whether it is that of one."""
    rows, x = torch.randn(2048, 1, 256).bfloat16(), torch.randn(1, 256).bfloat16()
    set_threads(1)
    expected = dots(kernels, rows, x)
    set_threads(4)
    return lambda: torch.equal(dots(kernels, rows, x), expected)


only_a_team = pytest.mark.parametrize("way", ["team"], indirect=True)


def team() -> dict[str, int]:
    """Threads that help, at least three, and the processor's ticks that each has had."""
    found: dict[str, int] = {}
    end = time.monotonic() + 60
    while len(found) < 3 and time.monotonic() < end:  # a thread has no name before it runs
        found |= _team_by_now()
    return found


def _team_by_now() -> dict[str, int]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        name, _, fields = (task / "stat").read_text().rpartition(") ")
        if name.endswith("(expertly-team"):
            found[task.name] = int(fields.split()[11])
    return found


@only_a_team
def test_a_team_lives_on_and_computes(shared_out: Callable[[], bool], set_threads: Callable[[int], None]) -> None:
    assert shared_out()
    before, end = team(), time.monotonic() + 60
    while not any(ticks > before[task] for task, ticks in team().items()):
        assert shared_out() and time.monotonic() < end
        set_threads(2)
        assert shared_out()
        set_threads(4)
    assert team().keys() == before.keys()


def test_callers_at_the_same_time(shared_out: Callable[[], bool]) -> None:
    wrong: list[int] = []

    def call(number: int) -> None:
        wrong.extend(number for _ in range(200) if not shared_out())

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@only_a_team
def test_a_forked_child_has_a_team_of_its_own(shared_out: Callable[[], bool]) -> None:
    busy = threading.Thread(target=lambda: [shared_out() for _ in range(300)])  # a job of another thread runs meanwhile
    busy.start()
    for _ in range(10):
        child = os.fork()
        if not child:
            os._exit(0 if all(shared_out() for _ in range(20)) and len(team()) == 3 else 1)
        end = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert done[1] == 0
    busy.join(60)
    assert not busy.is_alive()

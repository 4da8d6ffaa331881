"""The compiled products against sums in float64: every instruction set of this machine, sizes of all kinds."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from expertly.native import kernels as kernels_module
from expertly.native.kernels import ACCEPTED, TASK_TOKENS, Kernels, libraries, spins_shortly
from tests.native.exact import make_experts
from tests.tables import IS_FULL

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
    """[n, r] of rows [r, H], which need not lie side by side, times x [n, H]."""
    out = torch.full((len(x), len(rows)), torch.nan, dtype=rows.dtype)
    kernels.dots(rows.data_ptr(), x, out, rows.stride(0) * rows.element_size(), bias)
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
def test_rows_times_tokens(kernels: Kernels, num_tokens: int) -> None:
    dice, pick = torch.Generator().manual_seed(num_tokens), random.Random(num_tokens)
    for dtype in dtypes(kernels):
        for width in WIDTHS:
            rows = values(dice, pick.choice(NEURONS) + 1, 2, width, dtype=dtype)[1:, 0]
            x = values(dice, num_tokens, width, dtype=dtype)
            exact, magnitude = (torch.matmul(x, rows.T) for x, rows in of_doubles(x, rows))
            assert_as_exact(dots(kernels, rows, x), exact, magnitude, width)


@pytest.mark.parametrize("num_tokens", range(1, TASK_TOKENS + 1))
def test_experts_in_one_call(kernels: Kernels, num_tokens: int, set_threads: Callable[[int], None]) -> None:
    """Parts of two experts that share no tokens, or one, of tokens that lie in a wider tensor; for any number of
    threads the same bits. Each number of tokens with a gate or without one, the other way by the next library.
    """
    dice = torch.Generator().manual_seed(num_tokens)
    turn = num_tokens + [f"native {library.name}" for library in AVAILABLE].index(kernels.name)
    sizes = [*zip(NEURONS, (1, 33, 64, 2048, 96, 7, 500), strict=True)]
    for num_inner, dtype, (r, width) in product((1, 2) if IS_FULL else (1 + turn % 2,), dtypes(kernels), sizes):
        rows = values(dice, 2, r, num_inner + 1, width, dtype=dtype) / 8  # what is added is about as large as biases
        x = values(dice, num_tokens + 2, width + 3, dtype=dtype)[:, 3:] / width**0.5
        nbytes = (num_inner + 1) * width * dtype.itemsize, width * dtype.itemsize
        addresses = rows[0].data_ptr(), rows[1].data_ptr()
        experts = make_experts((rows[0], rows[1]), addresses, dtype, nbytes=nbytes, begin=20)
        for adds, num_of_tokens in product((False, True), ((num_tokens,), (num_tokens, 1))):
            found = []
            for num_threads in (1, 3):
                set_threads(num_threads)
                found.append(experts.run(kernels, num_of_tokens, x, adds=adds))
            assert all(map(torch.equal, *found))
            for expert, (n, out) in enumerate(zip(num_of_tokens, found[0], strict=True)):
                experts.check(out, expert, x.flip(0)[:n] if expert else x[:n], adds=adds)


def test_outputs_are_weighed_as_torch_does(kernels: Kernels) -> None:
    for dtype in dtypes(kernels):
        for weights_dtype in {dtype, torch.float32}:
            for num_tokens, top_k, width in ((1, 8, 2048), (1, 1, 3), (5, 4, 100), (16, 6, 320)):
                rows, weights = torch.randn(num_tokens * top_k, width).to(dtype), torch.rand(num_tokens, top_k)
                weights = weights.to(weights_dtype)
                expected = (rows.view(num_tokens, top_k, width) * weights[..., None]).sum(dim=1).to(dtype)
                assert torch.equal(kernels.combine(rows, weights, dtype), expected)


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
        rows = torch.ones(3, 16, dtype=dtype)
        rows[1, 3], rows[2] = torch.nan, torch.finfo(dtype).max
        out = dots(kernels, rows, torch.ones(1, 16, dtype=dtype))
        assert out[0, 0] == 16 and out[0, 1].isnan() and out[0, 2].isinf()


def test_rounding_is_to_nearest_and_ties_go_to_even(kernels: Kernels) -> None:
    for dtype in dtypes(kernels):
        if dtype == torch.float32:
            continue
        x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(3))
        x[1] = x[0].to(dtype).float() * (1 + EPSILON[dtype])  # near, or at, the middle between two
        for line in x:
            parts = torch.stack([line.to(dtype), (line - line.to(dtype).float()).to(dtype)], dim=1)  # nearly their sum
            out = dots(kernels, parts, torch.ones(1, 2, dtype=dtype))
            assert torch.equal(out[0], parts.double().sum(dim=1).float().to(dtype))


def test_rows_that_lie_anywhere_and_a_bias_that_is_added_before_rounding(kernels: Kernels) -> None:
    """Rows at odd addresses of the type."""
    dice = torch.Generator().manual_seed(4)
    for dtype in dtypes(kernels):
        memory = values(dice, 1 + 9 * 51, dtype=dtype)[1:].view(9, 51)
        rows, x, bias = memory[:, 1:50], values(dice, 3, 49, dtype=dtype), values(dice, 9, dtype=dtype)
        exact, magnitude = (x @ rows.T + bias for x, rows, bias in of_doubles(x, rows, bias))
        assert_as_exact(dots(kernels, rows, x, bias), exact, magnitude, 50)


def test_memory_is_given_back(kernels: Kernels) -> None:
    rows, x = torch.ones(3000, 3, 256, dtype=torch.bfloat16), torch.ones(1, 256, dtype=torch.bfloat16)
    experts = make_experts((rows[:, :], rows), (rows.data_ptr(),) * 2, torch.bfloat16, nbytes=(3 * 512, 512))

    def resident_nbytes(num_calls: int) -> int:
        for _ in range(num_calls):
            experts.run(kernels, (1,), dots(kernels, rows[:256, 0], x))
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_nbytes(50)
    assert resident_nbytes(500) - before < 8 << 20, "the calls took 500 times 50 KiB"


def test_what_is_not_theirs_is_refused_and_changes_nothing(kernels: Kernels) -> None:
    for num_tokens in (0, TASK_TOKENS + 1):
        out = torch.full((num_tokens, 2), 7.0)
        with pytest.raises(MemoryError):
            kernels.dots(torch.ones(2, 8).data_ptr(), torch.ones(num_tokens, 8), out, 32)
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
    rows, x = torch.randn(2048, 256).bfloat16(), torch.randn(1, 256).bfloat16()
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

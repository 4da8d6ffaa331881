"""Products of 16-bit matrices on a processor that has no instructions for them: in float32, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.gpt_oss import modeling_gpt_oss

from expertly.model import dense
from expertly.model.dense import use_kernels
from expertly.native import widened
from expertly.native.kernels import TASK_TOKENS, choose_kernels
from tests.families import make_model

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=HALVES, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """That this processor is said not to multiply."""
    monkeypatch.setattr(widened, "WIDENED", {request.param})
    return request.param  # type: ignore[no-any-return]


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Nothing is lost but by sums in float32 and one rounding."""
    limits = torch.finfo(found.dtype)
    slack = exact.abs() * limits.eps + 1e-5 * exact.abs().max() + limits.smallest_normal
    assert bool(((found.double() - exact).abs() <= slack).all())


@pytest.mark.parametrize(
    ("lead", "width", "num_rows"),
    [((17,), 40, 24), ((0,), 40, 24), ((2, 3), 40, 24), ((300,), 40, 24), ((20,), 1000, 401), ((270,), 801, 500)],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(dtype: torch.dtype, lead: tuple[int, ...], width: int, num_rows: int, has_bias: bool) -> None:
    """Of any number of rows, with weights larger than what is float32 at a time; inputs may be views."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(*lead, 2 * width, generator=dice).to(dtype)[..., ::2]
    weight = torch.randn(num_rows, 2, width, generator=dice).to(dtype)[:, 1]
    bias = torch.randn(num_rows, generator=dice).to(dtype) if has_bias else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = widened.linear(x, weight, bias)
    assert found.shape == exact.shape and found.dtype == dtype and found.is_contiguous()
    if found.numel():
        assert_rounded(found, exact)
    if len(lead) == 1 and not has_bias:
        down = torch.randn(width, num_rows, generator=dice).to(dtype)
        made = widened.mm(x, down)
        assert made.shape == (*lead, num_rows) and made.dtype == dtype
        if made.numel():
            assert_rounded(made, x.double() @ down.double())


def test_what_the_processor_multiplies_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "WIDENED", {torch.float16})
    monkeypatch.setattr(widened, "_rows", lambda *_: pytest.fail("it was widened"))
    x, weight = torch.ones(20, 8), torch.ones(8, 8)
    for kind in (torch.float32, torch.bfloat16):
        assert torch.equal(widened.linear(x.to(kind), weight.to(kind)), functional.linear(x, weight).to(kind))
        assert torch.equal(widened.mm(x.to(kind), weight.to(kind)), (x @ weight).to(kind))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_prompts_dense_part(dtype: torch.dtype, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers and the eager attention of a prompt, some of its queries at a time, are nearer to float32 than
    torch's own, or as near.
    """
    monkeypatch.setattr(dense, "_SCORES", 4 * 8 * (TASK_TOKENS + 5))  # of eight queries, with four heads
    model: Any = make_model(family, dtype=dtype).eval()
    ids = torch.randint(1, 50, (1, TASK_TOKENS + 5), generator=torch.Generator().manual_seed(0))
    seen, repeat, widened_rows = list[torch.dtype](), modeling_gpt_oss.repeat_kv, list[int]()

    def noted(states: torch.Tensor, times: int) -> torch.Tensor:
        seen.append(states.dtype)
        return repeat(states, times)

    def rows_noted(x: torch.Tensor, out: torch.Tensor, rows: Any = widened._rows) -> Any:
        widened_rows.append(x.shape[:-1].numel())
        return rows(x, out)

    monkeypatch.setattr(widened, "_rows", rows_noted)
    with torch.no_grad():
        theirs = model(ids).logits.float()
        exact = make_model(family, dtype=torch.float32).eval()
        exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
        expected = exact(ids).logits
        use_kernels(model, choose_kernels())
        monkeypatch.setattr(modeling_gpt_oss, "repeat_kv", noted)
        ours = model(ids).logits
    assert ours.dtype == dtype
    num_linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert num_linear <= len(widened_rows) and set(widened_rows) == {TASK_TOKENS + 5}, "each linear layer, and routers"
    num_calls = 2 * 3 * model.config.num_hidden_layers if family == "gpt_oss" else 0  # keys, values; 8 + 8 + 5 queries
    assert seen == [torch.float32] * num_calls
    error, bound = ((logits - expected).abs().mean() for logits in (ours.float(), theirs))
    assert float(error) <= 1.2 * float(bound)

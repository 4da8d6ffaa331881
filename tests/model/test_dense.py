"""The dense part at a few tokens: modules of transformers that the compiled kernels compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from expertly.model import dense
from expertly.model.dense import use_kernels
from expertly.native.kernels import TASK_TOKENS, choose_kernels
from tests.families import FAMILIES, make_model
from tests.model.conftest import Calls
from tests.tables import crossed


@pytest.mark.parametrize(("family", "dtype"), crossed(sorted(FAMILIES), [torch.bfloat16, torch.float32]))
def test_families_decode_by_the_kernels(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention of a decode step that transformers computes through its interface is the kernel's, and is what
    transformers' own function makes of the same arguments.
    """
    model, kernels = make_model(family, dtype=dtype).eval(), choose_kernels()
    close = 2e-2 if dtype == torch.bfloat16 else 1e-5

    def both(module: Any, *args: Any, **more: Any) -> Any:
        result = dense._attention(module, *args, **more)
        with monkeypatch.context() as context:
            context.setattr(dense, "is_native", lambda *_: False)
            expected = dense._attention(module, *args, **more)[0].float()
        torch.testing.assert_close(result[0].float(), expected, rtol=close, atol=close * float(expected.abs().max()))
        return result

    assert use_kernels(model, kernels) > 0
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "expertly", both)
    ids = torch.tensor([[0, 0, *range(2, 40)], [*range(5, 45)]])  # one has pads
    with torch.no_grad():
        cache = model(ids[:, :14], (ids != 0)[:, :14], use_cache=True).past_key_values
        assert kernels.counts.attention == 0, "a prompt is transformers'"
        for first, last in ((14, 15), (15, 18), (18, 40)):  # the last as a part of a prompt
            model(ids[:, first:last], (ids != 0)[:, :last], past_key_values=cache, use_cache=True)
    num_layers = sum(name.endswith(".self_attn") for name, _ in model.named_modules())
    assert kernels.counts.attention == 3 * num_layers > 0


def test_what_a_user_sets_is_heeded() -> None:
    """The attention that the model's config names runs, and weights are there for who asks."""
    model, kernels = make_model("gpt_oss", dtype=torch.bfloat16).eval(), choose_kernels()
    ids = torch.tensor([[5]])  # one token is no prompt
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        use_kernels(model, kernels)
        assert len(model(ids, output_attentions=True).attentions) == len(expected) > 0
        assert kernels.counts.attention == 0
        model(ids)
        assert kernels.counts.attention == len(expected)
    other = make_model("qwen3_moe", dtype=torch.bfloat16).eval()
    use_kernels(other, kernels)
    kernels.counts.attention = 0
    other.set_attn_implementation("eager")
    with torch.no_grad():
        other(ids)
    assert kernels.counts.attention == 0
    other.set_attn_implementation("sdpa")
    logits = other(ids).logits  # with gradients it is torch's
    assert kernels.counts.attention == 0 and logits.requires_grad
    logits.sum().backward()
    assert other.config._attn_implementation == "sdpa"


def test_keys_that_a_batch_shares_are_torchs() -> None:
    """The kernel would read behind them."""
    model, kernels = make_model("qwen3_moe", dtype=torch.bfloat16).eval(), choose_kernels()
    use_kernels(model, kernels)
    module, function = model.model.layers[0].self_attn, ALL_ATTENTION_FUNCTIONS["expertly"]
    q, k = torch.randn(3, 4, 1, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    with torch.no_grad():
        shared = function(module, q, k, k, None, scaling=0.3)[0]
        assert kernels.counts.attention == 0
        each = function(module, q, k.expand(3, 2, 5, 8), k.expand(3, 2, 5, 8), None, scaling=0.3)[0]
    assert kernels.counts.attention == 1
    torch.testing.assert_close(shared, each, rtol=2e-2, atol=2e-2)


class Unusual(nn.Module):
    """Looks like a norm, and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [Qwen3MoeRMSNorm, GptOssRMSNorm, Gemma2RMSNorm, Unusual, nn.LayerNorm])
def test_norms_are_known_by_what_they_compute(kind: Any, dtype: torch.dtype) -> None:
    kernels = choose_kernels()
    if dtype not in kernels.dtypes:
        pytest.skip(f"{kernels.name} does not take {dtype}")
    width = 96
    module = nn.Sequential(kind(width)).to(dtype)
    with torch.no_grad():
        module[0].weight.copy_(torch.randn(width) + 1)
    changed = copy.deepcopy(module)
    is_known = kind not in (Unusual, nn.LayerNorm)
    assert use_kernels(changed, kernels) == is_known
    assert (type(changed[0]) is not type(module[0])) == is_known
    x = torch.randn(1, min(3, kernels.most_tokens(dtype)), width).to(dtype)
    for scale in (1.0, 1e-3, 300.0):
        with torch.no_grad():
            expected, got = module(x * scale), changed(x * scale)
        rtol = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert torch.allclose(got.float(), expected.float(), rtol=rtol, atol=1e-7)
        assert dtype == torch.float32 or (got != expected).float().mean() <= 0.02
    got = changed(x)
    assert got.requires_grad and torch.equal(got, module(x)), "what is trained is torch's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_routers_choose_for_few_tokens_by_the_kernels(
    family: str, dtype: torch.dtype, ran: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make_model(family, dtype=dtype).eval()
    router = next(module for module in model.modules() if "Router" in type(module).__name__)
    changed, few = copy.deepcopy(router), choose_kernels().most_tokens(dtype)
    assert use_kernels(changed, choose_kernels()) == 1 and "router" in ran
    with monkeypatch.context() as context:
        context.setattr(dense, "_use_routers", lambda *_: None)
        assert use_kernels(router, choose_kernels()) == 1, "its logits"
    ran.clear()
    hidden = torch.randn(few + 1, router.weight.shape[1]).to(dtype)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-5
    with torch.no_grad():
        for num_tokens in (1, few, few + 1):
            found, expected = changed(hidden[:num_tokens]), router(hidden[:num_tokens])
            assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
            torch.testing.assert_close(found[1], expected[1], rtol=close, atol=0)
    assert ran["router"] == [1, few], "a prompt is torch's"
    changed(hidden[:1])[0].float().sum().backward()
    assert ran["router"] == [1, few] and changed.weight.grad is not None, "so is what is trained"


# -- linear layers -----------------------------------------------------------------------------------------------------


def made(dtype: torch.dtype, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """A module, and the same one changed."""
    torch.manual_seed(0)
    plain = nn.Linear(70, 33, bias=bias, dtype=dtype).requires_grad_(False)
    changed = copy.deepcopy(plain)
    assert use_kernels(changed, choose_kernels()) == 1
    return plain, changed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(70,), (1, 70), (4, 70), (1, 1, 70), (2, 2, 70), (1, 3, 1, 70)])
def test_a_few_tokens_of_any_shape(ran: Calls, dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    plain, changed = made(dtype, bias)
    x = torch.randn(shape).to(dtype)
    actual, exact = changed(x), nn.functional.linear(x.double(), plain.weight.double())
    exact = exact if plain.bias is None else exact + plain.bias.double()
    assert ran["dots"] == [x.numel() // 70]
    assert actual.shape == plain(x).shape and actual.dtype == dtype
    rounding = max(1.01 * float((exact.to(dtype) - exact).abs().max()), 2e-6)  # float32's sums round, too
    assert (actual - exact).abs().max() <= rounding, "rounded once"


def test_inputs_that_are_views(ran: Calls) -> None:
    _, changed = made(torch.bfloat16, False)
    wide = torch.randn(3, 140).bfloat16()
    a_token_each = torch.randn(1, 3, 70).bfloat16().transpose(0, 1)  # whose middle stride is that of all rows
    views = wide[:, ::2], wide[:, 70:], wide[:1].expand(3, -1)[:, :70], torch.randn(70, 2).bfloat16().T, a_token_each
    for view in views:
        assert torch.equal(changed(view), changed(view.clone(memory_format=torch.contiguous_format)))
    assert len(ran["dots"]) == 10


def test_what_does_not_gain_stays_as_it_is() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16), nn.Bilinear(8, 8, 8)
    )
    assert use_kernels(model, choose_kernels("torch")) == 0
    assert use_kernels(model, choose_kernels()) == 1
    assert [type(module) in (nn.Linear, nn.Bilinear) for module in model] == [True, False, True]
    assert repr(model[1]) == repr(nn.Linear(8, 8)) and isinstance(model[1], nn.Linear)


# -- queries, keys and values: the same to the bit as the model's own steps, or not at all -------------------------

JOINED = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
"""Families whose attention is of the usual kind, among others."""
LONG = TASK_TOKENS + 1
"""Tokens of a prompt that is not few."""


def with_kernels(model: nn.Module, *, joins: bool) -> nn.Module:
    """A copy with the kernels."""
    model = copy.deepcopy(model).eval()
    with pytest.MonkeyPatch.context() as patched:
        if not joins:
            patched.setattr(dense, "_join_projections", lambda *_: None)
        use_kernels(model, choose_kernels())
    return model


def steps(model: Any, num_sequences: int = 1, width: int = 1) -> list[torch.Tensor]:
    """Logits of a prompt and of three steps of `width` tokens."""
    ids = torch.randint(1, 50, (num_sequences, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(ids[:, :LONG], use_cache=True)
        found = [output.logits]
        for i in range(3):
            cut = slice(LONG + i * width, LONG + (i + 1) * width)
            output = model(ids[:, cut], past_key_values=output.past_key_values, use_cache=True)
            found.append(output.logits)
    return found


@pytest.mark.parametrize(("family", "dtype"), crossed(FAMILIES, [torch.bfloat16, torch.float32]))
def test_families_join_their_projections(family: str, dtype: torch.dtype, ran: Calls) -> None:
    model = make_model(family, dtype=dtype)
    ours, theirs = (with_kernels(model, joins=joins) for joins in (True, False))
    for num_sequences, width in ((1, 1), (3, 1), (1, 2)):
        found, expected = steps(ours, num_sequences, width), steps(theirs, num_sequences, width)
        assert all(map(torch.equal, found, expected))
    joined = [module for module in ours.modules() if getattr(module, "_expertly_joined", None) is not None]
    calls = ran.get("projections", [])
    assert not joined or calls
    if family in JOINED:
        assert len(joined) == model.config.num_hidden_layers
        assert calls.count(3) == 3 * len(joined) and calls.count(2) == 3 * len(joined)
        assert calls.count(1) in (4 * len(joined), 5 * len(joined)), "of three steps, and of a trial or two"


def test_prompts_and_training_are_the_models_own(ran: Calls) -> None:
    model: Any = with_kernels(make_model("qwen3_moe", dtype=torch.bfloat16), joins=True)
    ids = torch.arange(1, LONG + 1)[None]
    model(ids)
    model(ids[:, :1])
    with torch.no_grad():
        model(ids)
        model.train()
        model(ids[:, :1])
    assert "projections" not in ran


def test_a_forward_with_another_step_is_left_alone(monkeypatch: pytest.MonkeyPatch, ran: Calls) -> None:
    """Of tokens that it does not touch, a step shows nothing."""
    model: Any = make_model("qwen3_moe", dtype=torch.bfloat16)
    kind = type(model.model.layers[0].self_attn)
    own = kind.forward

    def clipped(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        hidden_states = hidden_states.clamp(-1e4, 1e4)
        given = () if cache is None else (cache,)  # else it is among the others, under its older name
        return own(self, hidden_states, position_embeddings, attention_mask, *given, **kwargs)

    monkeypatch.setattr(kind, "forward", clipped)
    steps(with_kernels(model, joins=True))
    assert "projections" not in ran

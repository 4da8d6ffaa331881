"""The dense part at a few tokens: attention and norms of the compiled kernels against torch's and transformers'."""

from __future__ import annotations

import contextlib
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
from expertly.native.kernels import Kernels, Library, choose_kernels, libraries
from tests.families import FAMILIES, make_model, make_prompts

AVAILABLE, WHY = libraries()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no compiled kernels: {WHY}")

SHAPES = [  # sequences, heads, key heads, tokens, keys, widths of keys and of values
    (1, 8, 2, 1, 1, 32, 32),
    (1, 8, 2, 1, 300, 64, 64),
    (2, 4, 4, 3, 257, 80, 48),
    (1, 6, 2, 16, 600, 192, 128),
    (3, 5, 5, 1, 13, 20, 7),
]
CLOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}


def attention_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As it is written down, in float64."""
    groups, num_keys = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (one.double().repeat_interleave(groups, 1) for one in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return (scores.softmax(dim=-1)[..., :num_keys] @ v).transpose(1, 2)


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(library: Library, shape: tuple[int, ...]) -> None:
    batch, heads, key_heads, tokens, keys, key_width, value_width = shape
    dice = torch.Generator().manual_seed(0)
    kernels = Kernels(library, "")
    for dtype in CLOSE.keys() & library.dtypes.keys():
        q = torch.randn(batch, tokens, heads, key_width, generator=dice).to(dtype).transpose(1, 2)
        k = torch.randn(batch, keys, key_heads, key_width, generator=dice).to(dtype).transpose(1, 2)
        v = torch.randn(batch, key_heads, keys, value_width, generator=dice).to(dtype)
        seen = torch.rand(batch, 1, tokens, keys, generator=dice) > 0.3
        seen[..., 0] = True
        added = torch.randn(1, heads, tokens, keys, generator=dice).to(dtype)
        ways: list[dict[str, Any]] = [
            {},
            {"softcap": 3.0},
            {"sinks": torch.randn(heads, generator=dice).to(dtype)},
            {"mask": seen},
            {"mask": added},
        ]
        for way in ways:
            got = kernels.attention(q, k, v, key_width**-0.5, **way)
            expected = attention_of(q, k, v, key_width**-0.5, **way)
            assert got.shape == expected.shape and got.is_contiguous()
            assert (got.double() - expected).abs().max() < CLOSE[dtype] * expected.abs().max(), (dtype, way.keys())


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
@pytest.mark.parametrize("heads", [4, 6, 16])
def test_keys_of_other_sequences_are_left_out(library: Library, heads: int) -> None:
    """Sixteen sequences side by side, as continuous batching has them: each is as alone, and most do not even read the
    keys of the first, which are NaN.
    """
    num, lengths, kernels = 16, [60, 1, 300, *range(40, 53)], Kernels(library, "")
    dice = torch.Generator().manual_seed(0)
    ends = [sum(lengths[: i + 1]) for i in range(num)]
    for dtype in CLOSE.keys() & library.dtypes.keys():
        q = torch.randn(1, heads, num, 32, generator=dice).to(dtype)
        k, v = (torch.randn(1, 2, ends[-1], 32, generator=dice).to(dtype) for _ in range(2))
        mask = torch.full((1, 1, num, ends[-1]), torch.finfo(dtype).min, dtype=dtype)
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            mask[..., i, end - length : end] = 0
        k[..., : lengths[0], :] = torch.nan
        for given in (mask, mask == 0):
            together = kernels.attention(q, k, v, 0.2, given)
            for i in range(4, num):
                own = slice(ends[i] - lengths[i], ends[i])
                alone = attention_of(q[:, :, i : i + 1], k[:, :, own], v[:, :, own], 0.2)
                error = (together[:, i : i + 1].double() - alone).abs().max()
                assert error < CLOSE[dtype] * alone.abs().max(), (dtype, i)


@pytest.mark.parametrize("library", AVAILABLE, ids=lambda library: library.name)
def test_a_token_that_sees_nothing_is_zero_whatever_its_neighbours_see(library: Library) -> None:
    dice, kernels = torch.Generator().manual_seed(0), Kernels(library, "")
    for dtype in CLOSE.keys() & library.dtypes.keys():
        q, k, v = (torch.randn(1, 4, num, 32, generator=dice).to(dtype) for num in (3, 40, 40))
        mask = torch.full((1, 1, 3, 40), torch.finfo(dtype).min, dtype=dtype)
        mask[..., 1:, :20] = 0
        for given in (mask, mask == 0):
            assert not kernels.attention(q, k, v, 0.2, given)[:, 0].any()


def test_threads_change_nothing_and_nan_is_passed_on() -> None:
    kernels = choose_kernels()
    q, k, v = (torch.randn(1, heads, num, 128).bfloat16() for heads, num in ((8, 1), (4, 2000), (4, 2000)))
    before = torch.get_num_threads()
    try:
        results = []
        for num in (1, 2):
            torch.set_num_threads(num)
            results.append(kernels.attention(q, k, v, 0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    k[0, 0, 1234, 5] = torch.nan
    out = kernels.attention(q, k, v, 0.1)
    assert out[0, 0, :2].isnan().all() and not out[0, 0, 2:].isnan().any(), "the heads of that key head"
    blind = torch.zeros(1, 1, 1, 2000, dtype=torch.bool)
    assert (kernels.attention(q, v, v, 0.1, blind) == 0).all(), "a row that sees nothing is zero"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_decode_by_the_kernels(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention of a decode step that transformers computes through its interface is the kernel's, and is what
    transformers' own function makes of the same arguments.
    """
    model, kernels = make_model(family, dtype=dtype).eval(), choose_kernels()
    close = 2e-2 if dtype == torch.bfloat16 else 1e-5

    def both(module: Any, *args: Any, **more: Any) -> Any:
        result = dense._attention(module, *args, **more)
        with monkeypatch.context() as context:
            context.setattr(dense, "_is_native", lambda *_: False)
            expected = dense._attention(module, *args, **more)[0].float()
        torch.testing.assert_close(result[0].float(), expected, rtol=close, atol=close * float(expected.abs().max()))
        return result

    assert use_kernels(model, kernels) > 0
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "expertly", both)
    if FAMILIES[family].is_encoder_decoder:
        model(torch.tensor(make_prompts(1)), decoder_input_ids=torch.tensor([[5]]))
        assert kernels.num_attention == 0, "attention with a bias of its own stays transformers'"
        return
    ids = torch.tensor([[0, 0, *range(2, 20)], [*range(5, 25)]])  # one has pads
    with torch.no_grad():
        cache = model(ids[:, :14], (ids != 0)[:, :14], use_cache=True).past_key_values
        assert kernels.num_attention == 0, "a prompt is transformers'"
        for first, last in ((14, 15), (15, 18), (18, 19)):
            model(ids[:, first:last], (ids != 0)[:, :last], past_key_values=cache, use_cache=True)
    num_layers = sum(name.endswith(".self_attn") for name, _ in model.named_modules())
    assert kernels.num_attention == 3 * num_layers > 0


def test_what_a_user_sets_is_heeded() -> None:
    """The attention that the model's config names runs, and weights are there for who asks."""
    model, kernels = make_model("gpt_oss", dtype=torch.bfloat16).eval(), choose_kernels()
    ids = torch.tensor([[5]])  # one token is no prompt
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
        use_kernels(model, kernels)
        assert len(model(ids, output_attentions=True).attentions) == len(expected) > 0
        assert kernels.num_attention == 0
        model(ids)
        assert kernels.num_attention == len(expected)
    other = make_model("qwen3_moe", dtype=torch.bfloat16).eval()
    use_kernels(other, kernels)
    kernels.num_attention = 0
    other.set_attn_implementation("eager")
    with torch.no_grad():
        other(ids)
    assert kernels.num_attention == 0
    other.set_attn_implementation("sdpa")
    logits = other(ids).logits  # with gradients it is torch's
    assert kernels.num_attention == 0 and logits.requires_grad
    logits.sum().backward()
    assert other.config._attn_implementation == "sdpa"


def test_arguments_that_are_not_the_kernels() -> None:
    """Keys that a batch shares are torch's: the kernel would read behind them. So is what `sdpa` alone heeds."""
    model, kernels = make_model("qwen3_moe", dtype=torch.bfloat16).eval(), choose_kernels()
    use_kernels(model, kernels)
    module = model.model.layers[0].self_attn
    function = ALL_ATTENTION_FUNCTIONS["expertly"]
    q, k = torch.randn(3, 4, 1, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    with torch.no_grad():
        shared = function(module, q, k, k, None, scaling=0.3)[0]
        assert kernels.num_attention == 0
        each = function(module, q, k.expand(3, 2, 5, 8), k.expand(3, 2, 5, 8), None, scaling=0.3)[0]
        assert kernels.num_attention == 1
        function(module, q, k.expand(3, 2, 5, 8), k.expand(3, 2, 5, 8), None, scaling=0.3, cache=object())
        with contextlib.suppress(ValueError):  # which newer transformers' own raises
            function(module, q, k.expand(3, 2, 5, 8), k.expand(3, 2, 5, 8), None, scaling=0.3, softcap=5.0)
    assert kernels.num_attention == 1, "caches of continuous batching are not the kernel's"
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


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call that chose experts."""
    asked: list[int] = []
    router = Kernels.router

    def counted(self: Kernels, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(x))
        return router(self, x, *args, **kwargs)

    monkeypatch.setattr(Kernels, "router", counted)
    return asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_routers_choose_for_few_tokens_by_the_kernels(
    family: str, dtype: torch.dtype, routed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = make_model(family, dtype=dtype).eval()
    router = next(module for module in model.modules() if "Router" in type(module).__name__)
    changed, few = copy.deepcopy(router), choose_kernels().most_tokens(dtype)
    assert use_kernels(changed, choose_kernels()) == 1 and routed
    with monkeypatch.context() as context:
        context.setattr(dense, "_use_routers", lambda *_: None)
        assert use_kernels(router, choose_kernels()) == 1, "its logits"
    routed.clear()
    hidden = torch.randn(few + 1, router.weight.shape[1]).to(dtype)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-5
    with torch.no_grad():
        for num_tokens in (1, few, few + 1):
            found, expected = changed(hidden[:num_tokens]), router(hidden[:num_tokens])
            assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
            torch.testing.assert_close(found[1], expected[1], rtol=close, atol=0)
    assert routed == [1, few], "a prompt is torch's"
    changed(hidden[:1])[0].float().sum().backward()
    assert routed == [1, few] and changed.weight.grad is not None, "so is what is trained"


@pytest.mark.parametrize("how", ["fewer experts", "another step", "a bias of its own"])
def test_other_routers_are_left_alone(how: str, routed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    router: Any = make_model("qwen3_moe", dtype=torch.bfloat16).eval().model.layers[0].mlp.gate
    own = type(router).forward
    if how == "another step":  # which common numbers do not show
        monkeypatch.setattr(
            type(router), "forward", lambda self, hidden_states: own(self, hidden_states.clamp(-99, 99))
        )
    elif how == "a bias of its own":
        router.e_score_correction_bias = nn.Parameter(torch.ones(len(router.weight)))
    changed = copy.deepcopy(router)
    use_kernels(changed, choose_kernels())
    routed.clear()
    if how == "fewer experts":
        changed.top_k = router.top_k = 1
    hidden = torch.randn(1, router.weight.shape[1]).bfloat16()
    with torch.no_grad():
        assert torch.equal(changed(hidden)[2], router(hidden)[2])
    assert routed == []

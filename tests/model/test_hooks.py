"""What is replaced in a model: switch's experts make every family's call; an nn.Linear multiplies few tokens itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from expertly.model.dense import FewTokensLinear, use_kernels
from expertly.native.kernels import Kernels, choose_kernels, libraries
from tests.families import generate, logits_of, make_prompts
from tests.model.conftest import Toys

AVAILABLE, WHY = libraries()
compiled = pytest.mark.skipif(not AVAILABLE, reason=f"no compiled products: {WHY}")


# -- switch_transformers -----------------------------------------------------------------------------------------------


def test_what_the_router_of_switch_drops_is_dropped(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacity 2 and a long prompt: upstream's masks and ours agree on every row of every layer."""
    toy = toys["switch_transformers"]
    prompts = make_prompts(2, length=24)
    masks: list[torch.Tensor] = []
    handles = [
        toy.reference.get_submodule(site).register_forward_pre_hook(lambda _, arguments: masks.append(arguments[1]))
        for site in toy.manifest.sites
    ]
    expected = logits_of(toy.reference, prompts)
    for handle in handles:
        handle.remove()
    seen: list[torch.Tensor] = []
    original = toy.runtime.forward_experts

    def note(module: Any, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        assert index.dtype == torch.int64 and index.shape == weights.shape == (hidden.shape[0], 1)
        seen.append(index)
        return original(module, layer, hidden, index, weights)

    monkeypatch.setattr(toy.runtime, "forward_experts", note)
    assert torch.allclose(logits_of(toy.model, prompts), expected, atol=1e-5)
    num_experts = toy.manifest.layers[0].num_experts
    assert len(seen) == len(masks) == len(toy.manifest.sites)
    for index, mask in zip(seen, masks, strict=True):
        mask = mask.reshape(len(index), num_experts)
        assert torch.equal(index[:, 0] == num_experts, mask.sum(1) == 0)
        kept = index[:, 0] < num_experts
        assert torch.equal(nn.functional.one_hot(index[kept, 0], num_experts), mask[kept].to(torch.int64))


def test_switch_with_beams_and_a_given_encoder_output(toys: Toys) -> None:
    toy, prompts = toys["switch_transformers"], make_prompts(2, length=10)
    settings: dict[str, Any] = {"num_beams": 3, "length_penalty": 0.5}
    assert generate(toy.model, prompts, 8, **settings) == generate(toy.reference, prompts, 8, **settings)
    with torch.no_grad():
        encoded = toy.model.get_encoder()(torch.tensor(prompts[:1]))
        tokens = toy.model.generate(encoder_outputs=encoded, max_new_tokens=8, do_sample=False)
    assert tokens.tolist() == generate(toy.reference, prompts[:1], 8)
    for site in toy.manifest.sites:
        module = toy.model.get_submodule(site)
        assert type(module).__name__ == "SwitchTransformersExperts" and isinstance(module, nn.ModuleDict)
        assert not list(module.parameters())


# -- dense products of a few tokens ------------------------------------------------------------------------------------


class Counting(Kernels):
    """Notes how many tokens each product was of."""

    def __init__(self) -> None:
        super().__init__(AVAILABLE[0], "for a test")
        self.tokens: list[int] = []

    def dots(self, tasks: Any, *args: Any, **kwargs: Any) -> None:
        self.tokens.append(tasks[2])
        super().dots(tasks, *args, **kwargs)


@pytest.fixture
def kernels() -> Counting:
    return Counting()


def made(dtype: torch.dtype, bias: bool, kernels: Kernels) -> tuple[nn.Linear, nn.Linear]:
    """A module, and the same one changed."""
    torch.manual_seed(0)
    plain = nn.Linear(70, 33, bias=bias, dtype=dtype).requires_grad_(False)
    changed = copy.deepcopy(plain)
    assert use_kernels(changed, kernels) == 1
    return plain, changed


@compiled
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(70,), (1, 70), (4, 70), (1, 1, 70), (2, 2, 70), (1, 3, 1, 70)])
def test_a_few_tokens_of_any_shape(kernels: Counting, dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    plain, changed = made(dtype, bias, kernels)
    x = torch.randn(shape).to(dtype)
    actual, exact = changed(x), nn.functional.linear(x.double(), plain.weight.double())
    exact = exact if plain.bias is None else exact + plain.bias.double()
    assert kernels.tokens == [x.numel() // 70]
    assert actual.shape == plain(x).shape and actual.dtype == dtype
    rounding = max(1.01 * float((exact.to(dtype) - exact).abs().max()), 2e-6)  # float32's sums round, too
    assert (actual - exact).abs().max() <= rounding, "rounded once"


@compiled
def test_all_other_inputs_are_torchs_to_the_bit(kernels: Counting) -> None:
    plain, changed = made(torch.bfloat16, True, kernels)
    for shape in ((17, 70), (0, 70), (2, 9, 70)):
        x = torch.randn(shape).bfloat16()
        assert torch.equal(changed(x), plain(x))
    for x in (torch.randn(1, 70), torch.randn(1, 69).bfloat16()):  # another dtype, another width
        with pytest.raises(RuntimeError):
            changed(x)
    x = torch.randn(1, 70).bfloat16().requires_grad_()
    changed(x).sum().backward()
    assert x.grad is not None
    assert kernels.tokens == []


@compiled
def test_inputs_that_are_views(kernels: Counting) -> None:
    _, changed = made(torch.bfloat16, False, kernels)
    wide = torch.randn(3, 140).bfloat16()
    a_token_each = torch.randn(1, 3, 70).bfloat16().transpose(0, 1)  # whose middle stride is that of all rows
    views = wide[:, ::2], wide[:, 70:], wide[:1].expand(3, -1)[:, :70], torch.randn(70, 2).bfloat16().T, a_token_each
    for view in views:
        assert torch.equal(changed(view), changed(view.clone(memory_format=torch.contiguous_format)))
    assert len(kernels.tokens) == 10


@compiled
def test_what_does_not_gain_stays_as_it_is() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16), nn.Bilinear(8, 8, 8)
    )
    assert use_kernels(model, choose_kernels("torch")) == 0
    assert use_kernels(model, choose_kernels()) == 1
    assert [type(module) for module in model] == [nn.Linear, FewTokensLinear, nn.Bilinear]
    assert repr(model[1]) == repr(nn.Linear(8, 8)) and isinstance(model[1], nn.Linear)


class Halved(torch.Tensor):
    """Stands for quantized weights: its own bytes are half of what it means."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, weight, bias = args
                return func(x, weight.as_subclass(torch.Tensor) * 2, bias)
            return func(*args, **(kwargs or {}))


@compiled
def test_weights_that_somebody_has_replaced_are_torchs(kernels: Counting) -> None:
    """Quantized, cast, moved, trained: what the compiled products would read is not there, or not all of it."""
    x = torch.randn(1, 70).bfloat16()
    plain, quantized = made(torch.bfloat16, False, kernels)
    del quantized.weight
    quantized.weight = (plain.weight / 2).as_subclass(Halved)
    torch.testing.assert_close(quantized(x), plain(x), rtol=1e-2, atol=1e-2)
    plain, cast = made(torch.bfloat16, True, kernels)
    assert torch.equal(cast.double()(x.double()), plain.double()(x.double()))
    _, mixed = made(torch.bfloat16, True, kernels)
    mixed.bias = nn.Parameter(mixed.bias.float(), requires_grad=False)
    with pytest.raises(RuntimeError):
        mixed(x)  # as torch refuses it
    _, moved = made(torch.bfloat16, True, kernels)
    assert moved.to("meta")(x.to("meta")).is_meta
    _, trained = made(torch.bfloat16, True, kernels)
    trained.bias.requires_grad_()
    trained(x).sum().backward()
    assert trained.bias.grad is not None
    assert kernels.tokens == []


@compiled
@pytest.mark.slow
def test_what_is_compiled_is_torchs(kernels: Counting) -> None:
    plain, changed = made(torch.bfloat16, True, kernels)
    x = torch.randn(1, 70).bfloat16()
    assert torch.equal(torch.compile(changed, backend="eager", fullgraph=True)(x), plain(x))
    assert kernels.tokens == []

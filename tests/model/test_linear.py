"""Dense products of a few tokens: torch's but for the order of summation; and torch's itself for all else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import expertly
from expertly.model.hooks import GAINING, FewTokensLinear, use_kernels
from expertly.native.kernels import VARIABLE, Kernels, choose_kernels, libraries
from tests.families import generate, make_checkpoint, make_prompts

AVAILABLE, WHY = libraries()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no compiled products: {WHY}")


class Counting(Kernels):
    """Notes how many tokens each product was of."""

    def __init__(self) -> None:
        super().__init__(AVAILABLE[0], "for a test")
        self.tokens: list[int] = []

    def dots(self, tasks: Any, *args: Any, **kwargs: Any) -> None:
        self.tokens.append(tasks[2])
        super().dots(tasks, *args, **kwargs)


def made(dtype: torch.dtype, bias: bool, kernels: Kernels) -> tuple[nn.Linear, nn.Linear]:
    """A module, and the same one changed."""
    torch.manual_seed(0)
    plain = nn.Linear(70, 33, bias=bias, dtype=dtype).requires_grad_(False)
    changed = copy.deepcopy(plain)
    assert use_kernels(changed, kernels) == 1
    return plain, changed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", GAINING)
@pytest.mark.parametrize("shape", [(70,), (1, 70), (4, 70), (1, 1, 70), (2, 2, 70), (1, 3, 1, 70)])
def test_a_few_tokens_of_any_shape(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    kernels = Counting()
    plain, changed = made(dtype, bias, kernels)
    x = torch.randn(shape).to(dtype)
    actual, exact = changed(x), nn.functional.linear(x.double(), plain.weight.double())
    exact = exact if plain.bias is None else exact + plain.bias.double()
    assert kernels.tokens == [x.numel() // 70]
    assert actual.shape == plain(x).shape and actual.dtype == dtype
    assert (actual - exact).abs().max() <= 1.01 * (exact.to(dtype) - exact).abs().max(), "rounded once"


def test_all_else_is_torchs_to_the_bit() -> None:
    kernels = Counting()
    plain, changed = made(torch.bfloat16, True, kernels)
    for shape in ((5, 70), (0, 70), (2, 3, 70)):
        x = torch.randn(shape).bfloat16()
        assert torch.equal(changed(x), plain(x))
    with pytest.raises(RuntimeError):
        changed(torch.randn(1, 70))  # as torch refuses another dtype
    with pytest.raises(RuntimeError):
        changed(torch.randn(1, 69).bfloat16())
    x = torch.randn(1, 70).bfloat16().requires_grad_()
    changed(x).sum().backward()
    assert x.grad is not None
    assert kernels.tokens == []


def test_inputs_that_are_views() -> None:
    kernels = Counting()
    _, changed = made(torch.bfloat16, False, kernels)
    wide = torch.randn(3, 140).bfloat16()
    for view in (wide[:, ::2], wide[:, 70:], wide[:1].expand(3, -1)[:, :70], torch.randn(70, 2).bfloat16().T):
        assert torch.equal(changed(view), changed(view.contiguous()))
    assert len(kernels.tokens) == 8


def test_what_does_not_gain_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), nn.Bilinear(8, 8, 8))
    assert use_kernels(model, choose_kernels(torch.device("cpu"), "torch")) == 0
    assert use_kernels(model, choose_kernels(torch.device("cpu"))) == 1
    assert [type(module) for module in model] == [nn.Linear, FewTokensLinear, nn.Bilinear]
    assert repr(model[1]) == repr(nn.Linear(8, 8)) and isinstance(model[1], nn.Linear)


def test_a_loaded_models_decode_runs_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    prompts, logits, calls = make_prompts(1, length=9), {}, []
    dots = Kernels.dots

    def counted(self: Kernels, tasks: Any, x: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(out.shape[-1])
        dots(self, tasks, x, out, *args, **kwargs)

    monkeypatch.setattr(Kernels, "dots", counted)
    for kernels in ("native", "torch"):
        monkeypatch.setenv(VARIABLE, kernels)
        model, _ = expertly.load(str(folder), dtype="bfloat16", device="cpu")
        num_changed = sum(type(module) is FewTokensLinear for module in model.modules())
        assert (num_changed > 0) == (kernels == "native")
        calls.clear()
        generate(model, prompts, 4)
        assert (calls.count(model.lm_head.out_features) >= 3) == (kernels == "native"), "each decode step ends with it"
        copied = copy.deepcopy(model)
        with torch.no_grad():
            logits[kernels] = model(torch.tensor([[5, 6, 7]])).logits
            assert torch.equal(copied(torch.tensor([[5, 6, 7]])).logits, logits[kernels])
        expertly.unload(model)
    error = (logits["native"] - logits["torch"]).norm() / logits["torch"].norm()
    assert error < 2e-2


class Halved(torch.Tensor):
    """Stands for quantized weights: its own bytes are half of what it means."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, weight, bias = args
                return func(x, weight.as_subclass(torch.Tensor) * 2, bias)
            return func(*args, **(kwargs or {}))


def test_weights_that_somebody_has_replaced_are_torchs() -> None:
    """Quantized, cast, moved, trained: what the compiled products would read is not there, or not all of it."""
    kernels = Counting()
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


@pytest.mark.slow
def test_what_is_compiled_is_torchs() -> None:
    kernels = Counting()
    plain, changed = made(torch.bfloat16, True, kernels)
    x = torch.randn(1, 70).bfloat16()
    assert torch.equal(torch.compile(changed, backend="eager", fullgraph=True)(x), plain(x))
    assert kernels.tokens == []

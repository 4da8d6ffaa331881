"""Only what is on a closed list runs in the kernels: anything else is the model's own code, and computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from expertly.model.dense import use_kernels
from expertly.native.kernels import choose_kernels
from tests.families import make_model, make_prompts
from tests.model.conftest import Calls

# -- norms -------------------------------------------------------------------------------------------------------------


class Norm(modeling.Qwen3MoeRMSNorm):
    """One of which a subclass may make another one that common numbers do not show."""


class Masked(Norm):
    """No name tells it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        normed = hidden_states * torch.rsqrt(variance + self.variance_epsilon) * self.weight
        return normed * (hidden_states < 1000)


class Shifted(Norm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("offset", torch.zeros(width))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.offset


def bounded(forward: Callable[..., torch.Tensor]) -> Any:
    @wraps(forward)
    def call(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden_states).clamp(-2000, 2000)

    return call


class Decorated(Norm):
    forward = bounded(Norm.forward)


def by_helper(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states if hidden_states.abs().max() < 1000 else hidden_states / 2


_norm = by_helper


class Helped(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = _norm(hidden_states)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


@pytest.mark.parametrize("kind", [Masked, Shifted, Decorated, Helped])
def test_norms_with_another_step_are_left_alone(kind: Any, ran: Calls) -> None:
    module: Any = nn.Sequential(kind(64))
    assert use_kernels(module, choose_kernels()) == 0
    ran.clear()
    with torch.no_grad():
        module(torch.full((1, 64), 5000.0))
    assert not ran


class Labelled(torch.Tensor):
    pass


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda x: x.double(),
    "a subclass": lambda x: x.as_subclass(Labelled),
    "trained": lambda x: x.requires_grad_(),
    "many": lambda x: x.repeat(40, 1),
    "none": lambda x: x[:0],
}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("make", [lambda: Norm(64), lambda: nn.Linear(64, 8)], ids=["norm", "linear"])
def test_other_tensors_are_torchs(make: Any, tensor: str, ran: Calls) -> None:
    plain: Any = nn.Sequential(make()).requires_grad_(False)
    ours = copy.deepcopy(plain)
    use_kernels(ours, choose_kernels())
    dice = torch.Generator().manual_seed(0)
    x = TENSORS[tensor](torch.randn(1, 64, generator=dice))
    if tensor == "another dtype" and isinstance(plain[0], nn.Linear):
        plain.double(), ours.double()
    ran.clear()
    assert torch.equal(ours(x), plain(x))
    assert not ran
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        x = torch.randn(1, 64, generator=dice)
        assert torch.equal(ours.float()(x), plain.float()(x))
    assert not ran


class Halved(torch.Tensor):
    """Stands for quantized weights: its own bytes are half of what it means."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, weight, bias = args
                return func(x, weight.as_subclass(torch.Tensor) * 2, bias)
            return func(*args, **(kwargs or {}))


def with_weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    def replace(layer: Any) -> None:
        weight = change(layer.weight.data)
        del layer.weight
        layer.weight = weight

    return replace


OF_NORMS: dict[str, Callable[[Any], Any]] = {
    "epsilon": lambda norm: setattr(norm, "variance_epsilon", 0.5),
    "forward of its own": lambda norm: setattr(norm, "forward", lambda x: x * 2),
    "a double norm": lambda norm: norm.double(),
    "parametrized": lambda norm: parametrize.register_parametrization(norm, "weight", nn.Hardtanh()),
    "class": lambda norm: setattr(norm, "__class__", nn.Identity),
}
OF_LINEARS: dict[str, Callable[[Any], Any]] = {
    "sparse": with_weight(lambda weight: weight.to_sparse_csr()),
    "in columns": with_weight(lambda weight: weight.t().contiguous().t()),
    "quantized": with_weight(lambda weight: weight.as_subclass(Halved)),
    "narrower": with_weight(lambda weight: weight[:, 1:]),
    "cast": lambda layer: layer.double(),
    "moved": lambda layer: layer.to("meta"),
    "another bias": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.double(), requires_grad=False)),
    "trained": lambda layer: layer.bias.requires_grad_(),
}


@pytest.mark.parametrize("change", [*OF_NORMS, *OF_LINEARS])
def test_a_module_that_somebody_changes_is_the_models(change: str, ran: Calls) -> None:
    """What the kernels would read is not there, or not all of it, or another number."""
    apply = (OF_NORMS | OF_LINEARS)[change]
    plain: Any = nn.Sequential(Norm(64) if change in OF_NORMS else nn.Linear(64, 8)).requires_grad_(False)
    ours = copy.deepcopy(plain)
    assert use_kernels(ours, choose_kernels()) == 1
    ran.clear()
    outcomes: list[Any] = []
    for model in (plain, ours):
        apply(model[0])
        x = torch.linspace(-2, 2, 64, dtype=model[0].weight.dtype, device=model[0].weight.device)[None]
        try:
            outcomes.append(model(x))
        except RuntimeError as error:  # as torch refuses it
            outcomes.append(str(error))
    assert not ran
    assert outcomes[0].shape == outcomes[1].shape if change == "moved" else equal(*outcomes)
    assert isinstance(outcomes[0], str) == (change in ("narrower", "another bias"))


def equal(one: Any, other: Any) -> bool:
    """Tensors, or what was said instead."""
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# -- attention ---------------------------------------------------------------------------------------------------------


def asked(module: Any, function: Any, more: dict[str, Any]) -> Any:
    dice = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, num, 8, generator=dice) for heads, num in ((4, 1), (2, 5), (2, 5)))
    return function(module, q, k, v, **({"attention_mask": None, "scaling": 0.3} | more))[0]


def masked(mask: torch.Tensor) -> dict[str, Any]:
    return {"attention_mask": mask}


UNKNOWN: dict[str, dict[str, Any]] = {
    "position_bias": {"position_bias": torch.randn(2, 4, 1, 5, generator=torch.Generator().manual_seed(1))},
    "sinks": {"sinks": torch.ones(4)},
    "indices": {"indices": torch.zeros(2, 1, 3, dtype=torch.long)},
    "head_mask": {"head_mask": torch.zeros(4)},
    "a new one": {"something_of_next_year": 1.5},
    "a cache of continuous batching": {"cache": object()},
    "softcap, which another attention heeds": {"softcap": 5.0},
    "a scale for each head": {"scaling": torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1, 1)},
    "a mask of 8 bits": masked(torch.ones(2, 1, 1, 5, dtype=torch.uint8)),
    "a mask in float64": masked(torch.zeros(2, 1, 1, 5, dtype=torch.float64)),
    "a mask of two dimensions": masked(torch.zeros(1, 5)),
    "a mask for all keys": masked(torch.zeros(2, 1, 1, 1)),
    "a mask that is trained": masked(torch.zeros(2, 1, 1, 5, requires_grad=True)),
    "a mask in a subclass": masked(torch.zeros(2, 1, 1, 5).as_subclass(Labelled)),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_arguments_that_nobody_knows_are_the_models(implementation: str, name: str) -> None:
    """With `position_bias` dropped, a family's decode logits were 1 to 65 % off."""
    model: Any = make_model("qwen3_moe").eval()
    model.set_attn_implementation(implementation)
    module, kernels = model.model.layers[0].self_attn, choose_kernels()
    plain = modeling.eager_attention_forward if implementation == "eager" else sdpa_attention_forward
    use_kernels(model, kernels)
    ours = ALL_ATTENTION_FUNCTIONS["expertly"]
    asked(module, ours, {})
    assert kernels.counts.attention == 1
    outcomes = []
    for function in (ours, plain):
        try:
            outcomes.append(asked(module, function, UNKNOWN[name]))
        except (TypeError, ValueError, RuntimeError) as error:  # which torch and transformers raise
            outcomes.append(str(error))
    assert kernels.counts.attention == 1
    assert equal(*outcomes)
    asked(module, ours, dict.fromkeys(UNKNOWN[name].keys() - {"scaling"}))
    assert kernels.counts.attention == 2, "None asks for nothing"


def eager_clamped(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Any:
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (torch.matmul(query, key.transpose(2, 3)) * scaling).clamp(max=50.0)
    weights = weights if attention_mask is None else weights + attention_mask
    return torch.matmul(nn.functional.softmax(weights, dim=-1), value).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize(("implementation", "when"), [("eager", "before"), ("eager", "after"), ("sdpa", "after")])
def test_another_attention_function_is_heeded(implementation: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernels = make_model("qwen3_moe").eval(), choose_kernels()
    model.set_attn_implementation(implementation)
    if when == "before":
        monkeypatch.setattr(modeling, "eager_attention_forward", eager_clamped)
    use_kernels(model, kernels)
    monkeypatch.setattr(modeling, "eager_attention_forward", eager_clamped)
    sdpa = ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **more: sdpa(*args, **more))
    with torch.no_grad():
        model(torch.tensor([[5]]))
    assert kernels.counts.attention == 0


# -- queries, keys and values ------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """As an adapter replaces a layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def doubled(attention: Any) -> None:
    layer = attention.o_proj
    attention.o_proj = Doubled(layer.in_features, layer.out_features, bias=False)
    attention.o_proj.weight = layer.weight


PARTS: dict[str, Callable[[Any], Any]] = {
    "another layer": doubled,
    "scaling": lambda attention: setattr(attention, "scaling", 0.9),
    "a linear layer's forward": lambda attention: setattr(attention.k_proj, "forward", lambda x: x[..., :16] * 2),
    "a norm's epsilon": lambda attention: setattr(attention.q_norm, "variance_epsilon", 0.5),
    "a parametrization": lambda it: parametrize.register_parametrization(it.v_proj, "weight", nn.Hardtanh()),
    "a hook": lambda attention: attention.q_proj.register_forward_hook(lambda _, __, output: output * 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_set_after_the_trial_is_heeded(name: str, ran: Calls) -> None:
    plain: Any = make_model("qwen3_moe").eval()
    ours, ids = copy.deepcopy(plain), torch.tensor(make_prompts(1, length=3))
    use_kernels(ours, choose_kernels())
    with torch.no_grad():
        ours(ids)
        assert "projections" in ran
        for model in (plain, ours):
            for layer in model.model.layers:
                PARTS[name](layer.self_attn)
        ran.clear()
        torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert "projections" not in ran


@pytest.mark.parametrize("name", ["rotation", "Qwen3MoeRMSNorm", "Qwen3MoeAttention"])
def test_what_is_patched_in_the_family_after_the_trial_is_heeded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = make_model("qwen3_moe").eval()
    ours, ids = copy.deepcopy(plain), torch.tensor(make_prompts(1, length=3))
    use_kernels(ours, choose_kernels())
    with torch.no_grad():
        before = ours(ids).logits

        def scaled(function: Any, *arguments: Any, **more: Any) -> Any:
            made = function(*arguments, **more)
            return made * 1.5 if isinstance(made, torch.Tensor) else (made[0] * 1.5, *made[1:])

        place, attribute = (
            (modeling, "apply_rotary_pos_emb") if name == "rotation" else (getattr(modeling, name), "forward")
        )
        function = getattr(place, attribute)
        monkeypatch.setattr(place, attribute, lambda *args, **more: scaled(function, *args, **more))
        assert not torch.allclose(plain(ids).logits, before, rtol=1e-2)
        torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


# -- routers -----------------------------------------------------------------------------------------------------------


class Clamped(modeling.Qwen3MoeTopKRouter):
    """Which common numbers do not show."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states.clamp(-99, 99))


ROUTERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another step": ("before", lambda router: setattr(router, "__class__", Clamped)),
    "a bias": ("before", lambda router: setattr(router, "e_score_correction_bias", nn.Parameter(torch.ones(8)))),
    "top_k": ("after", lambda router: setattr(router, "top_k", 1)),
    "norm_topk_prob": ("after", lambda router: setattr(router, "norm_topk_prob", not router.norm_topk_prob)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_other_routers_are_the_models(name: str, ran: Calls) -> None:
    """Those with another step, and those that somebody changes."""
    plain: Any = make_model("qwen3_moe", dtype=torch.bfloat16).eval().model.layers[0].mlp.gate
    ours, (when, change) = copy.deepcopy(plain), ROUTERS[name]
    change(plain)
    if when == "before":
        change(ours)
    use_kernels(ours, choose_kernels())
    if when == "after":
        change(ours)
    ran.clear()
    with torch.no_grad():
        x = torch.randn(1, plain.weight.shape[1]).bfloat16()
        torch.testing.assert_close(ours(x)[1:], plain(x)[1:], rtol=1e-2, atol=0)
    assert "router" not in ran

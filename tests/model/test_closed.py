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
from expertly.native.kernels import Kernels, choose_kernels, libraries
from tests.families import make_model, make_prompts

pytestmark = pytest.mark.skipif(not libraries()[0], reason=libraries()[1])

COUNTED = ("attention", "dots", "norm", "projections", "router")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels' functions that were called."""
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name in COUNTED:
        monkeypatch.setattr(Kernels, name, counted(name, getattr(Kernels, name)))
    return calls


# -- norms -------------------------------------------------------------------------------------------------------------


class Norm(modeling.Qwen3MoeRMSNorm):
    """One of which a subclass may make another one that common numbers do not show."""


class Clamped(Norm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.clamp(-1000, 1000))


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


@pytest.mark.parametrize("kind", [Clamped, Masked, Shifted, Decorated, Helped])
def test_norms_with_another_step_are_left_alone(kind: Any, ran: list[str]) -> None:
    module: Any = nn.Sequential(kind(64))
    assert use_kernels(module, choose_kernels()) == 0
    ran.clear()
    with torch.no_grad():
        module(torch.full((1, 64), 5000.0))
    assert ran == []


CHANGES: dict[str, Callable[[Any], Any]] = {
    "epsilon": lambda norm: setattr(norm, "variance_epsilon", 0.5),
    "forward of its own": lambda norm: setattr(norm, "forward", lambda x: x * 2),
    "double": lambda norm: norm.double(),
    "parametrized": lambda norm: parametrize.register_parametrization(norm, "weight", nn.Hardtanh()),
    "class": lambda norm: setattr(norm, "__class__", nn.Identity),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_that_somebody_changes_is_the_models(change: str, ran: list[str]) -> None:
    plain: Any = nn.Sequential(Norm(64))
    ours = copy.deepcopy(plain)
    assert use_kernels(ours, choose_kernels()) == 1
    for model in (plain, ours):
        CHANGES[change](model[0])
    x = torch.randn(1, 64, dtype=torch.float64 if change == "double" else torch.float32)
    ran.clear()
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))
    assert ran == []


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
def test_other_tensors_are_torchs(make: Any, tensor: str, ran: list[str]) -> None:
    plain: Any = nn.Sequential(make()).requires_grad_(False)
    ours = copy.deepcopy(plain)
    use_kernels(ours, choose_kernels())
    dice = torch.Generator().manual_seed(0)
    x = TENSORS[tensor](torch.randn(1, 64, generator=dice))
    if tensor == "another dtype" and isinstance(plain[0], nn.Linear):
        plain.double(), ours.double()
    ran.clear()
    assert torch.equal(ours(x), plain(x))
    assert ran == []
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        x = torch.randn(1, 64, generator=dice)
        assert torch.equal(ours.float()(x), plain.float()(x))
    assert ran == []


def test_sparse_weights_and_weights_in_columns_are_torchs(ran: list[str]) -> None:
    for change in (lambda weight: weight.to_sparse_csr(), lambda weight: weight.t().contiguous().t()):
        plain: Any = nn.Sequential(nn.Linear(64, 8, bias=False)).requires_grad_(False)
        ours = copy.deepcopy(plain)
        use_kernels(ours, choose_kernels())
        for model in (plain, ours):
            model[0].weight = nn.Parameter(change(model[0].weight.data), requires_grad=False)
        x = torch.randn(1, 64)
        assert torch.equal(ours(x), plain(x))
    assert ran == []


# -- attention ---------------------------------------------------------------------------------------------------------


def asked(module: Any, function: Any, more: dict[str, Any], mask: torch.Tensor | None = None) -> Any:
    dice = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, num, 8, generator=dice) for heads, num in ((4, 1), (2, 5), (2, 5)))
    return function(module, q, k, v, mask, **({"scaling": 0.3} | more))[0]


UNKNOWN: dict[str, dict[str, Any]] = {
    "position_bias": {"position_bias": torch.randn(2, 4, 1, 5, generator=torch.Generator().manual_seed(1))},
    "sinks": {"sinks": torch.ones(4)},
    "indices": {"indices": torch.zeros(2, 1, 3, dtype=torch.long)},
    "head_mask": {"head_mask": torch.zeros(4)},
    "a new one": {"something_of_next_year": 1.5},
    "a scale for each head": {"scaling": torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1, 1)},
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
    assert kernels.num_attention == 1
    outcomes = []
    for function in (ours, plain):
        try:
            outcomes.append(asked(module, function, UNKNOWN[name]))
        except TypeError as error:
            outcomes.append(str(error))
    assert kernels.num_attention == 1
    assert torch.equal(*outcomes) if isinstance(outcomes[0], torch.Tensor) else outcomes[0] == outcomes[1]
    asked(module, ours, dict.fromkeys(UNKNOWN[name].keys() - {"scaling"}))
    assert kernels.num_attention == 2, "None asks for nothing"


MASKS: dict[str, torch.Tensor] = {
    "of 8 bits": torch.ones(2, 1, 1, 5, dtype=torch.uint8),
    "in float64": torch.zeros(2, 1, 1, 5, dtype=torch.float64),
    "of two dimensions": torch.zeros(1, 5),
    "for all keys": torch.zeros(2, 1, 1, 1),
    "trained": torch.zeros(2, 1, 1, 5, requires_grad=True),
    "in a subclass": torch.zeros(2, 1, 1, 5).as_subclass(Labelled),
}


@pytest.mark.parametrize("name", MASKS)
def test_other_masks_are_the_models(name: str) -> None:
    model, kernels = make_model("qwen3_moe").eval(), choose_kernels()
    use_kernels(model, kernels)
    module: Any = model.model.layers[0].self_attn
    outcomes = []
    with torch.enable_grad() if name == "trained" else torch.no_grad():
        for function in (ALL_ATTENTION_FUNCTIONS["expertly"], sdpa_attention_forward):
            try:
                outcomes.append(asked(module, function, {}, MASKS[name]))
            except (RuntimeError, ValueError) as error:  # which torch and transformers raise
                outcomes.append(str(error))
    assert kernels.num_attention == 0
    assert torch.equal(*outcomes) if isinstance(outcomes[0], torch.Tensor) else outcomes[0] == outcomes[1]


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


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_eager_attention_is_the_models(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("qwen3_moe").eval()
    model.set_attn_implementation("eager")
    kernels = choose_kernels()
    if when == "before":
        monkeypatch.setattr(modeling, "eager_attention_forward", eager_clamped)
    use_kernels(model, kernels)
    monkeypatch.setattr(modeling, "eager_attention_forward", eager_clamped)
    with torch.no_grad():
        model(torch.tensor([[5]]))
    assert kernels.num_attention == 0


def test_another_sdpa_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernels = make_model("qwen3_moe").eval(), choose_kernels()
    use_kernels(model, kernels)
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: sdpa_attention_forward(*a, **k)
    )
    with torch.no_grad():
        model(torch.tensor([[5]]))
    assert kernels.num_attention == 0


# -- queries, keys and values ------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Any], Any]] = {
    "scaling": lambda attention: setattr(attention, "scaling", 0.9),
    "a linear layer's forward": lambda attention: setattr(attention.k_proj, "forward", lambda x: x[..., :16] * 2),
    "a norm's epsilon": lambda attention: setattr(attention.q_norm, "variance_epsilon", 0.5),
    "a parametrization": lambda attention: parametrize.register_parametrization(
        attention.v_proj, "weight", nn.Hardtanh()
    ),
    "a hook": lambda attention: attention.q_proj.register_forward_hook(lambda _, __, output: output * 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_set_after_the_trial_is_heeded(name: str, ran: list[str]) -> None:
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


@pytest.mark.parametrize("name", ["top_k", "norm_topk_prob"])
def test_a_router_that_somebody_changes_is_the_models(name: str, ran: list[str]) -> None:
    plain: Any = make_model("qwen3_moe", dtype=torch.bfloat16).eval().model.layers[0].mlp.gate
    ours = copy.deepcopy(plain)
    use_kernels(ours, choose_kernels())
    for router in (plain, ours):
        setattr(router, name, 1 if name == "top_k" else not router.norm_topk_prob)
    ran.clear()
    with torch.no_grad():
        x = torch.randn(1, plain.weight.shape[1]).bfloat16()
        torch.testing.assert_close(ours(x)[1], plain(x)[1], rtol=1e-2, atol=0)
    assert "router" not in ran

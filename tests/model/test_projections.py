"""Queries, keys and values of a few tokens in one call: the same to the bit as the model's own steps, or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from expertly.model import dense
from expertly.model.dense import use_kernels
from expertly.native.kernels import TASK_TOKENS, Kernels, choose_kernels, libraries
from tests.families import FAMILIES, make_model

AVAILABLE, WHY = libraries()
pytestmark = pytest.mark.skipif(not AVAILABLE, reason=f"no compiled kernels: {WHY}")

JOINED = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
"""Families whose attention is of the usual kind, among others."""
LONG = TASK_TOKENS + 1
"""Tokens of a prompt that is not few."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call that made queries, keys and values."""
    seen: list[int] = []
    projections = Kernels.projections

    def counted(self: Kernels, x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        seen.append(x.shape[0] * x.shape[1])
        return projections(self, x, *args)

    monkeypatch.setattr(Kernels, "projections", counted)
    return seen


def changed(model: nn.Module, *, joins: bool) -> nn.Module:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", [name for name in FAMILIES if not FAMILIES[name].is_encoder_decoder])
def test_families(family: str, dtype: torch.dtype, calls: list[int]) -> None:
    model = make_model(family, dtype=dtype)
    ours, theirs = (changed(model, joins=joins) for joins in (True, False))
    for num_sequences, width in ((1, 1), (3, 1), (1, 2)):
        found, expected = steps(ours, num_sequences, width), steps(theirs, num_sequences, width)
        assert all(map(torch.equal, found, expected))
    joined = [module for module in ours.modules() if getattr(module, "_expertly_joined", None) is not None]
    assert not joined or calls
    if family in JOINED:
        assert len(joined) == model.config.num_hidden_layers
        assert calls.count(3) == 3 * len(joined) and calls.count(2) == 3 * len(joined)
        assert calls.count(1) in (4 * len(joined), 5 * len(joined)), "of three steps, and of a trial or two"


def test_prompts_and_training_are_the_models_own(calls: list[int]) -> None:
    model: Any = changed(make_model("qwen3_moe", dtype=torch.bfloat16), joins=True)
    ids = torch.arange(1, LONG + 1)[None]
    model(ids)
    model(ids[:, :1])
    with torch.no_grad():
        model(ids)
        model.train()
        model(ids[:, :1])
    assert calls == []


class Doubled(nn.Linear):
    """As an adapter replaces a layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize("name", ["k_proj", "o_proj"])
@pytest.mark.parametrize("how", ["replaced", "watched", "cast"])
def test_what_a_user_changes_later_is_seen(how: str, name: str, calls: list[int]) -> None:
    model = make_model("qwen3_moe", dtype=torch.bfloat16)
    ours: Any = changed(model, joins=True)
    theirs: Any = changed(model, joins=False)
    steps(ours)
    assert calls
    seen: list[Any] = []
    for one in (ours, theirs):
        for layer in one.model.layers:
            part = getattr(layer.self_attn, name)
            if how == "replaced":
                doubled = Doubled(part.in_features, part.out_features, bias=False, dtype=part.weight.dtype)
                doubled.weight = part.weight
                setattr(layer.self_attn, name, doubled)
            elif how == "watched":
                part.register_forward_hook(lambda module, given, got: seen.append(got) or got + 1)
        if how == "cast":
            one.to(torch.float16)
    calls.clear()
    assert all(map(torch.equal, steps(ours), steps(theirs)))
    assert calls == [] and (how != "watched" or seen)


def test_a_forward_with_another_step_is_left_alone(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
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
    steps(changed(model, joins=True))
    assert calls == []

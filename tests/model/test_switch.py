"""switch_transformers, whose experts are modules: they make every family's call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.families import logits_of, make_prompts
from tests.model.conftest import Toys


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

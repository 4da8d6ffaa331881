"""switch_transformers: the same drops, the same outputs, one call per layer as every other family makes."""

from __future__ import annotations

from typing import Any

import torch

from tests.families import generate, load_reference, logits_of, make_prompts, reference_generate
from tests.model.conftest import Toys


def _calls(toy: Any, monkeypatch: Any) -> list[torch.Tensor]:
    """The ids [T, 1] of each call from now on."""
    seen: list[torch.Tensor] = []
    original = toy.runtime.forward_experts

    def record(module: Any, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        seen.append(index)
        assert index.dtype == torch.int64 and index.shape == weights.shape == (hidden.shape[0], 1)
        return original(module, layer, hidden, index, weights)

    monkeypatch.setattr(toy.runtime, "forward_experts", record)
    return seen


def test_what_the_router_drops_is_dropped(toys: Toys, monkeypatch: Any) -> None:
    """Capacity 2 and a long prompt: upstream's masks and ours agree on every row of every layer."""
    toy = toys["switch_transformers"]
    prompts = make_prompts(2, length=24)
    reference = load_reference(toy.source)
    masks: list[torch.Tensor] = []
    for site in toy.manifest.sites:
        module = reference.get_submodule(site)
        module.register_forward_pre_hook(lambda _module, arguments: masks.append(arguments[1]))
    expected = logits_of(reference, prompts)
    seen = _calls(toy, monkeypatch)
    actual = logits_of(toy.model, prompts)
    assert torch.allclose(actual, expected, atol=1e-5)
    num_experts = toy.manifest.layers[0].num_experts
    assert len(seen) == len(masks) == len(toy.manifest.sites)
    for index, mask in zip(seen, masks, strict=True):
        mask = mask.reshape(len(index), num_experts)
        assert torch.equal(index[:, 0] == num_experts, mask.sum(1) == 0)
        kept = index[:, 0] < num_experts
        assert torch.equal(torch.nn.functional.one_hot(index[kept, 0], num_experts), mask[kept].to(torch.int64))


def test_beams_and_a_given_encoder_output(toys: Toys) -> None:
    toy, prompts = toys["switch_transformers"], make_prompts(2, length=10)
    settings: dict[str, Any] = {"num_beams": 3, "length_penalty": 0.5}
    assert generate(toy.model, prompts, 8, **settings) == reference_generate(toy.source, prompts, 8, **settings)
    ids = torch.tensor(prompts[:1])
    with torch.no_grad():
        encoded = toy.model.get_encoder()(ids)
        tokens = toy.model.generate(encoder_outputs=encoded, max_new_tokens=8, do_sample=False)
    assert tokens.tolist() == reference_generate(toy.source, prompts[:1], 8)


def test_the_experts_module_is_still_upstreams(toys: Toys) -> None:
    toy = toys["switch_transformers"]
    for site in toy.manifest.sites:
        module = toy.model.get_submodule(site)
        assert type(module).__name__ == "SwitchTransformersExperts"
        assert isinstance(module, torch.nn.ModuleDict)
        assert not list(module.parameters())

"""Routers found, watched and asked about other hidden states, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from expertly.model.hooks import experts_modules
from expertly.model.routers import HookedRouter, find_routers
from tests.families import FAMILIES, logits_of, make_prompts
from tests.model.conftest import Toys
from tests.model.toy import Toy

SIGMOID = {"deepseek_v3", "glm4_moe", "dots1", "lfm2_moe"}
CHOICE_IS_NOT_TOP_K = SIGMOID | {"ernie4_5_moe"}  # a bias takes part in the choice


def routers_of(toy: Toy) -> list[HookedRouter]:
    routers = [router for router in find_routers(toy.model, toy.manifest.layers) if router is not None]
    assert len(routers) == len(toy.manifest.layers), "a router of each layer"
    return routers


def block_of(toy: Toy, layer: int) -> Any:
    """The module whose child the layer's experts module is."""
    return toy.model.get_submodule(toy.manifest.sites[layer].rpartition(".")[0])


def watched(toy: Toy, routers: list[HookedRouter]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Of one pass: what the routers saw, and what the experts modules were called with, by layer."""
    seen: dict[int, Any] = {}
    received: dict[int, Any] = {}
    handles = []
    for layer, module in enumerate(experts_modules(toy.model)):

        def before(_: nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            received[layer] = args

        handles.append(module.register_forward_pre_hook(before))
    for router in routers:
        router.attach(lambda layer, inputs, logits: seen.__setitem__(layer, (inputs, logits)))
    logits_of(toy.model, make_prompts(1, length=48))
    for router in routers:
        router.detach()
    for handle in handles:
        handle.remove()
    assert seen.keys() == received.keys() == set(range(len(routers)))
    return seen, received


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_routers_that_explain_what_the_experts_received(family: str, toys: Toys) -> None:
    toy = toys[family]
    routers = routers_of(toy)
    seen, received = watched(toy, routers)
    for _, choice, _ in received.values():
        assert len({tuple(row) for row in choice.reshape(len(choice), -1).tolist()}) >= 3, "else this proves little"
    for layer, router in enumerate(routers):
        inputs, logits = seen[layer]
        hidden, choice, weights = received[layer]
        num_experts, top_k = toy.manifest.layers[layer].num_experts, toy.manifest.layers[layer].top_k
        assert router.layer == layer and router.can_look_ahead
        assert router.scoring == ("sigmoid" if family in SIGMOID else "softmax")
        torch.testing.assert_close(inputs, hidden)
        torch.testing.assert_close(router.logits(inputs), logits, rtol=1e-4, atol=1e-4)
        scores = router.normalised(logits)
        torch.testing.assert_close(router.scores(inputs), scores, rtol=1e-4, atol=1e-4)
        assert scores.shape == (len(hidden), num_experts) and scores.dtype == torch.float32
        assert scores.min() >= 0
        torch.testing.assert_close(scores.sum(-1), torch.ones(len(hidden)))
        if family not in CHOICE_IS_NOT_TOP_K:
            assert torch.equal(scores.topk(top_k).indices.sort().values, choice.sort().values)
        if family != "phimoe":  # whose weights are neither a softmax nor a sigmoid of its scores
            chosen = scores.gather(-1, choice)
            shares = [each / each.sum(-1, keepdim=True) for each in (chosen, weights)]
            torch.testing.assert_close(*shares, rtol=1e-4, atol=1e-4)


def test_finding_tells_the_runtime_nothing_and_watchers_see_only_what_the_model_runs(toys: Toys) -> None:
    toy = toys["qwen3_moe"]
    num_iterations, num_calls = len(toy.runtime.iterations), toy.runtime.num_calls
    router = routers_of(toy)[1]
    assert (len(toy.runtime.iterations), toy.runtime.num_calls) == (num_iterations, num_calls)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in toy.model.modules())
    seen: list[int] = []
    router.attach(lambda layer, inputs, logits: seen.append(len(inputs)))
    router.scores(torch.zeros(4, 32))
    logits_of(toy.model, make_prompts(1, length=9))
    router.detach()
    router.detach()
    logits_of(toy.model, make_prompts(1, length=9))
    assert seen == [9] and len(toy.runtime.iterations) == num_iterations + 2
    assert not block_of(toy, 1).gate._forward_hooks


def test_a_router_that_is_no_module_is_not_found(toys: Toys) -> None:
    toy = toys.fresh("mixtral")
    block = block_of(toy, 1)
    gate = block.gate
    del block.gate
    block.__dict__["gate"] = gate.forward
    assert [router is None for router in find_routers(toy.model, toy.manifest.layers)] == [False, True, False]


def test_a_router_that_needs_more_than_hidden_states_cannot_look_ahead(toys: Toys) -> None:
    toy = toys.fresh("mixtral")
    gate = block_of(toy, 2).gate

    class Stateful(type(gate)):  # type: ignore[misc]
        num_rows = None

        def forward(self, hidden_states: torch.Tensor) -> Any:
            self.num_rows = self.num_rows or len(hidden_states)
            if len(hidden_states) != self.num_rows:
                raise ValueError("other rows than in the pass before")
            return super().forward(hidden_states)

    gate.__class__ = Stateful
    assert [router.can_look_ahead for router in routers_of(toy)] == [True, True, False]


def test_a_router_that_is_a_plain_linear_layer(toys: Toys) -> None:
    """As jamba's in transformers 5.17: the block itself makes the choice."""
    toy = toys.fresh("mixtral")
    for layer in range(3):
        block = block_of(toy, layer)
        linear = nn.Linear(32, 8, bias=False)
        linear.weight = block.gate.weight
        block.gate = linear

        class Block(type(block)):  # type: ignore[misc]
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                flat = hidden_states.view(-1, hidden_states.shape[-1])
                weights, index = self.gate(flat).softmax(-1).topk(2)
                return self.experts(flat, index, weights).view(hidden_states.shape)

        block.__class__ = Block
    routers = routers_of(toy)
    seen, _ = watched(toy, routers)
    for router in routers:
        inputs, logits = seen[router.layer]
        assert router.scoring == "softmax" and router.can_look_ahead
        torch.testing.assert_close(router.logits(inputs), logits, rtol=1e-4, atol=1e-4)

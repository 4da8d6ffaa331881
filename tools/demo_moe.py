"""The demo model, which is transformers' own Qwen3-MoE, and the loss of its routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, VOCAB = 12, 32, 4, 256, 64, 8192


def demo_config() -> Qwen3MoeConfig:
    """About 23 million parameters, 6.5 million of them active for a token."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 0.01,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return Qwen3MoeConfig(**fields)


def build_model(device: torch.device) -> Qwen3MoeForCausalLM:
    """A float32 model with fresh weights; torch's global seed decides them."""
    model = Qwen3MoeForCausalLM._from_config(
        demo_config(), experts_implementation="grouped_mm", attn_implementation="eager"
    )  # sequences are short: sdpa's backward takes longer
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith(("o_proj.weight", "mlp.gate.weight")):
            nn.init.normal_(parameter, std=0.01)
        elif parameter.dim() == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    return model.to(device)


class RouterLoss:
    """Collects router logits by hooks; Switch Transformer's load-balancing loss (eq. 4) plus a router z-loss,
    summed over layers.

    The load fractions are a running mean over batches (as in "Demons in the Detail", 2025), not one micro-batch's, so
    that a batch of one domain may use some experts more than others.
    """

    def __init__(self, model: nn.Module, balance: float, z: float, decay: float = 0.95) -> None:
        self._logits: list[Tensor] = []
        self._balance, self._z, self._decay = balance, z, decay
        gates = [module.gate for name, module in model.named_modules() if name.endswith(".mlp")]
        for gate in gates:
            gate.register_forward_hook(self._collect)
        device = next(model.parameters()).device
        self.load = torch.full((len(gates), NUM_EXPERTS), 1 / NUM_EXPERTS, device=device)  # [L, E]

    def _collect(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            self._logits.append(output[0].float())

    def take(self) -> Tensor:
        """The loss of the forward pass just made; forgets its logits and updates the running load."""
        logits = torch.stack(self._logits)  # [L, T, E]
        self._logits.clear()
        with torch.no_grad():
            chosen = logits.topk(TOP_K, dim=-1).indices.flatten(1)  # [L, T*K]
            ones = torch.ones((), device=logits.device).expand(chosen.shape)
            load = torch.zeros_like(self.load).scatter_add_(1, chosen, ones) / chosen.shape[1]
            self.load.lerp_(load, 1 - self._decay)
        probabilities = logits.softmax(-1).mean(1)  # [L, E]
        balance = NUM_EXPERTS * (self.load * probabilities).sum()
        return self._balance * balance + self._z * logits.logsumexp(-1).square().mean(1).sum()

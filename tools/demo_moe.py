"""The demo model and the experts function it is trained with.

The model is transformers' own Qwen3-MoE, so that what is trained is what is exported; only the experts' forward is
replaced (through transformers' experts registry) by one whose backward writes each expert's gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, VOCAB = 12, 32, 4, 256, 64, 8192
EXPERTS_FUNCTION = "demo_training"


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
    """A float32 model with fresh weights (torch's global seed decides them) that trains with `train_experts`."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, train_experts)
    model = Qwen3MoeForCausalLM._from_config(
        demo_config(), experts_implementation=EXPERTS_FUNCTION, attn_implementation="eager"
    )  # sequences are short: sdpa's backward takes longer
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
        elif name.endswith(("o_proj.weight", "mlp.gate.weight")):
            nn.init.normal_(parameter, std=0.01)
        elif parameter.dim() == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    return model.to(device)


def train_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H]; SwiGLU, no bias."""
    output: Tensor = _Experts.apply(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj)
    return output


class _Experts(torch.autograd.Function):
    """Tokens sorted by expert (N rows), one matrix product an expert and projection, gradients written in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        ctx.dtype = gate_up.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weights, gate_up, down = (t.to(dtype) for t in (x, weights, gate_up, down))
        top_k = index.shape[1]
        place, ends = _places(index.reshape(-1), gate_up.shape[0])
        xs = x.new_zeros(ends[-1], x.shape[1])  # [N, H]
        xs[place] = x.repeat_interleave(top_k, 0)
        projected = _by_expert(xs, gate_up.transpose(1, 2), ends)  # [N, 2I]
        gate, up = projected.chunk(2, dim=-1)
        scale = weights.new_zeros(ends[-1], 1)  # [N, 1]
        scale[place, 0] = weights.reshape(-1)
        inner = F.silu(gate) * up * scale  # [N, I]
        ys = _by_expert(inner, down.transpose(1, 2), ends)  # [N, H]
        ctx.save_for_backward(xs, projected, inner, scale, place, gate_up, down)
        ctx.ends = ends
        return ys[place].view(-1, top_k, x.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        xs, projected, inner, scale, place, gate_up, down = ctx.saved_tensors
        ends = ctx.ends
        grad = grads[0].to(xs.dtype)  # [T, H]
        top_k = place.numel() // grad.shape[0]
        grad_ys = torch.zeros_like(xs)  # [N, H]
        grad_ys[place] = grad.repeat_interleave(top_k, 0)
        grad_inner = _by_expert(grad_ys, down, ends)  # [N, I]
        grad_down = _outer_by_expert(grad_ys, inner, ends, down)
        gate, up = projected.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        swish = gate * sigmoid
        grad_scale = (grad_inner * swish).mul_(up).sum(-1)  # [N]
        grad_inner.mul_(scale)
        grad_projected = torch.empty_like(projected)  # [N, 2I]
        torch.mul(grad_inner, swish, out=grad_projected[:, gate.shape[1] :])
        slope = (1 - sigmoid).mul_(swish).add_(sigmoid)
        torch.mul(grad_inner.mul_(up), slope, out=grad_projected[:, : gate.shape[1]])
        grad_gate_up = _outer_by_expert(grad_projected, xs, ends, gate_up)
        grad_xs = _by_expert(grad_projected, gate_up, ends)  # [N, H]
        grad_x = grad_xs[place].view(-1, top_k, grad.shape[1]).sum(1)
        grad_weights = grad_scale[place].view(-1, top_k)
        grad_x, grad_weights, grad_gate_up, grad_down = (
            t.to(ctx.dtype) for t in (grad_x, grad_weights, grad_gate_up, grad_down)
        )
        return grad_x, None, grad_weights, grad_gate_up, grad_down


def _places(experts: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Rows for assignments [T*K] so that an expert's are neighbours: the row of each, and where each expert's end.

    An expert has a multiple of 32 rows; those left over are zero. Products of few shapes are worth it: oneDNN compiles
    code for each.
    """
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    room = (counts + 31) // 32 * 32
    shift = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)  # [E]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device) + shift[experts[order]]
    return place, room.cumsum(0).tolist()


def _by_expert(rows: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
    """rows [N, A] sorted by expert, weights [E, A, B] -> [N, B]."""
    output = rows.new_empty(rows.shape[0], weights.shape[2])
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            torch.mm(rows[start:end], weights[expert], out=output[start:end])
        start = end
    return output


def _outer_by_expert(left: Tensor, right: Tensor, ends: list[int], like: Tensor) -> Tensor:
    """sum over an expert's rows of left^T right: [E, A, B] shaped as `like`."""
    output = torch.empty_like(like)
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            torch.mm(left[start:end].t(), right[start:end], out=output[expert])
        else:
            output[expert].zero_()
        start = end
    return output


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

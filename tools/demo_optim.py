"""Muon for the matrices and Adam for the rest, over parameters that several worker processes share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter with its gradients (one a worker) and its optimizer state."""

    name: str
    value: Tensor
    grads: tuple[Tensor, ...]
    first: Tensor
    second: Tensor | None
    """Second moment where Adam updates this parameter; None where Muon does."""
    num_fused: int
    """Matrices stacked in the rows of one expert's parameter (gate and up: 2)."""


@dataclass(frozen=True, slots=True)
class Rates:
    muon: float
    adam: float
    weight_decay: float


def make_slots(model: nn.Module, num_workers: int) -> list[Slot]:
    """Slots on the model's device, in shared memory if that is the CPU. Values start as the model's."""
    slots = []
    for name, parameter in model.named_parameters():
        uses_muon = parameter.dim() >= 2 and "embed" not in name and not name.endswith("mlp.gate.weight")
        blanks = [torch.zeros_like(parameter.data) for _ in range(num_workers + (1 if uses_muon else 2))]
        value = parameter.data.clone()
        if value.device.type == "cpu":
            for tensor in (value, *blanks):
                tensor.share_memory_()
        second = None if uses_muon else blanks[-1]
        slot = Slot(
            name, value, tuple(blanks[:num_workers]), blanks[num_workers], second, 2 if "gate_up" in name else 1
        )
        slots.append(slot)
    return slots


def attach(model: nn.Module, slots: list[Slot], rank: int) -> None:
    """Make the model compute with the slots' values and accumulate gradients in worker `rank`'s buffers."""
    for (name, parameter), slot in zip(model.named_parameters(), slots, strict=True):
        assert name == slot.name
        parameter.data = slot.value
        parameter.grad = slot.grads[rank]


@torch.no_grad()
def update(slots: list[Slot], rank: int, num_workers: int, step: int, rates: Rates) -> None:
    """Worker `rank` updates its share of the parameters, in place, from the mean of all workers' gradients."""
    for slot in _share(slots, rank, num_workers):
        grad = slot.grads[0].clone() if num_workers == 1 else torch.stack(slot.grads).mean(0)
        if slot.second is None:
            _muon(slot, grad, rates)
        else:
            _adam(slot, slot.second, grad, step, rates)


def _share(slots: list[Slot], rank: int, num_workers: int) -> list[Slot]:
    """Every num_workers-th slot of each kind, so that the costly ones are spread."""
    ordered = sorted(slots, key=lambda slot: (-slot.value.numel(), slot.name))
    return ordered[rank::num_workers]


def _muon(slot: Slot, grad: Tensor, rates: Rates) -> None:
    slot.first.lerp_(grad, 0.05)
    rows, columns = slot.value.shape[-2] // slot.num_fused, slot.value.shape[-1]
    direction = orthogonalise(grad.lerp_(slot.first, 0.95).view(-1, rows, columns))
    size: float = max(1.0, rows / columns) ** 0.5
    slot.value.mul_(1 - rates.muon * rates.weight_decay)
    slot.value.add_(direction.reshape(slot.value.shape), alpha=-rates.muon * size)


def _adam(slot: Slot, second: Tensor, grad: Tensor, step: int, rates: Rates) -> None:
    slot.first.lerp_(grad, 1 - ADAM_BETAS[0])
    second.lerp_(grad.square(), 1 - ADAM_BETAS[1])
    scale = (second / (1 - ADAM_BETAS[1] ** step)).sqrt_().add_(1e-10)
    if slot.value.dim() >= 2:
        slot.value.mul_(1 - rates.adam * rates.weight_decay)
    slot.value.addcdiv_(slot.first, scale, value=-rates.adam / (1 - ADAM_BETAS[0] ** step))


def has_fast_bfloat16(device: str) -> bool:
    """Whether products in bfloat16 are faster than in float32 there."""
    return device == "cuda" or bool(torch.cpu._is_avx512_bf16_supported())


def orthogonalise(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices [N, A, B], roughly: Newton-Schulz quintic (Jordan et al., Muon, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2).contiguous() if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if has_fast_bfloat16(x.device.type):  # 2.5x faster than float32, as good; else half as fast
        x = x.bfloat16()
    for _ in range(num_iterations):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if is_tall else x

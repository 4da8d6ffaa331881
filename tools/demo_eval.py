"""Measures the demo model on held-out text: loss by domain, the load of every expert, and how domains differ in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from demo_chat import ASSISTANT, USER
from demo_data import EOT, Corpus, heldout_windows
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

LENGTH = 256


@dataclass(frozen=True, slots=True)
class DomainResult:
    """Held-out measurements of one domain."""

    name: str
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float
    load: npt.NDArray[np.float64]
    """Share of a layer's assignments that each expert gets [L, E]; rows sum to 1."""
    halves: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
    """The same of the even and the odd windows: what differs between them is sampling noise."""


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, num_rows: int = 40
) -> DomainResult:
    """Run up to `num_rows` windows of 256 tokens of the domain's held-out text; of conversations the answers count."""
    rows = heldout_windows(corpus, num_rows, LENGTH)
    windows = torch.from_numpy(rows).to(model.device)
    nats, num_bytes, num_tokens = 0.0, 0, 0
    nbytes = token_nbytes(tokenizer)
    counts = np.zeros((2, model.config.num_hidden_layers, model.config.num_experts))
    for number, window in enumerate(windows):
        with torch.no_grad(), recorded_choices(model) as choices:
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        counted = corpus.counted(rows[number])[1:]
        losses = F.cross_entropy(logits, window[1:], reduction="none").cpu().numpy()
        nats += float(losses[counted].sum())
        num_bytes += int(nbytes[rows[number][1:][counted]].sum())
        num_tokens += int(counted.sum())
        for layer, chosen in enumerate(choices):
            counts[number % 2, layer] += np.bincount(chosen.flatten().cpu().numpy(), minlength=counts.shape[2])
    even, odd = (half / half.sum(axis=1, keepdims=True) for half in counts)
    load = counts.sum(axis=0) / counts.sum(axis=(0, 2))[:, None]
    bits_per_byte = nats / num_bytes / float(np.log(2))
    return DomainResult(corpus.domain.name, num_tokens, nats / num_tokens, bits_per_byte, load, (even, odd))


def token_nbytes(tokenizer: PreTrainedTokenizerFast) -> npt.NDArray[np.int64]:
    """Bytes of text that each token stands for: in byte-level BPE the characters of its name; of special ones none."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.array([0 if name in (EOT, USER, ASSISTANT) else len(name) for name in names])


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, each forward pass appends every layer's chosen experts [T, K], in the order of the layers."""
    choices: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        choices.append(output[2])

    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(record) for gate in gates]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


def jensen_shannon(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Jensen-Shannon divergence in bits over the last axis (Lin, 1991): 0 = equal, 1 = no expert in common."""
    middle = (left + right) / 2
    return (_kullback_leibler(left, middle) + _kullback_leibler(right, middle)) / 2


def _kullback_leibler(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    ratio = np.where(left > 0, left / np.where(right > 0, right, 1.0), 1.0)
    result: npt.NDArray[np.float64] = (left * np.log2(ratio)).sum(axis=-1)
    return result


def divergences(results: list[DomainResult]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Per layer [L]: mean divergence between pairs of domains, and between two halves of the same domain."""
    pairs = [jensen_shannon(a.load, b.load) for i, a in enumerate(results) for b in results[:i]]
    noise = [jensen_shannon(*result.halves) for result in results]
    return np.mean(pairs, axis=0), np.mean(noise, axis=0)

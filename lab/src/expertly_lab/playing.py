"""Feeds a loaded model recorded requests, token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from expertly.model.playing import Choose, Played, forward, greedy


def feed(model: Any, tokens: Sequence[int], num_prompt: int) -> Played:
    """Run a prompt of `num_prompt` tokens in one pass, and each further token in its own."""
    times = [time.perf_counter()]
    cache = None
    with torch.no_grad():
        for ids in (tokens[:num_prompt], *([token] for token in tokens[num_prompt:])):
            logits, cache = forward(model, torch.tensor([list(ids)]), cache)
            logits[0].argmax().item()  # as who generates would look at it: an accelerator is done by then
            times.append(time.perf_counter())
    return Played.between(times)


def chooser(temperature: float, seed: int) -> Choose:
    """Samples at a temperature with its own generator; greedy at temperature 0."""
    if temperature == 0:
        return greedy
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        shares = torch.softmax(logits.float().cpu() / temperature, -1)
        return int(torch.multinomial(shares, 1, generator=generator))

    return choose

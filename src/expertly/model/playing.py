"""Runs requests through a loaded model token by token, and times them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from expertly.model.hooks import CACHE

Choose = Callable[[torch.Tensor], int]
"""Chooses a token by its logits [V]."""


@dataclass(frozen=True, slots=True)
class Played:
    ttft_s: float
    steps_s: tuple[float, ...]

    @classmethod
    def between(cls, times: Sequence[float]) -> Played:
        """Of when it began, when it had its first token, and each later one."""
        spent = [end - begin for begin, end in pairwise(times)]
        return cls(spent[0], tuple(spent[1:]))

    @property
    def seconds(self) -> float:
        return self.ttft_s + sum(self.steps_s)

    @property
    def tpot_s(self) -> float | None:
        """The mean of its steps; None where the answer was a single token."""
        return sum(self.steps_s) / len(self.steps_s) if self.steps_s else None


def greedy(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def answer(
    model: Any, prompt: Sequence[int], max_new_tokens: int, choose: Choose = greedy
) -> tuple[tuple[int, ...], Played]:
    """Let the model answer a prompt until it ends or has written `max_new_tokens`. Returns the answer's tokens, the
    last of which is not fed, and their times.
    """
    stops = model.generation_config.eos_token_id
    ends = stops if isinstance(stops, list) else [stops]
    ids, cache = torch.tensor([list(prompt)]), None
    tokens, times = list[int](), [time.perf_counter()]
    with torch.no_grad():
        while len(tokens) < max_new_tokens and (not tokens or tokens[-1] not in ends):
            logits, cache = forward(model, ids, cache)
            tokens.append(choose(logits[0]))
            times.append(time.perf_counter())
            ids = torch.tensor([tokens[-1:]])
    return tuple(tokens), Played.between(times)


def forward(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """The logits [requests, V] after the last of the `ids` [requests, T], and the KV cache with these tokens."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out = model(ids.to(model.device), **{CACHE: cache}, use_cache=True, **last)
    return out.logits[:, -1], getattr(out, CACHE)

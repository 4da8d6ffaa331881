"""A request on a loaded model, one token after the other: written by it, or fed to it as it was recorded."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Played:
    """What a request took."""

    ttft_s: float
    steps_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From its begin to its last token."""
        return self.ttft_s + sum(self.steps_s)

    @property
    def tpot_s(self) -> float:
        return sum(self.steps_s) / len(self.steps_s)


def write(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[torch.Tensor], int],
    ends: Collection[int],
    may_go_on: Callable[[int], bool],
) -> int:
    """Let the model answer; `choose` takes a token by its logits [V], `may_go_on` is asked with the tokens so far.
    Returns how many it wrote.
    """
    ids, cache, num = torch.tensor([list(prompt)]), None, 0
    with torch.no_grad():
        while True:
            logits, cache = _forward(model, ids, cache)
            token = choose(logits)
            num += 1
            if token in ends or num >= max_new_tokens or not may_go_on(num):
                return num
            ids = torch.tensor([[token]])


def feed(model: Any, tokens: Sequence[int], num_prompt: int) -> Played:
    """Run a prompt of `num_prompt` tokens in one pass, and each further token in one of its own."""
    times = [time.perf_counter()]
    with torch.no_grad():
        logits, cache = _forward(model, torch.tensor([list(tokens[:num_prompt])]), None)
        logits.argmax().item()  # as who generates would look at it: an accelerator is done by then
        times.append(time.perf_counter())
        for token in tokens[num_prompt:]:
            logits, cache = _forward(model, torch.tensor([[token]]), cache)
            logits.argmax().item()
            times.append(time.perf_counter())
    spent = [end - begin for begin, end in pairwise(times)]
    return Played(spent[0], tuple(spent[1:]))


def _forward(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Logits [V] of the last token, and the cache."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out = model(ids.to(model.device), past_key_values=cache, use_cache=True, **last)
    return out.logits[0, -1], out.past_key_values

"""A request on a loaded model, one token after the other: answered by it, or fed to it as it was recorded."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

Choose = Callable[[torch.Tensor], int]
"""A token by its logits [V]."""


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
    def tpot_s(self) -> float | None:
        """Mean of the steps; None where the answer was a single token, which nothing follows."""
        return sum(self.steps_s) / len(self.steps_s) if self.steps_s else None


def answer(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Choose,
    may_go_on: Callable[[int], bool] = lambda num: True,
) -> None:
    """Let the model answer until it ends, has written so many tokens, or `may_go_on`, asked with their number, says no.
    The last token is not fed.
    """
    found = model.generation_config.eos_token_id
    ends = found if isinstance(found, list) else [found]
    ids, cache, num = torch.tensor([list(prompt)]), None, 0
    with torch.no_grad():
        while True:
            logits, cache = forward(model, ids, cache)
            token = choose(logits[0])
            num += 1
            if token in ends or num >= max_new_tokens or not may_go_on(num):
                return
            ids = torch.tensor([[token]])


def feed(model: Any, tokens: Sequence[int], num_prompt: int) -> Played:
    """Run a prompt of `num_prompt` tokens in one pass, and each further token in one of its own."""
    times = [time.perf_counter()]
    cache = None
    with torch.no_grad():
        for ids in (tokens[:num_prompt], *([token] for token in tokens[num_prompt:])):
            logits, cache = forward(model, torch.tensor([list(ids)]), cache)
            logits[0].argmax().item()  # as who generates would look at it: an accelerator is done by then
            times.append(time.perf_counter())
    spent = [end - begin for begin, end in pairwise(times)]
    return Played(spent[0], tuple(spent[1:]))


def forward(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Logits [requests, V] behind the last of the `ids` [requests, T], and the KV cache with them."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out = model(ids.to(model.device), past_key_values=cache, use_cache=True, **last)
    return out.logits[:, -1], out.past_key_values


def chooser(temperature: float, seed: int) -> Choose:
    """By chance, with a generator of its own; greedy where the temperature is 0."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        if temperature == 0:
            return int(logits.argmax())
        shares = torch.softmax(logits.float().cpu() / temperature, -1)
        return int(torch.multinomial(shares, 1, generator=generator))

    return choose


def max_positions(model: Any) -> int | None:
    """Tokens that it can hold, where it says so."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) else None

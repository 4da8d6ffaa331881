"""Requests through a loaded model, token by token, and what they took."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import expertly
from expertly.control.counters import PhaseCounters

PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """The tokens that every system is fed: those of a prompt, then those of the answer one by one."""

    number: int
    ids: list[int]
    num_prompt: int


def play(model: Any, request: PlayedRequest) -> dict[str, Any]:
    """Feed a request. Times in seconds: to the choice of the first token, of each step after it, of all; and the
    counters of the experts meanwhile, by phase.
    """
    before = {phase: _counts(model, phase) for phase in PHASES}
    with torch.no_grad():
        start = time.perf_counter()
        logits, cache = forward(model, request.ids[: request.num_prompt], None)
        int(logits.argmax(-1))
        first = time.perf_counter()
        steps, begin = [], first
        for token in request.ids[request.num_prompt :]:
            logits, cache = forward(model, [token], cache)
            int(logits.argmax(-1))
            now = time.perf_counter()
            steps.append(now - begin)
            begin = now
    counts = {phase: _counts(model, phase) for phase in PHASES}
    changed = {phase: {name: counts[phase][name] - before[phase][name] for name in counts[phase]} for phase in PHASES}
    tpot_s = sum(steps) / len(steps) if steps else None
    times = {"ttft_s": first - start, "tpot_s": tpot_s, "latency_s": begin - start, "num_steps": len(steps)}
    return {"request": request.number, **times, **changed}


def answer(
    model: Any, prompt: Sequence[int], num_tokens: int, choose: Callable[[torch.Tensor], int], end_ids: set[int]
) -> int:
    """Let the model answer with up to so many tokens; how many it fed to itself, which is one less than it chose."""
    with torch.no_grad():
        logits, cache = forward(model, prompt, None)
        for num_fed in range(num_tokens - 1):
            token = choose(logits)
            if token in end_ids:
                return num_fed
            logits, cache = forward(model, [token], cache)
    return num_tokens - 1


def forward(model: Any, ids: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
    """Logits [vocabulary] behind the last of the tokens, and the KV cache with them."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    tokens = torch.tensor([list(ids)], device=model.device)
    out = model(tokens, past_key_values=cache, use_cache=True, **last)
    return out.logits[0, -1], out.past_key_values


def chooser(temperature: float, seed: int) -> Callable[[torch.Tensor], int]:
    """Greedy, or by chance with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        if temperature == 0:
            return int(logits.argmax(-1))
        shares = torch.softmax(logits.float().cpu() / temperature, -1)
        return int(torch.multinomial(shares, 1, generator=generator))

    return choose


def rates_of(counts: dict[str, int]) -> dict[str, float | None]:
    """The shares of docs/conventions.md, of counters that `play` gave, or of sums of such."""
    counters = PhaseCounters()
    for name, value in counts.items():
        setattr(counters, name, value)
    return counters.rates()


def _counts(model: Any, phase: str) -> dict[str, int]:
    counters = asdict(expertly.stats(model).phase(phase))
    return {name: value for name, value in counters.items() if isinstance(value, int)}

"""Requests through a loaded model, token by token: what they took, and what the experts did meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import expertly
from expertly.lab.playing import feed
from expertly.scheduler.counters import PhaseCounters

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
    played = feed(model, request.ids, request.num_prompt)
    counts = {phase: _counts(model, phase) for phase in PHASES}
    changed = {phase: {name: counts[phase][name] - before[phase][name] for name in counts[phase]} for phase in PHASES}
    times = {"ttft_s": played.ttft_s, "tpot_s": played.tpot_s, "latency_s": played.seconds}
    return {"request": request.number, **times, "num_steps": len(played.steps_s), **changed}


def rates_of(counts: dict[str, int]) -> dict[str, float | None]:
    """The shares of docs/conventions.md, of counters that `play` gave, or of sums of such."""
    counters = PhaseCounters()
    for name, value in counts.items():
        setattr(counters, name, value)
    return counters.rates()


def _counts(model: Any, phase: str) -> dict[str, int]:
    counters = asdict(expertly.stats(model).phase(phase))
    return {name: value for name, value in counters.items() if isinstance(value, int)}

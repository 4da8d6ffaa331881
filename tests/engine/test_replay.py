"""What a real engine decided, a new control plane decides again, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.model.hooks import experts_modules
from expertly.scheduler.decisions import replay_file
from expertly.scheduler.presets import SYSTEMS, runnable_systems
from tests.engine.conftest import Cases
from tests.families import HIDDEN_SIZE, NUM_EXPERTS, VOCAB_SIZE


def generate(model: Any, num_iterations: int) -> None:
    """Requests of 25 iterations one after the other: prefill of 12 random tokens, then random tokens one by one."""
    generator = torch.Generator().manual_seed(0)
    cache = None
    with torch.no_grad():
        for step in range(num_iterations):
            cache = cache if step % 25 else None
            ids = torch.randint(4, VOCAB_SIZE, (1, 12 if cache is None else 1), generator=generator)
            cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values


def feed(model: Any, num_iterations: int) -> None:
    """The same to the experts alone, with random choices: all that the control plane sees of a model."""
    engine, modules = handle(model).engine, experts_modules(model)
    generator = torch.Generator().manual_seed(0)
    for step in range(num_iterations):
        num_tokens = 1 if step % 25 else 12
        hidden = torch.zeros(num_tokens, HIDDEN_SIZE)
        for layer, module in enumerate(modules):
            chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2).indices
            engine.forward_experts(module, layer, hidden, chosen, torch.full((num_tokens, 2), 0.5))


ALL = [*((name, 1) for name in runnable_systems()), ("lru", 4)]
CASES = [
    *((*one, feed, 500) for one in ALL),
    *((*one, generate, 75) for one in ALL if SYSTEMS[one[0]].prediction != "none"),
]


@pytest.mark.parametrize(("system", "segments", "run", "num_iterations"), CASES)
def test_what_an_engine_decided_is_decided_again(
    system: str, segments: int, run: Callable[[Any, int], None], num_iterations: int, cases: Cases, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    memory = "100%" if SYSTEMS[system].keeps_everything else "50%"
    model, _ = expertly.load(
        str(cases["mixtral"].store), memory=memory, system=system, segments=segments, decisions=path, device="cpu"
    )
    run(model, num_iterations)
    expertly.unload(model)
    header, replayed = replay_file(path)
    assert replayed.difference is None
    assert (header["system"], header["segments"]) == (system, segments)
    assert replayed.num_layers == num_iterations * 3
    if not SYSTEMS[system].keeps_everything:
        assert replayed.num_calls > num_iterations * 3 * 4, "there were loads"

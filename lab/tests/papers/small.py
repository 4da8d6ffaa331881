"""A small full trace, and routing as it is imported."""

from __future__ import annotations

from pathlib import Path

from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer
from lab.tests.sim.drive import make_trace, random_passes, sized

LAYERS = sized(8, 16, 2)
REQUESTS, PASSES, PROMPT = 24, 16, 6


def full_trace(folder: Path) -> Trace:
    """Prompts of two categories, with all that `trace record --full` records, but for 8 layers of lookahead."""
    passes = []
    for number in range(REQUESTS):
        mine = random_passes(number, LAYERS, PASSES, prompt=PROMPT)
        passes += [(number, is_prefill, rows) for _, is_prefill, rows in mine]
    categories = ["odd" if number % 2 else "even" for number in range(REQUESTS)]
    return make_trace(
        folder, passes, LAYERS, num_requests=REQUESTS, categories=categories, is_full=True, rows_per_shard=4096
    )


def imported_trace(folder: Path) -> Trace:
    """Decode alone, and sizes known."""
    layers = [TraceLayer.of(layer) for layer in LAYERS]
    passes = random_passes(0, layers, 160, num_requests=12)
    return make_trace(folder, passes, layers, num_requests=12, rows_per_shard=4096)

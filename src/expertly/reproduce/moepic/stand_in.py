"""Routing made up for Mixtral-8x7B, of which none is at hand: nearly even, with a modelled lookahead."""

from __future__ import annotations

from pathlib import Path

from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.lab.synth import write_workload, zipf
from expertly.reproduce.subject import Subject
from expertly.trace.reader import Trace

NAME = "mixtral, made up"
LAYERS, EXPERTS, TOP_K = 32, 8, 2
REQUESTS, TOKENS, PROMPT = 100, 12800, 64
SIMULATED = 192
ZIPF, KEEP, LOOKAHEAD = 0.2, 0.15, 0.905
"""16 % the most popular expert (12.5 would be even); consecutive tokens share one in 62 % of all cases (Jiang et al.,
2024, table 5, has 62 to 67 % in the middle of the model); lookahead as right as ProMoE, section 4, has it.
"""
SIZES = LayerGeometry(EXPERTS, TOP_K, 4096, 1792, 3, 2)
"""2 bits a weight, said as an eighth of the neurons at 2 bytes: as the paper serves it (section 4.1)."""
DENSE = DenseShape(layer_nbytes=21_053_440, head_nbytes=262_160_384)


def mixtral(folder: Path, seed: int) -> Subject:
    """Made in `folder`, which must be new."""
    workload = zipf(LAYERS, EXPERTS, TOP_K, TOKENS, exponent=ZIPF, keep=KEEP, seed=seed)
    write_workload(
        folder,
        workload,
        model="mixtral-8x7b",
        num_requests=REQUESTS,
        prefill_tokens=PROMPT,
        lookahead=LOOKAHEAD,
        seed=seed,
        created="",
        command="",
    )
    sizes = f"Mixtral-8x7B's sizes at 2 bits, lookahead modelled ({LOOKAHEAD:.1%})"
    return Subject(NAME, Trace.open(folder), (SIZES,) * LAYERS, DENSE, sizes, None, None, SIMULATED)

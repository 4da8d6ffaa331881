"""Weights of a learned predictor for any model, made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expertly.core.geometry import ModelShape
from expertly.policies.learned import save_learned
from expertly.policies.promoe import LearnedWeights, Mlp, pairs
from expertly.store.cache import learned_beside
from expertly.store.manifest import Manifest


def random_weights(
    layers: Sequence[Any], hidden_size: int = 16, width: int = 8, seed: int = 0, starts: tuple[int, ...] | None = None
) -> LearnedWeights:
    """For every distance. `hidden_size`: numbers of a router input; `starts`: first layers of stacks, 0 unless said."""
    dice = np.random.default_rng(seed)
    starts = starts or (0,) * len(layers)
    distances = tuple(range(1, max(2, len(layers))))

    def numbers(*shape: int) -> np.ndarray:
        return dice.standard_normal(shape) / np.sqrt(shape[-1])

    mlps = {}
    for distance in distances:
        for source, target in pairs(starts, distance):
            num_experts = layers[target].num_experts
            arrays = (
                numbers(hidden_size),
                np.ones(hidden_size),
                numbers(width, hidden_size),
                numbers(width),
                3 * numbers(num_experts, width),
                numbers(num_experts, hidden_size),
                numbers(num_experts),
            )
            mlps[source, target] = Mlp(*(array.astype(np.float16) for array in arrays))
    num_experts, top_k = (tuple(getattr(layer, name) for layer in layers) for name in ("num_experts", "top_k"))
    return LearnedWeights(ModelShape(num_experts, top_k), starts, distances, mlps)


def put_beside(store: Path, hidden_size: int) -> Path:
    """Save weights where a packed store's model looks for them."""
    manifest = Manifest.read(store)
    path = learned_beside(store, "predictor")
    save_learned(path, random_weights(manifest.layers, hidden_size), manifest.identity, {"model": "made up"})
    return path

"""Whether numbers that were read can be those of a map store. Shapes: see `maps.file.DTYPES`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import NONE

_ROUNDING = 0.02
"""How far above 1 probabilities may be, one or all of a layer, and how far from 1 an embedding's length."""


def check_state(path: Path, shape: ModelShape, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raises StoreError naming the file, the tensor, the map and what is wrong with it."""
    for layer, num_experts in enumerate(shape.num_experts):
        _check_probabilities(path, layer, num_experts, arrays["maps"][layer])
        _check_chosen(path, layer, num_experts, shape.top_k[layer], arrays["chosen"][:, layer])
    born = arrays["born"]
    if len(np.unique(born)) != len(born) or (len(born) and born.min() < 0):
        raise StoreError(f"{path}: tensor 'born': must count the maps: from 0, none twice")
    if "embeddings" in arrays:
        _check_embeddings(path, arrays["embeddings"])


def _check_probabilities(path: Path, layer: int, num_experts: int, maps: npt.NDArray[np.floating[Any]]) -> None:
    """[C, E]"""
    is_wrong = ~((maps >= 0) & (maps <= 1 + _ROUNDING))  # NaN, too
    is_wrong[:, num_experts:] |= maps[:, num_experts:] != 0
    if is_wrong.any():
        slot, expert = np.unravel_index(int(np.argmax(is_wrong)), is_wrong.shape)
        accepted = "a probability, from 0 to 1" if expert < num_experts else f"0: there are {num_experts} experts"
        where = f"map {slot}, layer {layer}, expert {expert}"
        raise StoreError(f"{path}: tensor 'maps': {where}: {maps[slot, expert]}; must be {accepted}")
    sums = maps.sum(axis=1, dtype=np.float32)
    if len(sums) and sums.max() > 1 + _ROUNDING:
        highest = int(np.argmax(sums))
        where = f"map {highest}, layer {layer}"
        raise StoreError(f"{path}: tensor 'maps': {where}: probabilities sum to {sums[highest]:.3f}; must be at most 1")


def _check_chosen(path: Path, layer: int, num_experts: int, top_k: int, chosen: npt.NDArray[np.uint16]) -> None:
    """[C, K]"""
    rising = np.sort(chosen, axis=1)
    is_twice = (rising[:, 1:] == rising[:, :-1]) & (rising[:, 1:] != NONE)
    is_wrong = ((chosen >= num_experts) & (chosen != NONE)).any(axis=1) | is_twice.any(axis=1)
    is_wrong |= (chosen != NONE).sum(axis=1) > top_k
    if is_wrong.any():
        slot = int(np.argmax(is_wrong))
        found = f"map {slot}, layer {layer}: {chosen[slot].tolist()!s:.80}"
        raise StoreError(
            f"{path}: tensor 'chosen': {found}; must be at most {top_k} of {num_experts} experts, none twice, and "
            f"{NONE} for none"
        )


def _check_embeddings(path: Path, embeddings: npt.NDArray[np.floating[Any]]) -> None:
    """[C, H]"""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt(np.square(embeddings, dtype=np.float32).sum(axis=1))
    is_wrong = ~((lengths == 0) | (abs(lengths - 1) <= _ROUNDING))
    if is_wrong.any():
        slot = int(np.argmax(is_wrong))
        found = f"map {slot}: of length {lengths[slot]:.3f}"
        raise StoreError(f"{path}: tensor 'embeddings': {found}; must be of length 1, or 0 for none")

"""Routing scores as predictors see them: at least 0 and 1 in all over the experts of a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_TOLERANCE = 0.01
"""Scores that were normalised before they were rounded to 16 bits are no farther from 1 in all."""


def scores_of_choices(experts: npt.NDArray[Any], weights: npt.NDArray[Any], num_experts: int) -> Floats:
    """[..., E] of chosen experts and their weights [..., K], where nothing is known of the others: they have 0.

    An id outside 0..E-1 is no choice. Where all weights are 0 the chosen ones share equally; without any, all have 0.
    """
    is_choice = (experts >= 0) & (experts < num_experts)
    known = np.maximum(weights, 0).astype(np.float32)
    known[~is_choice] = 0
    total = known.sum(-1, keepdims=True)
    if not total.all():
        known = np.where(total > 0, known, is_choice.astype(np.float32))
        total = known.sum(-1, keepdims=True)
        total[total == 0] = 1
    top_k = experts.shape[-1]
    places = np.where(is_choice, experts, num_experts).reshape(-1, top_k).astype(np.intp)
    places += (np.arange(len(places)) * (num_experts + 1))[:, None]  # one more place a row, for what is no choice
    scores = np.zeros(len(places) * (num_experts + 1), np.float32)
    scores[places.reshape(-1)] = (known / total).reshape(-1)
    scores = scores.reshape(*experts.shape[:-1], num_experts + 1)
    scores[..., num_experts] = 0
    return np.ascontiguousarray(scores[..., :num_experts])


def normalised_scores(recorded: npt.NDArray[Any]) -> Floats:
    """[..., E] of scores that should be normalised: rows that are, to 16 bits, stay as they are; all 0 stays, too."""
    scores = recorded.astype(np.float32)
    total = scores.sum(-1)
    if (np.abs(total - 1) > _TOLERANCE).any() or scores.min(initial=0) < 0:
        scores = np.maximum(scores, 0)
        total = scores.sum(-1)
        is_off = (np.abs(total - 1) > _TOLERANCE) & (total > 0)
        scores[is_off] /= total[is_off][..., None]
    return scores

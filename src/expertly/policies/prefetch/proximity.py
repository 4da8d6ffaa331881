"""The surer and the nearer, the sooner (fMoE, section 4.5)."""

from __future__ import annotations


def by_proximity(score: float, layers_to_go: int) -> float:
    """p / (l - l_now), for scores that are probabilities."""
    return score / layers_to_go

"""Evicts the highest 1 / (p * freq) first (fMoE, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence

from expertly.policies.eviction.base import ScoredPolicy

LEAST = 1e-6
"""The least p, and the p of layers without a map, where frequency alone decides."""


class FMoEEviction(ScoredPolicy):
    """p is the expert's probability in the newest map found for its layer. The frequency starts at 1, counts the tokens
    served since the start, whether the expert was kept or not, and persists after eviction.
    """

    name = "fmoe"
    needs_probabilities = True

    def __init__(self) -> None:
        super().__init__()
        self._frequency: dict[int, int] = {}
        self._probabilities: dict[int, Sequence[float]] = {}  # by the first expert of a layer
        self._first: dict[int, int] = {}  # expert -> first expert of its layer, where that has a map
        self._kept_of: dict[int, dict[int, None]] = {}  # first expert of a layer -> its kept experts

    def admitted(self, expert: int) -> None:
        super().admitted(expert)
        if expert in self._first:
            self._kept_of[self._first[expert]][expert] = None

    def removed(self, expert: int) -> None:
        super().removed(expert)
        if expert in self._first:
            del self._kept_of[self._first[expert]][expert]

    def predicted(self, first_expert: int, probabilities: Sequence[float]) -> None:
        if first_expert not in self._probabilities:
            experts = range(first_expert, first_expert + len(probabilities))
            self._first.update(dict.fromkeys(experts, first_expert))
            self._kept_of[first_expert] = {expert: None for expert in experts if expert in self._kept}
        self._probabilities[first_expert] = probabilities
        frequency, scores = self._frequency, {}
        for expert in self._kept_of[first_expert]:
            probability = probabilities[expert - first_expert]
            scores[expert] = (probability if probability > LEAST else LEAST) * frequency.get(expert, 1)
        self._enter(scores)

    def used(self, experts: Sequence[int], num_tokens: Sequence[int], batch_tokens: int) -> None:
        frequency = self._frequency
        for expert, num in zip(experts, num_tokens, strict=True):
            if num:
                frequency[expert] = frequency.get(expert, 1) + num
        self.rescore(experts)

    def score(self, expert: int) -> float:
        first = self._first.get(expert)
        probability = LEAST if first is None else max(self._probabilities[first][expert - first], LEAST)
        return probability * self._frequency.get(expert, 1)

"""A ReuseModel written down as it is explained (docs/systems/expertly.md), in float64 and step by step."""

from __future__ import annotations

import numpy as np

from expertly.core.messages import RouterRan
from expertly.policies.eviction.reuse import BATCH, DISCOUNT, HORIZON, MEAN_RATE, OWN_WEIGHT, RATE, REACH


class Reference:
    """Layers of the same number of experts."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.recent = np.zeros((num_layers, num_experts))
        self.mean = np.zeros((num_layers, num_experts))
        self.seen = [range(max(0, layer - REACH), min(num_layers, layer + REACH + 1)) for layer in range(num_layers)]
        self.weights = [np.zeros((num_experts, len(seen), num_experts)) for seen in self.seen]
        for layer, (weights, seen) in enumerate(zip(self.weights, self.seen, strict=True)):
            for expert in range(num_experts):
                weights[expert, seen.index(layer), expert] = OWN_WEIGHT
        self.base = np.zeros((num_layers, num_experts))
        self.steps: list[list[tuple[np.ndarray, np.ndarray, set[int]]]] = [[] for _ in range(num_layers)]
        self.tokens = [0] * num_layers

    def observe(self, router: RouterRan) -> np.ndarray:
        """The value of each expert of the layer."""
        layer, num = router.layer, router.batch_tokens
        left = np.exp(-num / 2)
        share = np.zeros(self.recent.shape[1])
        for expert, tokens in zip(router.experts, router.num_tokens, strict=True):
            share[expert] = tokens / num
        self.recent[layer] = left * self.recent[layer] + (1 - left) * share
        if not router.serves_decode:
            self.steps[layer].clear()
            self._follow(layer, self.recent[layer], num)
        inputs = self.recent[list(self.seen[layer])].copy()
        values = np.einsum("elf,lf->e", self.weights[layer], inputs) + self.base[layer]
        used = {e for e, tokens in zip(router.experts, router.num_tokens, strict=True) if tokens}
        self.steps[layer].append((inputs, values, used))
        self.tokens[layer] += num
        if len(self.steps[layer]) == BATCH + HORIZON:
            self._learn(layer)
        return values

    def _learn(self, layer: int) -> None:
        steps, change = self.steps[layer], np.zeros_like(self.weights[layer])
        for now in range(BATCH):
            inputs, values, _ = steps[now]
            centred = inputs - self.mean[list(self.seen[layer])]
            known = 1 - DISCOUNT**HORIZON
            for expert in range(len(values)):
                later = [DISCOUNT ** (k - 1) for k in range(1, HORIZON + 1) if expert in steps[now + k][2]]
                error = sum(later) / known - values[expert]
                change[expert] += RATE * error * centred / (1e-3 + (centred**2).sum())
        self.weights[layer] += change
        own = self.seen[layer].index(layer)
        self._follow(layer, np.mean([steps[now][0][own] for now in range(BATCH)], axis=0), BATCH)
        del steps[:BATCH]

    def _follow(self, layer: int, recent: np.ndarray, num: int) -> None:
        rate = max(1 - (1 - MEAN_RATE) ** num, num / max(num, self.tokens[layer]))
        self.mean[layer] += rate * (recent - self.mean[layer])
        mean = self.mean[list(self.seen[layer])]
        at_mean = np.einsum("elf,lf->e", self.weights[layer], mean)
        self.base[layer] = self.mean[layer] / (1 - DISCOUNT) - at_mean

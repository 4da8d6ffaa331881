"""Routing whose best hits are known: what Belady's replacement hits without prefetch in a cache of C experts a layer,
of which all K that a token demands must be there at once. Hits count (layer, token, expert) demands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertly_lab.synth import SynthWorkload


def loop(num_layers: int, num_experts: int, top_k: int, num_tokens: int) -> SynthWorkload:
    """Over all experts, K a token, the same in every layer; K divides E."""
    experts = np.arange(num_tokens)[:, None] * top_k + np.arange(top_k)
    return _same_in_layers(experts % num_experts, num_layers, num_experts)


def most_hits_of_loop(workload: SynthWorkload, capacity: int) -> int:
    """The loop is over n = E/K groups. With room for c = C/K of them (C < E, K divides C), LRU never hits. Belady's
    first n tokens miss; from then on it hits c - 1 groups in every n - 1, those first. So with T tokens it hits
    K (q (c - 1) + min(r, c - 1)) demands a layer, where T - n = q (n - 1) + r. With C >= E all but the first n hit.
    """
    top_k, num_groups = workload.top_k, workload.num_experts // workload.top_k
    kept = min(capacity, workload.num_experts) // top_k
    after_first = max(workload.num_tokens - num_groups, 0)
    if num_groups == 1:
        return workload.num_layers * top_k * after_first
    rounds, rest = divmod(after_first, num_groups - 1)
    return workload.num_layers * top_k * (rounds * (kept - 1) + min(rest, kept - 1))


def working_set(num_layers: int, num_experts: int, top_k: int, num_tokens: int, size: int) -> SynthWorkload:
    """Choices among the first `size` experts, all of which are met as soon as they can be: with room for them every
    cache that loads on demand has cold misses only, min(size, T K) a layer.
    """
    dice = np.random.default_rng(1)
    experts = np.stack([dice.permutation(size)[:top_k] for _ in range(num_tokens)])
    tour = np.arange(min(num_tokens, -(-size // top_k)))[:, None] * top_k + np.arange(top_k)
    experts[: len(tour)] = tour % size
    return _same_in_layers(experts, num_layers, num_experts)


def _same_in_layers(experts: npt.NDArray[np.int64], num_layers: int, num_experts: int) -> SynthWorkload:
    block = np.repeat(experts[:, None, :], num_layers, axis=1).astype(np.uint16)  # [T, K] -> [T, L, K]
    return SynthWorkload(num_layers, num_experts, experts.shape[1], len(experts), lambda: iter([block]))

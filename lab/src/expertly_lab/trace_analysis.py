"""The entropy of routing, over blocks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly_lab.trace.schema import NO_EXPERT

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def entropy(distributions: Array) -> Floats:
    """Bits of each distribution over the last axis, which need not add up to one; 0 where there is nothing in it."""
    total = distributions.sum(-1, keepdims=True, dtype=np.float64)
    shares = np.divide(distributions, total, out=np.zeros(distributions.shape), where=total > 0)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    bits: Floats = -(shares * logs).sum(-1) + 0.0  # no -0.0
    return bits


@dataclass(slots=True)
class _Running:
    """The routing of a request so far."""

    num_rows: int
    total: Floats  # [L, E]


class EntropyMeter:
    """Adds up entropies over blocks of rows. Its memory is of the requests that are under way.

    Token level (fMoE, section 2.4: fine-grained, at the level of an iteration): the entropy of one token's routing,
    mean over tokens; of all experts' probabilities where they were recorded, else of the chosen experts' weights
    divided by their sum, for which log2 K is the most. Request level (same place: coarse-grained): the entropy of the
    sum of these distributions over a request's tokens, mean over requests. Growth: the same of its first 1, 2, 4,
    8, ... tokens, mean over the requests that are that long.
    """

    def __init__(self, num_layers: int, num_experts: int, request_rows: list[int]) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.request_rows = request_rows  # of each request
        self.token_bits, self.num_tokens = np.zeros(num_layers), np.zeros(num_layers)  # sums over tokens that ran it
        self.request_bits, self.num_requests = np.zeros(num_layers), np.zeros(num_layers)
        self.growth_bits: dict[int, Floats] = {}  # by number of tokens
        self.growth_requests: dict[int, Floats] = {}
        self._running: dict[int, _Running] = {}

    def add(self, request: Array, experts: Array, weights: Array, probs: Array | None) -> None:
        """Rows in stream order: `request` [T], `experts` and `weights` [T, L, K], `probs` [T, L, E]."""
        has_run = experts != NO_EXPERT
        chosen = np.where(has_run, np.maximum(weights.astype(np.float32), 0), 0)
        shares = chosen if probs is None else np.maximum(probs.astype(np.float32), 0)
        total = shares.sum(-1, keepdims=True)
        shares = np.divide(shares, total, out=shares, where=total > 0)
        self.token_bits += entropy(shares).sum(0)
        self.num_tokens += has_run.any(-1).sum(0)
        order = np.argsort(request, kind="stable")
        cuts = np.flatnonzero(np.diff(request[order], prepend=-1))
        for rows in np.split(order, cuts[1:]):
            self._add_request(int(request[rows[0]]), experts, shares, rows, probs is not None)

    def _add_request(self, number: int, experts: Array, shares: Array, rows: Array, is_full: bool) -> None:
        running = self._running.setdefault(number, _Running(0, np.zeros((self.num_layers, self.num_experts))))
        done = 0
        while done < len(rows):
            mark = 1 << running.num_rows.bit_length()  # the next power of two
            part = rows[done : done + mark - running.num_rows]
            running.total += shares[part].sum(0) if is_full else self._spread(experts[part], shares[part])
            running.num_rows += len(part)
            done += len(part)
            if running.num_rows == mark:
                bits = self.growth_bits.setdefault(mark, np.zeros(self.num_layers))
                _add_entropy(running.total, bits, self.growth_requests.setdefault(mark, np.zeros(self.num_layers)))
        if running.num_rows == self.request_rows[number]:
            _add_entropy(running.total, self.request_bits, self.num_requests)
            del self._running[number]

    def _spread(self, experts: Array, shares: Array) -> Floats:
        """Sum of chosen experts' shares over tokens, [L, E]."""
        offsets = np.arange(self.num_layers, dtype=np.int64)[:, None] * self.num_experts
        is_chosen = experts != NO_EXPERT
        keys = (experts + offsets)[is_chosen]
        size = self.num_layers * self.num_experts
        total: Floats = np.bincount(keys, shares[is_chosen], size).astype(np.float64, copy=False)
        return total.reshape(self.num_layers, self.num_experts)


def _add_entropy(total: Floats, bits: Floats, count: Floats) -> None:
    bits += entropy(total)
    count += total.sum(-1) > 0

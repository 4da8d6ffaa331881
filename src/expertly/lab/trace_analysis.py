"""What a trace says about its model's routing: entropy, reuse, popularity; in one pass by blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT, max_experts, max_top_k

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


Ints = npt.NDArray[np.int64]


class ReuseMeter:
    """Histograms of reuse distances, per layer; memory does not depend on the number of tokens.

    The reuse distance of a demand (layer, token, expert) is the number of tokens since the last one that chose the
    expert in that layer, 1 if it was the token before, in the order of the stream and across requests (locality as
    MoE-Infinity and ProMoE argue with it). The first demand of an expert has none.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        # The largest distance of each bin: exact at first, then 16 bins an octave; every power of two is one.
        self.edges: Ints = np.unique(np.floor(2.0 ** (np.arange(0, 16 * 48 + 1) / 16)).astype(np.int64))
        self.counts = np.zeros((num_layers, len(self.edges)), np.int64)
        self.num_first = np.zeros(num_layers, np.int64)
        self.num_demands = np.zeros((num_layers, num_experts), np.int64)
        self._last = np.full(num_layers * num_experts, -1, np.int64)  # row of the last demand
        self._num_rows = 0

    def add(self, experts: npt.NDArray[Any]) -> None:
        """The next rows of the stream, [T, L, K]."""
        num_rows = len(experts)
        rows, layers, places = np.nonzero(experts != NO_EXPERT)
        keys = layers * self.num_experts + experts[rows, layers, places]
        in_order = np.sort(keys * num_rows + rows)  # by expert, then by row
        keys, rows = np.divmod(in_order, num_rows)
        rows += self._num_rows
        is_first = np.diff(keys, prepend=-1) > 0
        before = np.empty_like(rows)
        before[1:] = rows[:-1]
        before[is_first] = self._last[keys[is_first]]
        is_last = np.diff(keys, append=-1) != 0
        self._last[keys[is_last]] = rows[is_last]
        self._num_rows += num_rows
        self.num_demands += np.bincount(keys, minlength=self._last.size).reshape(self.num_demands.shape)
        is_new = before < 0
        layers = keys // self.num_experts
        self.num_first += np.bincount(layers[is_new], minlength=self.num_layers)
        bins = np.searchsorted(self.edges, (rows - before)[~is_new])
        bins += layers[~is_new] * len(self.edges)
        self.counts += np.bincount(bins, minlength=self.counts.size).reshape(self.counts.shape)

    def percentile(self, counts: Ints, percent: float) -> int | None:
        """The distance within which `percent` of the demands in `counts` (rows of `self.counts`) are used again."""
        total = int(counts.sum())
        if total == 0:
            return None
        return int(self.edges[int(np.searchsorted(np.cumsum(counts), percent / 100 * total))])

    def share_within(self, counts: Ints, num_first: int, distance: int) -> float | None:
        """Share of all demands whose expert was needed at most `distance` (a power of two) tokens before."""
        total = int(counts.sum()) + num_first
        return float(counts[self.edges <= distance].sum() / total) if total else None


DISTANCES = tuple(1 << i for i in range(11))
"""Distances in tokens for which the share of reuse is given."""

PERCENTILES = (50, 90, 99)
TOP_PERCENTS = (10, 25, 50)

_BLOCK_NUMBERS = 1 << 21


@dataclass(frozen=True, slots=True)
class RoutingStatistics:
    """Of one layer, or the mean over all. None where the trace cannot say. See `EntropyMeter` and `ReuseMeter`.

    Shares are of demands (layer, token, expert): `top_shares` of those that the most popular 10, 25, 50 % of the
    experts serve (rounded up to whole experts).
    """

    num_demands: float
    token_entropy_bits: float | None
    request_entropy_bits: float | None
    max_entropy_bits: float  # log2 of the number of experts
    entropy_growth_bits: dict[int, float]  # by number of tokens
    top_shares: dict[int, float | None]
    most_popular_expert: int | None
    most_popular_share: float | None
    reuse_percentiles: dict[int, float | None]  # tokens
    reuse_within: dict[int, float | None]
    first_use_share: float | None


@dataclass(frozen=True, slots=True)
class TraceAnalysis:
    """Statistics of each layer and their mean, and what the plots draw."""

    layers: list[RoutingStatistics]
    mean: RoutingStatistics
    num_prefill_rows: int
    num_decode_rows: int
    num_prefill_iterations: int  # in which any row is of a prefill
    is_full: bool  # entropies are of all experts' probabilities
    reuse: ReuseMeter


def analyse(trace: Trace, progress: Callable[[int, int], None] | None = None) -> TraceAnalysis:
    """Read all of `trace` once; memory is of one block. `progress(done_rows, all_rows)`.

    Raises TraceError where a value in the trace cannot be.
    """
    layers = trace.manifest.layers
    num_layers, num_experts = len(layers), max_experts(layers)
    entropies = EntropyMeter(num_layers, num_experts, [request.num_rows for request in trace.requests])
    reuse = ReuseMeter(num_layers, num_experts)
    is_full = trace.has("probs")
    fields = ["request", "iteration", "is_prefill", "token", "experts", "weights", *["probs"] * is_full]
    width = num_layers * (num_experts if is_full else max_top_k(layers))
    num_prefill_rows = num_prefill_iterations = 0
    for block in trace.blocks(fields, max_rows=max(1, min(8192, _BLOCK_NUMBERS // width))):
        columns = block.columns
        entropies.add(columns["request"], columns["experts"], columns["weights"], columns.get("probs"))
        reuse.add(columns["experts"])
        num_prefill_rows += int(columns["is_prefill"].sum())
        num_prefill_iterations += len(np.unique(columns["iteration"][columns["is_prefill"]]))
        if progress is not None:
            progress(block.first_row + block.num_rows, trace.num_rows)
    statistics = [_layer_statistics(i, layer.num_experts, entropies, reuse) for i, layer in enumerate(layers)]
    return TraceAnalysis(
        statistics,
        _mean(statistics),
        num_prefill_rows,
        trace.num_rows - num_prefill_rows,
        num_prefill_iterations,
        is_full,
        reuse,
    )


def _layer_statistics(index: int, num_experts: int, entropies: EntropyMeter, reuse: ReuseMeter) -> RoutingStatistics:
    demands = reuse.num_demands[index, :num_experts]
    total = int(demands.sum())
    ranked = np.sort(demands)[::-1]
    counts, num_first = reuse.counts[index], int(reuse.num_first[index])
    return RoutingStatistics(
        total,
        _ratio(entropies.token_bits[index], entropies.num_tokens[index]),
        _ratio(entropies.request_bits[index], entropies.num_requests[index]),
        float(np.log2(num_experts)),
        {
            tokens: float(bits[index] / entropies.growth_requests[tokens][index])
            for tokens, bits in sorted(entropies.growth_bits.items())
            if entropies.growth_requests[tokens][index] > 0
        },
        {percent: _ratio(ranked[: -(-num_experts * percent // 100)].sum(), total) for percent in TOP_PERCENTS},
        int(np.argmax(demands)) if total else None,
        _ratio(ranked[0], total),
        {percent: reuse.percentile(counts, percent) for percent in PERCENTILES},
        {distance: reuse.share_within(counts, num_first, distance) for distance in DISTANCES},
        _ratio(num_first, total),
    )


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _mean(layers: list[RoutingStatistics]) -> RoutingStatistics:
    """The mean of each number over the layers where it is known; no single expert is the most popular in all layers."""

    def of(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: of([value.get(key) for value in values]) for key in sorted(set().union(*values))}
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    found = {one.name: of([getattr(layer, one.name) for layer in layers]) for one in fields(RoutingStatistics)}
    return RoutingStatistics(**found | {"most_popular_expert": None})

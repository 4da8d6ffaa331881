"""What a trace says about its model's routing: entropy, reuse, popularity; in one pass by blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.lab.trace_entropy import EntropyMeter
from expertly.lab.trace_reuse import ReuseMeter
from expertly.trace.reader import Trace
from expertly.trace.schema import max_experts, max_top_k

DISTANCES = tuple(1 << i for i in range(11))
"""Tokens within which the shares of reuse are given."""

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
    demands: npt.NDArray[np.int64]  # [L, E]
    reuse_edges: npt.NDArray[np.int64]  # [bins], the largest distance in each
    reuse_counts: npt.NDArray[np.int64]  # [L, bins]
    num_first: npt.NDArray[np.int64]  # [L]


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
        reuse.num_demands,
        reuse.edges,
        reuse.counts,
        reuse.num_first,
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
    def of(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    growth = {tokens for layer in layers for tokens in layer.entropy_growth_bits}
    growth_bits = {tokens: of([layer.entropy_growth_bits.get(tokens) for layer in layers]) for tokens in sorted(growth)}
    return RoutingStatistics(
        sum(layer.num_demands for layer in layers) / len(layers),
        of([layer.token_entropy_bits for layer in layers]),
        of([layer.request_entropy_bits for layer in layers]),
        sum(layer.max_entropy_bits for layer in layers) / len(layers),
        {tokens: bits for tokens, bits in growth_bits.items() if bits is not None},
        {percent: of([layer.top_shares[percent] for layer in layers]) for percent in TOP_PERCENTS},
        None,
        of([layer.most_popular_share for layer in layers]),
        {percent: of([layer.reuse_percentiles[percent] for layer in layers]) for percent in PERCENTILES},
        {distance: of([layer.reuse_within[distance] for layer in layers]) for distance in DISTANCES},
        of([layer.first_use_share for layer in layers]),
    )

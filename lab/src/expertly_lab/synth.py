"""Made-up traces: seeded routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly_lab.trace.schema import MAX_EXPERTS, REQUIRED, TraceLayer, trace_field
from expertly_lab.trace.writer import whole_trace

Experts = npt.NDArray[np.uint16]

_BLOCK_DRAWS = 1 << 22
_MAX_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class SynthWorkload:
    """Chosen experts of `num_tokens` tokens. `blocks()` gives them in order, [T, L, K]; each call starts anew."""

    num_layers: int
    num_experts: int
    top_k: int
    num_tokens: int
    blocks: Callable[[], Iterator[Experts]]


def zipf(
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    *,
    exponent: float = 1.0,
    keep: float = 0.0,
    seed: int = 0,
) -> SynthWorkload:
    """Skewed routing that repeats itself.

    In every layer the experts have ranks 1 to E in that layer's own order, and a token draws K different experts with
    weights rank^-`exponent`, without replacement. With probability `keep` each of the previous token's experts stays,
    and only the others are drawn.
    """
    _check_sizes(num_layers, num_experts, top_k, num_tokens)

    def blocks() -> Iterator[Experts]:
        rng = np.random.default_rng(seed)
        weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
        max_rows = max(1, min(_MAX_BLOCK_ROWS, _BLOCK_DRAWS // (num_layers * num_experts)))
        ranks = rng.permuted(np.tile(np.arange(num_experts), (num_layers, 1)), axis=1)
        popularity = weights[ranks].astype(np.float32)
        previous: Experts | None = None
        for token in range(0, num_tokens, max_rows):
            num_rows = min(max_rows, num_tokens - token)
            experts = _draw(rng, popularity, top_k, num_rows)
            if keep > 0:
                is_kept = rng.random((num_rows, num_layers, top_k), np.float32) < keep
                experts = _hold_on(experts, is_kept, previous)
                previous = experts[-1]
            yield experts

    return SynthWorkload(num_layers, num_experts, top_k, num_tokens, blocks)


def write_workload(
    folder: Path,
    workload: SynthWorkload,
    *,
    model: str,
    num_requests: int = 1,
    prefill_tokens: int = 0,
    seed: int = 0,
    created: str = "",
    command: str = "",
) -> None:
    """Write `workload` as a trace, its tokens shared out evenly among the requests, one after the other.

    The first `prefill_tokens` of a request are one iteration, every other token is one by itself. Weights are random
    and fall within a token.
    """
    sizes = _request_sizes(workload.num_tokens, num_requests, prefill_tokens)
    layers = (TraceLayer(workload.num_experts, workload.top_k),) * workload.num_layers
    notes = dict.fromkeys(REQUIRED, "made up") | {"token": "none: -1"}
    fields = [trace_field(name, layers, is_real=False, note=note) for name, note in notes.items()]
    rng = np.random.default_rng([seed, 1])
    with whole_trace(folder, model=model, layers=layers, fields=fields, created=created, command=command) as writer:
        for _ in range(num_requests):
            writer.begin_request(num_prompt_tokens=prefill_tokens)
        ends = np.cumsum(sizes)
        pending: list[dict[str, npt.NDArray[Any]]] = []
        first = 0
        for experts in workload.blocks():
            token = np.arange(first, first + len(experts))
            request = np.searchsorted(ends, token, "right")
            place = token - (ends - sizes)[request]  # in its request
            weights = np.sort(rng.standard_exponential(experts.shape, np.float32), axis=-1)[..., ::-1]
            block = {
                "experts": experts,
                "weights": weights / weights.sum(-1, keepdims=True),
                "request": request,
                "is_prefill": place < prefill_tokens,
                "token": np.full(len(token), -1),
                "place": place,
            }
            pending.append(block)
            first += len(experts)
            if place[-1] + 1 >= prefill_tokens:  # a prefill goes on in the next block until it is whole
                rows = {name: np.concatenate([block[name] for block in pending]) for name in pending[0]}
                begins = np.flatnonzero((rows.pop("place") == 0) | ~rows["is_prefill"])
                writer.extend(rows, np.diff(begins, append=len(rows["experts"])))
                pending = []


def _check_sizes(num_layers: int, num_experts: int, top_k: int, num_tokens: int) -> None:
    for name, value, most in (
        ("layers", num_layers, 4096),
        ("experts", num_experts, MAX_EXPERTS),
        ("top_k", top_k, num_experts),
        ("tokens", num_tokens, 1 << 40),
    ):
        if not 1 <= value <= most:
            raise TraceError(f"{name}={value}: must be from 1 to {most}")


def _request_sizes(num_tokens: int, num_requests: int, prefill_tokens: int) -> npt.NDArray[np.int64]:
    if not 1 <= num_requests <= num_tokens:
        raise TraceError(f"requests={num_requests}: must be from 1 to the {num_tokens} tokens")
    sizes = np.full(num_requests, num_tokens // num_requests)
    sizes[: num_tokens % num_requests] += 1
    if not 0 <= prefill_tokens <= sizes[-1]:
        raise TraceError(f"prefill_tokens={prefill_tokens}: must be from 0 to the {sizes[-1]} tokens of a request")
    return sizes


def _draw(rng: np.random.Generator, popularity: npt.NDArray[np.float32], top_k: int, num_rows: int) -> Experts:
    """K different experts a row and layer: the first K of a race with exponential times, weights as rates."""
    num_layers, num_experts = popularity.shape
    times = rng.standard_exponential((num_rows, num_layers, num_experts), np.float32)
    times /= popularity
    if top_k == num_experts:
        return np.argsort(times, axis=-1).astype(np.uint16)
    fastest = np.argpartition(times, top_k, axis=-1)[..., :top_k]
    order = np.argsort(np.take_along_axis(times, fastest, axis=-1), axis=-1)
    return np.take_along_axis(fastest, order, axis=-1).astype(np.uint16)


def _hold_on(drawn: Experts, is_kept: npt.NDArray[np.bool_], previous: Experts | None) -> Experts:
    """Token by token: the previous token's experts that stay, then drawn experts that are not among them."""
    top_k = drawn.shape[2]
    for token in range(len(drawn)):
        if previous is not None:
            kept = is_kept[token]
            is_there = ((drawn[token][:, :, None] == previous[:, None, :]) & kept[:, None, :]).any(-1)
            candidates = np.concatenate([previous, drawn[token]], axis=1)
            is_out = np.concatenate([~kept, is_there], axis=1)
            order = np.argsort(is_out, axis=1, kind="stable")[:, :top_k]
            drawn[token] = np.take_along_axis(candidates, order, axis=1)
        previous = drawn[token]
    return drawn

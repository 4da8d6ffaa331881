"""Made-up traces: seeded routing, and lookahead scores of a stated accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly_lab.trace.schema import MAX_EXPERTS, MODELLED, REQUIRED, FieldInfo, TraceLayer, trace_field
from expertly_lab.trace.writer import whole_trace

Experts = npt.NDArray[np.uint16]

_BLOCK_DRAWS = 1 << 22
_MAX_BLOCK_ROWS = 8192
_BLOCK_SCORES = 1 << 22


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
    lookahead: float | None = None,
    seed: int = 0,
    created: str = "",
    command: str = "",
) -> None:
    """Write `workload` as a trace, its tokens shared out evenly among the requests, one after the other.

    The first `prefill_tokens` of a request are one iteration, every other token is one by itself. Weights are random
    and fall within a token. `lookahead` adds scores of the next layer of that accuracy (`modelled_lookahead`).
    """
    sizes = _request_sizes(workload.num_tokens, num_requests, prefill_tokens)
    layers = (TraceLayer(workload.num_experts, workload.top_k),) * workload.num_layers
    notes = dict.fromkeys(REQUIRED, "made up") | {"token": "none: -1"}
    fields = [trace_field(name, layers, is_real=False, note=note) for name, note in notes.items()]
    if lookahead is not None:
        fields.append(modelled_field(layers, lookahead))
    rng, foretelling = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
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
            if lookahead is not None:
                block["lookahead"] = modelled_lookahead(foretelling, experts, workload.num_experts, lookahead)
            pending.append(block)
            first += len(experts)
            if place[-1] + 1 >= prefill_tokens:  # a prefill goes on in the next block until it is whole
                rows = {name: np.concatenate([block[name] for block in pending]) for name in pending[0]}
                begins = np.flatnonzero((rows.pop("place") == 0) | ~rows["is_prefill"])
                writer.extend(rows, np.diff(begins, append=len(rows["experts"])))
                pending = []


def modelled_field(layers: Sequence[TraceLayer], accuracy: float) -> FieldInfo:
    """The field `lookahead`, one layer ahead, labelled as modelled.

    Raises TraceError where a layer has too few experts to be wrong about.
    """
    if not 0 <= accuracy <= 1:
        raise TraceError(f"lookahead={accuracy:g}: must be from 0 to 1, the share of named experts that are needed")
    for layer in layers:
        if accuracy < 1 and layer.num_experts < 2 * layer.top_k:
            raise TraceError(
                f"lookahead={accuracy:g}: of {layer.num_experts} experts, top-{layer.top_k}, too few are not needed to "
                "name wrong ones; accepted: 1"
            )
    note = f"{MODELLED}{accuracy:g} of the K best of the next layer are needed; nothing of the next token"
    return trace_field("lookahead", layers, max_distance=1, is_real=False, note=note)


def modelled_lookahead(
    rng: np.random.Generator, experts: npt.NDArray[np.uint16], num_experts: int, accuracy: float
) -> npt.NDArray[np.float16]:
    """Scores [T, L, 1, E] of the layer after each, from the chosen `experts` [T, L, K]; they sum to 1.

    Each needed expert is among the K best with probability `accuracy`; else one that is not needed takes its place, any
    of them alike, and it is anywhere among the rest. Of the next token nothing is known: the last layer's are 0.
    """
    num_rows, num_layers = experts.shape[:2]
    found = np.zeros((num_rows, num_layers, 1, num_experts), np.float16)
    step = max(1, _BLOCK_SCORES // (num_layers * num_experts))
    for begin in range(0, num_rows, step):
        coming = experts[begin : begin + step, 1:].astype(np.intp)  # [t, L - 1, K]
        found[begin : begin + step, :-1, 0] = _modelled_scores(rng, coming, num_experts, accuracy)
    return found


def _modelled_scores(
    rng: np.random.Generator, needed: npt.NDArray[np.intp], num_experts: int, accuracy: float
) -> npt.NDArray[np.float64]:
    """[..., E] for the `needed` [..., K]."""
    is_right = rng.random(needed.shape) < accuracy
    lot = rng.random((*needed.shape[:-1], num_experts))
    of_others = lot.copy()
    np.put_along_axis(of_others, needed, -1.0, axis=-1)
    place = np.argsort(np.argsort(-of_others, axis=-1), axis=-1)  # 0: the first of those that are not needed
    is_best = place < (~is_right).sum(axis=-1, keepdims=True)
    np.put_along_axis(is_best, needed, is_right, axis=-1)
    scores = rng.random(lot.shape) + np.where(is_best, 2.0, 0.01)  # a gap that float16 keeps; none is 0, "unknown"
    normalised: npt.NDArray[np.float64] = scores / scores.sum(axis=-1, keepdims=True)
    return normalised


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
    """K different experts for each row and layer, drawn one after the other with those weights: the first K of a race
    in which each expert's time is exponential with its weight as the rate.
    """
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

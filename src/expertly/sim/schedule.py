"""Which requests of a trace are simulated, in which order and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from expertly.core.errors import ConfigError
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace, TraceRequest

if TYPE_CHECKING:
    from expertly.sim.arrivals import Arrivals


@dataclass(frozen=True, slots=True)
class Selection:
    """At most so many requests or tokens; of a split, the first part fills profiles and the rest is simulated."""

    num_requests: int | None = None
    num_tokens: int | None = None
    split: tuple[int, int] | None = None  # 7, 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Spans to train on (none without a split) and to simulate; how many requests were cut short of their arrivals'."""

    training: list[RowRange]
    test: list[RowRange]
    num_cut: int = 0


def make_schedule(trace: Trace, selection: Selection, arrivals: Arrivals | None = None) -> Schedule:
    """Raises ConfigError where there is nothing to simulate, or requests are to be picked and the trace mixes them."""
    if not trace.num_rows:
        raise ConfigError(f"trace={str(trace.folder)!r}: empty; a trace of at least one token is needed")
    reasons = {"split": selection.split, "requests": selection.num_requests, "arrivals": arrivals}
    reason = next((name for name, value in reasons.items() if value is not None), None)
    if reason is None:
        return Schedule([], first_rows([RowRange(None, 0, trace.num_rows)], selection.num_tokens))
    requests = _apart(trace, reason)
    training: list[RowRange] = []
    if selection.split is not None:
        first, requests = split_requests(requests, selection.split, selection.seed)
        training = [_span(request) for request in first]
    requests = requests[: selection.num_requests]
    if arrivals is None:
        return Schedule(training, first_rows([_span(request) for request in requests], selection.num_tokens))
    spans, num_cut = _arriving(trace, requests, arrivals)
    if not spans:
        raise ConfigError("arrivals: the requests that arrive have no tokens; nothing is left to simulate")
    return Schedule(training, first_rows(spans, selection.num_tokens), num_cut)


def _apart(trace: Trace, reason: str) -> list[TraceRequest]:
    """The requests that ran, each of which has its rows next to each other and its iterations for itself."""
    requests = [request for request in trace.requests if request.num_rows]
    in_order = sorted(requests, key=lambda request: request.first_row)
    mixed = [request for request in requests if not request.has_own_iterations]
    mixed += [b for a, b in pairwise(in_order) if a.first_row + a.num_rows > b.first_row]
    if mixed:
        raise ConfigError(
            f"{reason}: request {mixed[0].number} of {trace.folder} ran together with others, so none can be picked; "
            "simulate the whole trace, or record one request after the other"
        )
    return requests


def split_requests(
    requests: Sequence[TraceRequest], split: tuple[int, int], seed: int
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Shuffled with the seed; each category is shared out in the same proportion.

    Over the categories so far the number in the first part is always the rounded one, so that many small categories
    come out in proportion, too. Raises ConfigError where a part would be empty.
    """
    dice = Random(seed)
    categories: dict[str | None, list[TraceRequest]] = {}
    for request in requests:
        categories.setdefault(request.category, []).append(request)
    training: list[TraceRequest] = []
    test: list[TraceRequest] = []
    num_seen = 0
    for members in categories.values():
        dice.shuffle(members)
        num_seen += len(members)
        num = (2 * num_seen * split[0] + sum(split)) // (2 * sum(split)) - len(training)
        training += members[:num]
        test += members[num:]
    if not training or not test:
        raise ConfigError(
            f"split={split[0]}:{split[1]}: of {len(requests)} requests, {len(training)} to learn from and {len(test)} "
            "to simulate; both must be at least 1"
        )
    dice.shuffle(training)
    dice.shuffle(test)
    return training, test


def _span(request: TraceRequest) -> RowRange:
    return RowRange(request.number, request.first_row, request.num_rows)


def first_rows(spans: list[RowRange], num_tokens: int | None) -> list[RowRange]:
    """Of these spans the first `num_tokens` rows; None: all."""
    if num_tokens is None:
        return spans
    kept: list[RowRange] = []
    for span in spans:
        if num_tokens <= 0:
            break
        num = min(span.num_rows, num_tokens)
        kept.append(RowRange(span.request, span.first_row, num, span.arrival_ns))
        num_tokens -= num
    return kept


def _arriving(trace: Trace, requests: Sequence[TraceRequest], arrivals: Arrivals) -> tuple[list[RowRange], int]:
    """Requests one after the other take the arrivals' times, and their lengths as far as the trace holds them.

    The first token of an answer comes out of the prompt's pass; where the trace has no prompts every token is a pass.
    """
    spans: list[RowRange] = []
    num_cut = 0
    columns = (arrivals.times_ns, arrivals.prompt_tokens, arrivals.output_tokens)
    for request, time_ns, prompt, output in zip(requests, *columns, strict=False):
        is_prefill = trace.rows("is_prefill", request.first_row, request.first_row + request.num_rows)
        num_prompt = request.num_rows if is_prefill.all() else int(np.argmin(is_prefill))
        num_after = request.num_rows - num_prompt
        wanted_after = max(0, int(output) - 1) if num_prompt else int(output)
        num_cut += (0 < num_prompt < prompt) or num_after < wanted_after
        end = request.first_row + num_prompt
        parts = ((request.first_row, min(num_prompt, int(prompt))), (end, min(num_after, wanted_after)))
        spans += [RowRange(request.number, first, num, int(time_ns)) for first, num in parts if num]
    return spans, num_cut

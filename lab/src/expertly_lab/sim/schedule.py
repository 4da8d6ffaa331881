"""Which requests of a trace are simulated, in which order, and when they arrive."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from expertly.core.errors import ConfigError
from expertly.core.untrusted import Bounds, parse_as, read_text
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.reader import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order in which they arrive."""

    times_ns: npt.NDArray[np.int64]  # [N], from the first request; rising or equal
    prompt_tokens: npt.NDArray[np.int64]  # [N]
    output_tokens: npt.NDArray[np.int64]  # [N]

    def __len__(self) -> int:
        return len(self.times_ns)


@dataclass(frozen=True, slots=True)
class Selection:
    """At most so many requests or tokens; with a split, the first part fills profiles and the rest is simulated."""

    num_requests: int | None = None
    num_tokens: int | None = None
    split: tuple[int, int] | None = None  # 7, 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Spans to train on and to simulate, and how many requests are shorter than their arrivals say."""

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
    spans, num_cut = [_span(request) for request in requests[: selection.num_requests]], 0
    if arrivals is not None:
        spans, num_cut = arriving(trace, spans, arrivals)
    return Schedule(training, first_rows(spans, selection.num_tokens), num_cut)


def _apart(trace: Trace, reason: str) -> list[TraceRequest]:
    """The requests that ran, where each has its rows side by side and its iterations to itself."""
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
    """Requests shuffled with the seed, with each category split in the same proportion.

    After each category the first part has the rounded number of requests, so that many small categories come out in
    proportion, too. Raises ConfigError where a part would be empty.
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
    """The first `num_tokens` rows of these spans; None: all."""
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


def num_prompt_rows(trace: Trace, span: RowRange) -> int:
    """The rows of a request's prompt."""
    return int(trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows).sum())


def with_answer(trace: Trace, span: RowRange, num_tokens: int) -> RowRange:
    """A request with at most so many tokens behind its prompt."""
    return replace(span, num_rows=min(span.num_rows, num_prompt_rows(trace, span) + num_tokens))


def decode_passes(trace: Trace, span: RowRange) -> npt.NDArray[np.bool_]:
    """For each pass of a span, whether it is decode only."""
    rows = span.first_row, span.first_row + span.num_rows
    _, firsts = np.unique(trace.rows("iteration", *rows), return_index=True)
    decodes: npt.NDArray[np.bool_] = ~np.logical_or.reduceat(trace.rows("is_prefill", *rows), firsts)
    return decodes


def arriving(trace: Trace, requests: Sequence[RowRange], arrivals: Arrivals) -> tuple[list[RowRange], int]:
    """Requests one after the other get the arrivals' times, and their lengths as far as the trace has so many tokens;
    and how many are shorter than that.

    The first token of an answer comes from the prompt's pass; in a trace without prompts every token is a pass. Raises
    ConfigError where nothing is left to simulate.
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
        spans += [RowRange(request.request, first, num, int(time_ns)) for first, num in parts if num]
    if not spans:
        raise ConfigError("arrivals: the requests that arrive have no tokens; nothing is left to simulate")
    return spans, num_cut


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The columns of the Azure LLM inference traces."""

    TIMESTAMP: datetime
    ContextTokens: Annotated[int, Ge(0), Le(10**9)]
    GeneratedTokens: Annotated[int, Ge(0), Le(10**9)]


def read_arrivals(path: Path) -> Arrivals:
    """The requests of a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens; others are ignored.

    Raises ConfigError naming file, row (from 0), column and value, also where a request arrives before the one above
    it: the published files are in order, and sorting one that is not would hide another error in it.
    """
    beginning, names = f"arrivals {path}", [field.name for field in fields(_Arrival)]
    text = read_text(path, Bounds(1 << 30), ConfigError).removeprefix("\ufeff")
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ConfigError(f"{beginning}: not CSV ({error})") from None
    if not rows:
        raise ConfigError(f"{beginning}: no requests in it; accepted: a CSV file with {', '.join(names)}")
    values = [{name: _number(row[name]) for name in names if name in row} for row in rows]
    arrivals: tuple[_Arrival, ...] = parse_as(tuple[_Arrival, ...], json.dumps(values), beginning, ConfigError)
    utc = [row.TIMESTAMP.astimezone(timezone.utc) if row.TIMESTAMP.tzinfo else row.TIMESTAMP for row in arrivals]
    times = np.array([time.replace(tzinfo=None) for time in utc], "datetime64[ns]").astype(np.int64)
    if (np.diff(times) < 0).any():
        place = int(np.argmax(np.diff(times) < 0)) + 1
        raise ConfigError(
            f"{beginning}: [{place}].TIMESTAMP={arrivals[place].TIMESTAMP}: earlier than the row before; sort it"
        )
    tokens = np.array([(row.ContextTokens, row.GeneratedTokens) for row in arrivals], np.int64).T
    return Arrivals(times - times[0], *tokens)


def _number(text: object) -> object:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 20 else text

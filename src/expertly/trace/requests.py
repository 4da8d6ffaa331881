"""The requests of a trace: what their file says, and where their rows lie."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A line of the requests file."""

    number: int
    category: str | None
    prompt: str | None
    num_prompt_tokens: int  # 0 where unknown


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request and its rows, which lie next to each other unless another request ran meanwhile."""

    number: int
    category: str | None
    prompt: str | None
    num_prompt_tokens: int  # 0 where unknown
    first_row: int
    num_rows: int
    has_own_iterations: bool  # no iteration holds rows of another request


def read_requests(path: Path, is_complete: bool) -> list[RequestInfo]:
    """The lines of `path`; half a line at the end of an unfinished recording is left out.

    Raises TraceError naming the file, the line and the field.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None
    *lines, rest = raw.split(b"\n")
    if rest and is_complete:
        raise TraceError(f"{path}: line {len(lines) + 1}: truncated")
    return [_parse(f"{path}: line {number + 1}", line, number) for number, line in enumerate(lines)]


def _parse(where: str, line: bytes, number: int) -> RequestInfo:
    try:
        raw = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise TraceError(f"{where}: holds {raw!r:.80}; must be an object")
    found = raw.get("request")
    if type(found) is not int or found != number:
        raise TraceError(f"{where}: request={found!r:.80}: must be {number}, requests are numbered as they come")
    for name in ("category", "prompt"):
        if raw.get(name) is not None and not isinstance(raw[name], str):
            raise TraceError(f"{where}: {name}={raw[name]!r:.80}: must be a string or null")
    num_tokens = raw.get("num_prompt_tokens")
    if type(num_tokens) is not int or not 0 <= num_tokens < 1 << 48:
        raise TraceError(f"{where}: num_prompt_tokens={num_tokens!r:.80}: must be a whole number from 0")
    return RequestInfo(number, raw.get("category"), raw.get("prompt"), num_tokens)


def locate(
    requests: list[RequestInfo], blocks: Iterable[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64]]]
) -> list[TraceRequest]:
    """Where each request's rows lie. `blocks`: first row, `request` and `iteration` of whole iterations, in order."""
    first = np.full(len(requests), -1, np.int64)
    count = np.zeros(len(requests), np.int64)
    is_alone = np.ones(len(requests), bool)
    for first_row, request, iteration in blocks:
        found, places, counts = np.unique(request, return_index=True, return_counts=True)
        is_new = first[found] < 0
        first[found[is_new]] = first_row + places[is_new]
        count[found] += counts
        starts = np.flatnonzero(np.diff(iteration, prepend=-1))
        is_mixed = np.minimum.reduceat(request, starts) != np.maximum.reduceat(request, starts)
        if is_mixed.any():
            is_alone[request[np.repeat(is_mixed, np.diff(starts, append=len(request)))]] = False
    return [
        TraceRequest(
            info.number,
            info.category,
            info.prompt,
            info.num_prompt_tokens,
            max(int(first[info.number]), 0),
            int(count[info.number]),
            bool(is_alone[info.number]),
        )
        for info in requests
    ]

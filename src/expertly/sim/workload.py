"""What is simulated: iterations of a trace, in the order in which requests are served, as demands of each layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.messages import RouterRan, group_by_expert
from expertly.core.observation import Began, Routed, Want
from expertly.sim.rows import Rows, read_rows
from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT

_BLOCK_ROWS = 512
"""Rows whose demands are Python objects at a time."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of one request, or of a whole trace, that are served one after the other."""

    request: int | None  # None: the requests that the rows say
    first_row: int
    num_rows: int
    arrival_ns: int = 0

    @property
    def last_row(self) -> int:
        return self.first_row + self.num_rows - 1


@dataclass(frozen=True, slots=True)
class Iteration:
    """One forward pass. `layers` holds the demand of each layer that ran, in order."""

    index: int
    requests: tuple[int, ...]
    prefilling: tuple[int, ...]  # those of which it holds tokens of the prompt
    num_tokens: int
    layers: list[RouterRan]
    first_row: int  # in the order of the workload
    trace_row: int  # in the trace
    arrival_ns: int
    rows: Rows = field(compare=False)  # the iteration is `num_tokens` of them, from `begin` on
    begin: int = field(compare=False)

    @property
    def is_prefill(self) -> bool:
        """Any row is of a prompt."""
        return bool(self.prefilling)

    @property
    def stack(self) -> range | None:
        """The layers that run, from the first to the last: an encoder's, a decoder's or all. None where none does."""
        return range(self.layers[0].layer, self.layers[-1].layer + 1) if self.layers else None

    def began(self, wants: Collection[Want]) -> Began:
        """What a predictor that wants these may see of its begin."""
        return self.rows.began(self.begin, self.begin + self.num_tokens, wants, self.stack)

    def routed(self, router: RouterRan, wants: Collection[Want]) -> Routed:
        """And of one of its layers."""
        return self.rows.routed(router, self.begin, self.begin + self.num_tokens, wants)


class Workload:
    """A trace's rows in the order of `spans`. Rows and iterations are counted in that order, from 0."""

    def __init__(self, trace: Trace, spans: Sequence[RowRange]) -> None:
        if not spans:
            raise ConfigError(f"trace={str(trace.folder)!r}: no tokens to simulate in it")
        self.trace = trace
        self.spans = list(spans)
        self.num_rows = sum(span.num_rows for span in spans)
        self.layers = trace.manifest.layers
        self.num_layers = len(self.layers)

    def iterations(self) -> Iterator[Iteration]:
        """All of them, in order. Reads the trace block by block."""
        index = row = 0
        for span in self.spans:
            trace_row = span.first_row
            for rows in read_rows(self.trace, span.first_row, span.num_rows, _BLOCK_ROWS):
                has_gaps = bool((rows.experts == NO_EXPERT).any())
                for begin, end in _iteration_bounds(rows.iteration):
                    num = end - begin
                    if num == 1:
                        is_prefill = bool(rows.is_prefill[begin])
                        requests = (int(rows.request[begin]),)
                        prefilling = requests if is_prefill else ()
                        layers = _single(rows.experts[begin].tolist(), is_prefill, has_gaps)
                    else:
                        of_rows, are_prefill = rows.request[begin:end], rows.is_prefill[begin:end]
                        requests = tuple(dict.fromkeys(of_rows.tolist()))
                        prefilling = tuple(dict.fromkeys(of_rows[are_prefill].tolist()))
                        layers = self._many(rows.experts[begin:end], are_prefill)
                    where = (row, trace_row, span.arrival_ns)
                    yield Iteration(index, requests, prefilling, num, layers, *where, rows, begin)
                    index, row, trace_row = index + 1, row + num, trace_row + num

    def _many(self, experts: npt.NDArray[np.uint16], is_prefill: npt.NDArray[np.bool_]) -> list[RouterRan]:
        demands = []
        for layer, shape in enumerate(self.layers):
            demand, _ = group_by_expert(layer, experts[:, layer, : shape.top_k], shape.num_experts, is_prefill)
            if demand.experts:
                demands.append(demand)
        return demands


def _iteration_bounds(iteration: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(begin, end) rows of each iteration of a block."""
    edges = [0, *(np.flatnonzero(np.diff(iteration)) + 1).tolist(), len(iteration)]
    return list(pairwise(edges))


_FLAGS = {(num, flag): [flag] * num for num in range(1, 33) for flag in (False, True)}
_ONES = {num: [1] * num for num in range(1, 33)}


def _single(experts_of_layers: list[list[int]], is_prefill: bool, has_gaps: bool) -> list[RouterRan]:
    """The demands of one token; the lists that say nothing new are shared."""
    demands = []
    for layer, chosen in enumerate(experts_of_layers):
        experts = [e for e in chosen if e != NO_EXPERT] if has_gaps else chosen
        num = len(experts)
        if num:
            ones = _ONES.get(num) or [1] * num
            flags = _FLAGS.get((num, not is_prefill)) or [not is_prefill] * num
            demands.append(RouterRan(layer, experts, ones, flags, 1))
    return demands

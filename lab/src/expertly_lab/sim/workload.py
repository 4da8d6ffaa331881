"""The iterations of a trace, in the order in which requests are served, as demands of each layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.messages import RouterRan, group_by_expert
from expertly.core.observation import Began, Floats, History, Routed, Want, scores_of_choices
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT, max_experts

_TOLERANCE = 0.01
"""Within which normalised scores sum to 1 after they were rounded to 16 bits."""

_BLOCK_ROWS = 512
"""Rows whose demands become Python objects at a time."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of one request, or of a whole trace, that are served in order."""

    request: int | None  # None: the requests that the rows say
    first_row: int
    num_rows: int
    arrival_ns: int = 0

    @property
    def last_row(self) -> int:
        return self.first_row + self.num_rows - 1


class Rows:
    """Adjacent rows of a trace that hold whole iterations, as far as they are simulated.

    A field that only predictors look at is read when first asked for and kept for the following iterations; in a single
    iteration each layer is asked for once, and not kept.
    """

    def __init__(self, trace: Trace, first_row: int, columns: dict[str, npt.NDArray[Any]]) -> None:
        """`columns`: the fields that are always read, [rows, ...] each."""
        self.iteration: npt.NDArray[np.int64] = columns["iteration"]
        self.request: npt.NDArray[np.int32] = columns["request"]
        self.is_prefill: npt.NDArray[np.bool_] = columns["is_prefill"]
        self.experts: npt.NDArray[np.uint16] = columns["experts"]  # [rows, L, K]
        self.layers = trace.manifest.layers
        self._trace = trace
        self.first_row = first_row
        self._is_one_pass = bool(self.iteration[0] == self.iteration[-1])
        self._recorded: dict[str, npt.NDArray[Any]] = {}
        self._of_layers: dict[tuple[str, int], Floats] = {}

    def __len__(self) -> int:
        return len(self.request)

    def token_ids(self, wants: Collection[Want]) -> npt.NDArray[np.int32] | None:
        """[rows], if wanted."""
        return self._read("token") if "token_ids" in wants else None

    def embedding(self, wants: Collection[Want]) -> Floats | None:
        """[rows, H], if wanted and recorded."""
        if "embedding" not in wants or not self._trace.has("embedding"):
            return None
        return self._read("embedding", np.float32)

    def of_layer(self, field: str, layer: int) -> Floats | None:
        """[rows, ...] of "scores" (which sum to 1 in each row), or of a field that the trace may lack."""
        values = self._of_layers.get((field, layer))
        if values is None:
            if field == "scores":
                values = self._scores(layer)
            elif self._trace.has(field):
                values = self._read(field)[:, layer].astype(np.float32)
            else:
                return None
            values.flags.writeable = False
            if not self._is_one_pass:
                self._of_layers[field, layer] = values
        return values

    def history(self, wants: Collection[Want]) -> History:
        """All rows, to learn from."""
        scores = np.zeros((len(self), len(self.layers), max_experts(self.layers)), np.float32)
        for layer, shape in enumerate(self.layers):
            scores[:, layer, : shape.num_experts] = self.of_layer("scores", layer)
        scores.flags.writeable = False
        requests = self.request.astype(np.int64)
        return History(
            requests, self.is_prefill, self.experts, scores, self.embedding(wants), token_ids=self.token_ids(wants)
        )

    def _scores(self, layer: int) -> Floats:
        num_experts = self.layers[layer].num_experts
        if self._trace.has("probs"):
            return normalised_scores(self._read("probs")[:, layer, :num_experts])
        return scores_of_choices(self.experts[:, layer], self._read("weights")[:, layer], num_experts)

    def _read(self, field: str, dtype: type[np.float32] | None = None) -> npt.NDArray[Any]:
        values = self._recorded.get(field)
        if values is None:
            values = self._trace.rows(field, self.first_row, self.first_row + len(self))
            if dtype is not None:
                values = values.astype(dtype)
                values.flags.writeable = False
            self._recorded[field] = values
        return values


def read_rows(trace: Trace, first_row: int, num_rows: int, max_rows: int) -> Iterator[Rows]:
    """Rows of a trace in blocks of about `max_rows`, in order; none splits an iteration."""
    fields = ("request", "iteration", "is_prefill", "experts")
    for block in trace.blocks(fields, first_row, first_row + num_rows, max_rows):
        yield Rows(trace, block.first_row, block.columns)


@dataclass(slots=True)
class Iteration:
    """One forward pass. `layers` holds the demand of each layer that ran, in order."""

    index: int
    requests: tuple[int, ...]
    prefilling: tuple[int, ...]  # those of which it holds tokens of the prompt
    num_tokens: int
    layers: list[RouterRan]
    first_row: int  # in the order of the workload
    arrival_ns: int
    rows: Rows = field(compare=False)  # the iteration is `num_tokens` of them, from `begin` on
    begin: int = field(compare=False)

    @property
    def trace_row(self) -> int:
        """Its first row in the trace."""
        return self.rows.first_row + self.begin

    @property
    def is_prefill(self) -> bool:
        return bool(self.prefilling)

    def began(self, wants: Collection[Want]) -> Began:
        """What a predictor with these wants may see when it begins."""
        rows, span = self.rows, slice(self.begin, self.begin + self.num_tokens)
        embedding, token_ids = rows.embedding(wants), rows.token_ids(wants)
        return Began(
            rows.request[span].astype(np.int64),
            rows.is_prefill[span],
            None if embedding is None else embedding[span],
            None if token_ids is None else token_ids[span],
        )

    def routed(self, router: RouterRan, wants: Collection[Want]) -> Routed:
        """What a predictor with these wants may see when a layer's router ran."""
        rows, layer, span = self.rows, router.layer, slice(self.begin, self.begin + self.num_tokens)
        experts = rows.experts[span, layer, : rows.layers[layer].top_k] if "experts" in wants else None
        scores = rows.of_layer("scores", layer) if "scores" in wants else None
        lookahead = rows.of_layer("lookahead", layer) if "lookahead" in wants else None
        inputs = rows.of_layer("router_inputs", layer) if "inputs" in wants else None
        return Routed(
            router,
            experts,
            None if scores is None else scores[span],
            None if lookahead is None else lookahead[span],
            None if inputs is None else inputs[span],
        )


class TraceWorkload:
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
        """All iterations, in order. Reads the trace block by block."""
        index = row = 0
        for span in self.spans:
            for rows in read_rows(self.trace, span.first_row, span.num_rows, _BLOCK_ROWS):
                has_gaps = bool((rows.experts == NO_EXPERT).any())
                edges = [0, *(np.flatnonzero(np.diff(rows.iteration)) + 1).tolist(), len(rows)]
                for begin, end in pairwise(edges):
                    num = end - begin
                    if num == 1:
                        is_prefill = bool(rows.is_prefill[begin])
                        requests = (int(rows.request[begin]),)
                        prefilling = requests if is_prefill else ()
                        layers = _demands_of_token(rows.experts[begin].tolist(), is_prefill, has_gaps)
                    else:
                        of_rows, are_prefill = rows.request[begin:end], rows.is_prefill[begin:end]
                        requests = tuple(dict.fromkeys(of_rows.tolist()))
                        prefilling = tuple(dict.fromkeys(of_rows[are_prefill].tolist()))
                        layers = self._demands_of_rows(rows.experts[begin:end], are_prefill)
                    yield Iteration(index, requests, prefilling, num, layers, row, span.arrival_ns, rows, begin)
                    index, row = index + 1, row + num

    def _demands_of_rows(self, experts: npt.NDArray[np.uint16], is_prefill: npt.NDArray[np.bool_]) -> list[RouterRan]:
        demands = []
        for layer, shape in enumerate(self.layers):
            demand, _ = group_by_expert(layer, experts[:, layer, : shape.top_k], shape.num_experts, is_prefill)
            if demand.experts:
                demands.append(demand)
        return demands


def _demands_of_token(experts_of_layers: list[list[int]], is_prefill: bool, has_gaps: bool) -> list[RouterRan]:
    demands = []
    ones, decode = [1] * len(experts_of_layers[0]), [not is_prefill] * len(experts_of_layers[0])  # all layers share
    for layer, chosen in enumerate(experts_of_layers):
        if has_gaps:
            experts = [e for e in chosen if e != NO_EXPERT]
            if num := len(experts):
                demands.append(RouterRan(layer, experts, ones[:num], decode[:num], 1))
        else:
            demands.append(RouterRan(layer, chosen, ones, decode, 1))
    return demands


def normalised_scores(recorded: npt.NDArray[Any]) -> Floats:
    """Recorded scores [..., E], made to be at least 0 and to sum to 1. Rows that do so already, to 16 bits, and rows of
    0 stay the same.
    """
    scores = recorded.astype(np.float32)
    total = scores.sum(-1)
    if (np.abs(total - 1) > _TOLERANCE).any() or scores.min(initial=0) < 0:
        scores = np.maximum(scores, 0)
        total = scores.sum(-1)
        is_off = (np.abs(total - 1) > _TOLERANCE) & (total > 0)
        scores[is_off] /= total[is_off][..., None]
    return scores

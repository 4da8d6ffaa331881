"""Rows of a trace as a predictor sees them; each field is read where it is first asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Floats, History, Routed, Want, normalised_scores, scores_of_choices
from expertly.trace.reader import Trace
from expertly.trace.schema import max_experts


class Rows:
    """Adjacent rows of a trace that hold whole iterations, as far as they are simulated.

    What was read is kept for the iterations that follow; a single one asks for each layer once.
    """

    def __init__(self, trace: Trace, first_row: int, columns: dict[str, npt.NDArray[Any]]) -> None:
        """`columns`: the fields that are always read, [rows, ...] each."""
        self.iteration: npt.NDArray[np.int64] = columns["iteration"]
        self.request: npt.NDArray[np.int32] = columns["request"]
        self.is_prefill: npt.NDArray[np.bool_] = columns["is_prefill"]
        self.experts: npt.NDArray[np.uint16] = columns["experts"]  # [rows, L, K]
        self._trace = trace
        self._first_row = first_row
        self._layers = trace.manifest.layers
        self._is_one_pass = bool(self.iteration[0] == self.iteration[-1])
        self._recorded: dict[str, npt.NDArray[Any]] = {}
        self._embedding: Floats | None = None
        self._scores: list[Floats | None] = [None] * len(self._layers)
        self._by_layer: dict[str, list[Floats | None]] = {}

    def __len__(self) -> int:
        return len(self.request)

    def began(self, begin: int, end: int, wants: Collection[Want], layers: range | None = None) -> Began:
        """The pass of rows `[begin, end)`, which runs `layers`, begins."""
        token_ids, embedding = self._of_begin(wants)
        return Began(
            self.request[begin:end].astype(np.int64),
            self.is_prefill[begin:end],
            None if embedding is None else embedding[begin:end],
            layers,
            None if token_ids is None else token_ids[begin:end],
        )

    def routed(self, router: RouterRan, begin: int, end: int, wants: Collection[Want]) -> Routed:
        """A router of that pass has spoken."""
        layer = router.layer
        experts = scores = inputs = lookahead = None
        if "experts" in wants:
            experts = self.experts[begin:end, layer, : self._layers[layer].top_k]
        if "scores" in wants:
            scores = self._scores_of(layer)[begin:end]
        if "lookahead" in wants and self._trace.has("lookahead"):
            lookahead = self._of_layer("lookahead", layer)[begin:end]
        if "inputs" in wants and self._trace.has("router_inputs"):
            inputs = self._of_layer("router_inputs", layer)[begin:end]
        return Routed(router, experts, scores, lookahead, inputs)

    def history(self, wants: Collection[Want]) -> History:
        """All rows, to learn from."""
        scores = np.zeros((len(self), len(self._layers), max_experts(self._layers)), np.float32)
        for layer, shape in enumerate(self._layers):
            scores[:, layer, : shape.num_experts] = self._scores_of(layer)
        token_ids, embedding = self._of_begin(wants)
        requests = self.request.astype(np.int64)
        return History(requests, self.is_prefill, self.experts, _frozen(scores), embedding, token_ids)

    def _of_begin(self, wants: Collection[Want]) -> tuple[npt.NDArray[np.int32] | None, Floats | None]:
        """Token ids [rows] and embeddings [rows, H], where they are wanted and there."""
        token_ids: npt.NDArray[np.int32] | None = self._read("token") if "token_ids" in wants else None
        embedding = self._embeddings() if "embedding" in wants and self._trace.has("embedding") else None
        return token_ids, embedding

    def _embeddings(self) -> Floats:
        if self._embedding is None:
            self._embedding = _frozen(self._read("embedding").astype(np.float32))
        return self._embedding

    def _scores_of(self, layer: int) -> Floats:
        """[rows, experts of the layer]."""
        found = self._scores[layer]
        if found is None:
            num_experts = self._layers[layer].num_experts
            if self._trace.has("probs"):
                found = normalised_scores(self._read("probs")[:, layer, :num_experts])
            else:
                found = scores_of_choices(self.experts[:, layer], self._read("weights")[:, layer], num_experts)
            _frozen(found)
            if not self._is_one_pass:
                self._scores[layer] = found
        return found

    def _of_layer(self, field: str, layer: int) -> Floats:
        """[rows, ...] of a field that has a row for each layer."""
        kept = self._by_layer.setdefault(field, [None] * len(self._layers))
        found = kept[layer]
        if found is None:
            found = _frozen(self._read(field)[:, layer].astype(np.float32))
            if not self._is_one_pass:
                kept[layer] = found
        return found

    def _read(self, field: str) -> npt.NDArray[Any]:
        found = self._recorded.get(field)
        if found is None:
            found = self._recorded[field] = self._trace.rows(field, self._first_row, self._first_row + len(self))
        return found


def read_rows(trace: Trace, first_row: int, num_rows: int, max_rows: int) -> Iterator[Rows]:
    """Rows of a trace in blocks of about `max_rows`, in order; none splits an iteration."""
    fields = ("request", "iteration", "is_prefill", "experts")
    for block in trace.blocks(fields, first_row, first_row + num_rows, max_rows):
        yield Rows(trace, block.first_row, block.columns)


def _frozen(values: Floats) -> Floats:
    values.flags.writeable = False
    return values

"""How often predictors are right on rows that they did not learn from (ProMoE, figures 8 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.policies.promoe import LearnedWeights, Network, pairs
from expertly_lab.dataset import Dataset, Rows, needed
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.reader import Trace

_BLOCK_ROWS = 1024

Scores = Callable[[Rows], npt.NDArray[np.float32]]
"""[rows, E] of rows of the data set."""
Share = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Rows], float]
"""The share of the named experts that are needed; takes both of each row, and the rows' numbers in the data set."""


def of_all(right: npt.NDArray[np.int64], named: npt.NDArray[np.int64], rows: Rows) -> float:
    """A Share that counts all rows alike."""
    return float(right.sum() / named.sum())


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One layer, predicted `distance` layers ahead or from the first layer: the share of the named experts that were
    needed. For each row as many are named as its router chooses. None where the trace does not show it.
    """

    distance: int
    source: int
    layer: int
    learned: float | None
    lookahead: float | None
    token_id: float | None


def accuracies(
    trace: Trace,
    data: Dataset,
    training: Sequence[RowRange],
    test: Sequence[RowRange],
    weights: LearnedWeights,
    share: Share = of_all,
) -> tuple[list[Accuracy], int]:
    """By distance and layer on the decode rows of `test` (all rows where none is decode), and how many rows those are.
    `data` holds the rows of `training`, over which token ids are counted, before those of `test`.
    """
    spans = [*training, *test]
    trace_rows = np.concatenate([np.arange(span.first_row, span.first_row + span.num_rows) for span in spans])
    num_training = sum(span.num_rows for span in training)
    learned, judged = np.arange(num_training), np.arange(num_training, len(trace_rows))
    is_decode = ~np.concatenate(
        [trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows) for span in test]
    )
    judged = judged[is_decode] if is_decode.any() else judged
    ids = trace.rows("token", 0, trace.num_rows)[trace_rows]
    of_ids: dict[int, float | None] = {}
    of_pairs: dict[tuple[int, int], tuple[float | None, float | None]] = {}
    made = []
    for distance in weights.distances:
        for source, layer in pairs(weights.starts, distance):
            if layer not in of_ids:
                scores = _TokenIds(data, layer, ids, learned) if (ids[learned] >= 0).any() else None
                of_ids[layer] = _accuracy(data, layer, judged, scores, share)
            if (source, layer) not in of_pairs:
                network = Network(weights.mlps[source, layer])
                rows = judged[data.ran[source, judged]]
                of_pairs[source, layer] = (
                    _accuracy(data, layer, rows, lambda rows: network.probabilities(data.inputs(source, rows)), share),  # noqa: B023
                    _accuracy(data, layer, rows, _lookahead(trace, trace_rows, source, layer), share),
                )
            made.append(Accuracy(distance, source, layer, *of_pairs[source, layer], of_ids[layer]))
    return made, len(judged)


def means(accuracies: Sequence[Accuracy]) -> dict[int, dict[str, Any]]:
    """By distance, each predictor's mean over the layers, and how many those are."""
    result: dict[int, dict[str, Any]] = {}
    for distance in sorted({accuracy.distance for accuracy in accuracies}):
        layers = [accuracy for accuracy in accuracies if accuracy.distance == distance]
        result[distance] = {"layers": len(layers)}
        for name in ("learned", "lookahead", "token_id"):
            values = [value for accuracy in layers if (value := getattr(accuracy, name)) is not None]
            result[distance][name] = sum(values) / len(values) if values else None
    return result


def _accuracy(data: Dataset, layer: int, rows: Rows, scores: Scores | None, share: Share) -> float | None:
    """Experts with score 0 are never named; ties go to the lowest id."""
    if scores is None:
        return None
    rows = rows[data.ran[layer, rows]]
    right, named = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for first in range(0, len(rows), _BLOCK_ROWS):
        block = rows[first : first + _BLOCK_ROWS]
        scored = scores(block)
        top = np.argsort(-scored, axis=1, kind="stable")[:, : data.layers[layer].top_k]
        is_named = np.take_along_axis(scored, top, 1) > 0
        is_right = np.take_along_axis(needed(data.experts(layer, block), data.layers[layer].num_experts), top, 1)
        right[first : first + _BLOCK_ROWS] = (is_named & is_right).sum(axis=1)
        named[first : first + _BLOCK_ROWS] = is_named.sum(axis=1)
    return share(right, named, rows) if named.any() else None


def _lookahead(trace: Trace, trace_rows: Rows, source: int, layer: int) -> Scores | None:
    """Scores of `layer`'s router for the input of `source`; None where the trace does not look so far ahead."""
    if not trace.has("lookahead") or layer - source > trace.manifest.fields["lookahead"].shape[1]:
        return None
    num_experts = trace.manifest.layers[layer].num_experts

    def scores(rows: Rows) -> npt.NDArray[np.float32]:
        out = np.empty((len(rows), num_experts), np.float32)
        wanted = trace_rows[rows]
        starts = np.flatnonzero(np.diff(wanted, prepend=-2) != 1)  # of runs of adjacent rows
        for start, end in zip(starts, [*starts[1:], len(wanted)], strict=True):
            shown = trace.rows("lookahead", int(wanted[start]), int(wanted[end - 1]) + 1)
            out[start:end] = shown[:, source, layer - source - 1, :num_experts]
        return out

    return scores


class _TokenIds:
    """How often each token id chose each expert of a layer in the training part; an unseen id counts as all ids."""

    def __init__(self, data: Dataset, layer: int, ids: npt.NDArray[np.int32], training: Rows) -> None:
        num_experts = data.layers[layer].num_experts
        rows = training[(ids[training] >= 0) & data.ran[layer, training]]
        self._ids = ids
        self._known, places = np.unique(ids[rows], return_inverse=True)
        self._counts = np.zeros((len(self._known) + 1, num_experts), np.float32)  # the last: of all
        experts = data.experts(layer, rows)
        is_choice = (experts >= 0) & (experts < num_experts)
        np.add.at(self._counts, (np.broadcast_to(places[:, None], experts.shape)[is_choice], experts[is_choice]), 1)
        self._counts[-1] = self._counts[:-1].sum(axis=0)

    def __call__(self, rows: Rows) -> npt.NDArray[np.float32]:
        wanted = self._ids[rows]
        places = np.searchsorted(self._known, wanted)
        is_known = np.append(self._known, -1)[places] == wanted
        return self._counts[np.where(is_known & (wanted >= 0), places, len(self._known))]

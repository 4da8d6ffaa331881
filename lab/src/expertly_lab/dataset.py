"""A trace as training reads it: one layer at a time, its rows in any order.

L layers, H numbers of a router input, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly_lab.sim.study import Progress
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT
from expertly_lab.trace.shards import scratch

_BLOCK_ROWS = 1024

Rows = npt.NDArray[np.intp]


class Dataset:
    """Rows of requests, numbered in the order of `spans`.

    One pass over the trace copies them, layer by layer, to a scratch file in the folder for temporary files, which is
    mapped into memory: only the batches in use take memory, the rest is page cache. The file has no name and goes away
    with this object.
    """

    def __init__(self, trace: Trace, spans: Sequence[RowRange], progress: Progress | None = None) -> None:
        """Raises TraceError where the trace lacks a field that training needs, ConfigError where the disk is full."""
        if not trace.is_real("router_inputs"):
            raise TraceError(
                f"{trace.folder}: field 'router_inputs': not in this trace, which has "
                f"{', '.join(trace.manifest.fields)}; `expertly lab trace record --full` records it"
            )
        self.layers = trace.manifest.layers
        self.num_rows = sum(span.num_rows for span in spans)
        fields = [trace.manifest.fields[name] for name in ("router_inputs", "experts", "probs") if trace.has(name)]
        self._columns: dict[str, npt.NDArray[Any]] = {}  # [L, rows, ...]
        for field in fields:
            shape = (len(self.layers), self.num_rows, field.shape[1])
            self._columns[field.name] = scratch(field.dtype, shape, "training")
        row = 0
        for span in spans:
            names = list(self._columns)
            for block in trace.blocks(names, span.first_row, span.first_row + span.num_rows, _BLOCK_ROWS):
                for name, values in block.columns.items():
                    self._columns[name][:, row : row + block.num_rows] = values.swapaxes(0, 1)
                row += block.num_rows
                if progress is not None:
                    progress("reading", row, self.num_rows)
        self.ran = self._columns["experts"][:, :, 0] != NO_EXPERT  # [L, rows]
        self.starts = self._starts(trace)

    @property
    def hidden_size(self) -> int:
        return int(self._columns["router_inputs"].shape[2])

    @property
    def has_scores(self) -> bool:
        return "probs" in self._columns

    def inputs(self, layer: int, rows: Rows) -> npt.NDArray[np.float32]:
        """[rows, H]"""
        inputs: npt.NDArray[np.float32] = self._columns["router_inputs"][layer, rows].astype(np.float32)
        return inputs

    def experts(self, layer: int, rows: Rows) -> npt.NDArray[np.int64]:
        """[rows, K]; what is not in 0..E-1 is no choice."""
        return self._columns["experts"][layer, rows, : self.layers[layer].top_k].astype(np.int64)

    def scores(self, layer: int, rows: Rows) -> npt.NDArray[np.float32]:
        """[rows, E] of the layer, which sum to 1 (0 where nothing is known of a row)."""
        scores = np.maximum(self._columns["probs"][layer, rows, : self.layers[layer].num_experts].astype(np.float32), 0)
        total = scores.sum(axis=1, keepdims=True)
        scores /= np.where(total > 0, total, np.float32(1))
        return scores

    def _starts(self, trace: Trace) -> tuple[int, ...]:
        """For each layer, the first layer of its stack: the first that ever ran in the same row."""
        starts = []
        for layer, ran in enumerate(self.ran):
            first = next((earlier for earlier in range(layer + 1) if (self.ran[earlier] & ran).any()), None)
            if first is None:
                raise TraceError(
                    f"{trace.folder}: field 'experts': layer {layer} runs in none of the rows to learn from"
                )
            starts.append(first)
        return tuple(starts)


def needed(experts: npt.NDArray[np.int64], num_experts: int) -> npt.NDArray[np.bool_]:
    """[rows, E]: whether each expert is among those chosen, [rows, K]."""
    chosen = np.zeros((len(experts), num_experts + 1), bool)
    np.put_along_axis(chosen, np.where((experts >= 0) & (experts < num_experts), experts, num_experts), True, 1)
    return chosen[:, :num_experts]

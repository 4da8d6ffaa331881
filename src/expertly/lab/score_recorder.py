"""What a full recording adds to a row: routing scores, router inputs, lookahead, the token's embedding.

T tokens, L layers, E experts, H hidden, D distances looked ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.observation import IterationInfo, layer_ahead
from expertly.model.hooks import saturated_half
from expertly.model.routers import RouterTap, attach_all, detach_all
from expertly.trace.schema import NO_EXPERT, Array, FieldInfo


class Columns:
    """A blank [T, ...] array of a trace's field for each pass, in memory that is used again."""

    def __init__(self, fields: Iterable[FieldInfo]) -> None:
        self._arrays: dict[str, Array] = {field.name: np.empty((0, *field.shape), field.dtype) for field in fields}

    def blank(self, name: str, num_rows: int) -> Array:
        """Zeros, or NO_EXPERT in `experts`; good until the next call for the same field."""
        array = self._arrays[name]
        if len(array) < num_rows:
            array = self._arrays[name] = np.empty((num_rows, *array.shape[1:]), array.dtype)
        rows = array[:num_rows]
        rows.fill(NO_EXPERT if name == "experts" else 0)
        return rows


class ScoreRecorder:
    """Watches the routers between `attach` and `detach`. `fields` says which of the optional fields are wanted.

    A layer that does not run in a pass has zeros, and so has what no layer lies so far ahead of. Past the last layer a
    lookahead is of the next token.
    """

    def __init__(
        self,
        taps: Sequence[RouterTap | None],
        embed: Callable[[npt.NDArray[np.int32]], torch.Tensor],
        fields: Mapping[str, FieldInfo],
    ) -> None:
        self._taps = taps
        self._embed = embed
        self._fields = fields
        self._columns = Columns(fields.values())
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # router input [T, H] and logits [T, E]

    def attach(self) -> None:
        attach_all(self._taps, self._router_ran)

    def detach(self) -> None:
        detach_all(self._taps)

    def begin(self) -> None:
        """A forward pass begins."""
        self._seen.clear()

    def rows(self, token: npt.NDArray[np.int32], info: IterationInfo) -> dict[str, Array]:
        """The fields [T, ...] of the pass that has just ended, T tokens; good until the next call."""
        num_rows = len(token)
        rows = {name: self._columns.blank(name, num_rows) for name in self._fields}
        with torch.no_grad():
            if "embedding" in rows:
                is_known = token >= 0
                rows["embedding"][is_known] = saturated_half(self._embed(token[is_known]))
            seen = {layer: one for layer, one in self._seen.items() if len(one[0]) == num_rows}
            for layer, (inputs, logits) in seen.items():
                tap = self._tap(layer)
                if "probs" in rows:
                    rows["probs"][:, layer, : logits.shape[-1]] = saturated_half(tap.normalised(logits))
                if "router_inputs" in rows:
                    rows["router_inputs"][:, layer, : inputs.shape[-1]] = saturated_half(inputs)
            if "lookahead" in rows:
                self._look_ahead({layer: inputs for layer, (inputs, _) in seen.items()}, info, rows["lookahead"])
        return rows

    def _look_ahead(self, inputs: Mapping[int, torch.Tensor], info: IterationInfo, lookahead: Array) -> None:
        """Ask each router about the inputs [T, H] of all layers that it lies ahead of at once."""
        stack = range(len(self._taps)) if info.layers is None else info.layers
        asked: dict[int, list[tuple[int, int]]] = {}  # layer -> layers that it lies ahead of, and how far
        for layer in inputs:
            for distance in range(1, lookahead.shape[2] + 1):
                ahead = layer_ahead(layer, distance, stack, info.decodes)
                if ahead is not None and ahead in inputs and self._width(ahead) == self._width(layer):
                    asked.setdefault(ahead, []).append((layer, distance))
        num_rows = len(lookahead)
        for ahead, behind in asked.items():
            scores = self._tap(ahead).scores(torch.cat([inputs[layer] for layer, _ in behind]))  # [len(behind) * T, E]
            for i, (layer, distance) in enumerate(behind):
                mine = scores[i * num_rows : (i + 1) * num_rows]
                lookahead[:, layer, distance - 1, : scores.shape[-1]] = saturated_half(mine)

    def _router_ran(self, layer: int, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        self._seen[layer] = inputs.detach().clone(), logits.detach()

    def _tap(self, layer: int) -> RouterTap:
        tap = self._taps[layer]
        assert tap is not None, "only those that are there were attached"
        return tap

    def _width(self, layer: int) -> int:
        return self._tap(layer).hidden_size

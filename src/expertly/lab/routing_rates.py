"""What a trace's decoded tokens show MoEpic's configurator: which experts are needed, and which were predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.observation import Floats, Want, layer_ahead
from expertly.policies.allocation.moepic import LayerRates, LayerStatistics
from expertly.sim.workload import Iteration, RowRange, TraceWorkload
from expertly.trace.reader import Trace

_WANTS: frozenset[Want] = frozenset({"experts", "lookahead"})


@dataclass(frozen=True, slots=True)
class RoutingRates:
    """The rates of all layers."""

    layers: tuple[LayerRates, ...]
    num_requests: int
    num_tokens: int  # decoded
    predicted_share: float  # of (layer, token): those for which something was predicted


def rates_of_trace(
    trace: Trace, spans: Sequence[RowRange], progress: Callable[[int, int], None] | None = None
) -> RoutingRates:
    """Count every decoded token of `spans`. An expert counts as predicted where a lookahead of one layer named it (for
    the first layer: the last layer's, at the token before); in a trace without lookahead none does. `progress(rows
    done, in all)`. Raises ConfigError where no token was decoded.
    """
    workload = TraceWorkload(trace, spans)
    gathering = _Gathering(trace)
    requests: set[int] = set()
    for iteration in workload.iterations():
        gathering.add(iteration)
        requests.update(iteration.requests)
        if progress is not None:
            progress(iteration.first_row + iteration.num_tokens, workload.num_rows)
    if not gathering.num_tokens:
        raise ConfigError(f"trace={str(trace.folder)!r}: prompts alone; decoded tokens are needed to learn from")
    share = gathering.num_predicted / max(1, gathering.num_seen)
    layers = tuple(one.rates() for one in gathering.statistics)
    return RoutingRates(layers, len(requests), gathering.num_tokens, share)


class _Gathering:
    """Counts over iterations, which must come in order."""

    def __init__(self, trace: Trace) -> None:
        self._shapes = trace.manifest.layers
        self._looks_ahead = trace.is_real("lookahead") or trace.is_modelled("lookahead")
        self.statistics = [LayerStatistics(layer.num_experts, half_life=None) for layer in self._shapes]
        self._next: dict[int, tuple[int, Floats]] = {}  # of each request: its next token's first layer, and [E]
        self.num_tokens = 0
        self.num_seen = self.num_predicted = 0  # (layer, token)

    def add(self, iteration: Iteration) -> None:
        stack = iteration.stack
        if stack is None:
            return
        rows = slice(iteration.begin, iteration.begin + iteration.num_tokens)
        is_decode = ~iteration.rows.is_prefill[rows]
        requests: list[int] = iteration.rows.request[rows].tolist()
        self.num_tokens += int(is_decode.sum())
        decodes, coming = bool(is_decode.any()), self._for_first(requests, stack.start)
        for router in iteration.layers:
            layer = router.layer
            is_last = layer == stack[-1]
            if not (decodes or is_last):
                continue
            routed = iteration.routed(router, _WANTS)
            if decodes and routed.experts is not None:
                self._observe(layer, routed.experts, coming, is_decode)
            coming = None
            ahead = layer_ahead(layer, 1, stack, decodes=True)
            if not self._looks_ahead or routed.lookahead is None or ahead is None:
                continue
            scores: Floats = routed.lookahead[:, 0, : self._shapes[ahead].num_experts]
            if is_last:
                self._next |= {request: (ahead, row) for request, row in zip(requests, scores, strict=True)}
            else:
                coming = scores

    def _for_first(self, requests: Sequence[int], layer: int) -> Floats | None:
        """[T, E]: the scores that the tokens before gave the first layer's experts, 0 where they gave none."""
        said = [self._next.get(request) for request in requests]
        if not any(one is not None and one[0] == layer for one in said):
            return None
        nothing = np.zeros(self._shapes[layer].num_experts, np.float32)
        return np.stack([nothing if one is None or one[0] != layer else one[1] for one in said])

    def _observe(
        self, layer: int, experts: npt.NDArray[np.generic], predicted: Floats | None, is_decode: npt.NDArray[np.bool_]
    ) -> None:
        self.num_seen += int(is_decode.sum())
        if predicted is None:
            self.statistics[layer].observe(experts[is_decode])
            return
        scores = predicted[is_decode]
        is_predicted: npt.NDArray[np.bool_] = (scores != 0).any(axis=1)  # zeros: nothing is known
        self.num_predicted += int(is_predicted.sum())
        self.statistics[layer].observe(experts[is_decode], scores, is_predicted)

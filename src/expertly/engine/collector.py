"""What a predictor may see of a model that runs: noted by its forward pass, made into arrays by who asks.

T rows that are no pads, E experts, K top-k, H hidden, D distances looked ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Floats, IterationInfo, Routed, Want, layer_ahead, scores_of_choices
from expertly.engine.requests import RequestNumbers
from expertly.model.hooks import saturated_half
from expertly.model.routers import RouterTap, attach_all, detach_all

Mask = npt.NDArray[np.bool_]
OF_ROUTERS: frozenset[Want] = frozenset({"scores", "inputs", "lookahead"})
"""What only the routers themselves can show."""

Embed = Callable[[npt.NDArray[np.int32]], torch.Tensor]
"""Token ids [T] to what the model's input embedding makes of them, [T, H]."""


class Collector:
    """Watches the routers from `attach` to `detach`.

    `begin` and `routed` note references, and copies of what the model may overwrite. The functions that they return do
    the arithmetic, once and in any thread, and round through float16 as a trace does: who predicts from a recorded
    trace sees the same.
    """

    def __init__(
        self,
        wants: Collection[Want],
        layers: Sequence[LayerGeometry],
        taps: Sequence[RouterTap | None],
        embed: Embed,
        distance: int,
    ) -> None:
        """`taps` of all layers, where OF_ROUTERS are wanted. Raises ConfigError where a router cannot look
        ahead as it should.
        """
        self.collect_ns = 0
        """Time that the forward pass spent here."""
        self._wants = frozenset(wants)
        self._layers = layers
        self._taps = taps if self._wants & OF_ROUTERS else ()
        self._embed = embed
        self._distance = min(distance, len(layers) - 1)
        self._requests = RequestNumbers()
        self._info: IterationInfo | None = None
        self._is_real: Mask | None = None  # None: all rows are
        self._seen: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # router input [T, H], logits [T, E]
        deaf = [layer for layer, tap in enumerate(taps) if tap is None or not tap.can_look_ahead]
        if "lookahead" in self._wants and deaf:
            raise ConfigError(f"prediction: it looks ahead, but nothing can ask the routers of layers {deaf} to do so")
        unseen = [layer for layer, tap in enumerate(taps) if tap is None]
        if "inputs" in self._wants and unseen:
            raise ConfigError(f"prediction: it needs the routers' inputs, which layers {unseen} do not show")

    @property
    def is_open(self) -> bool:
        """Is a pass under way that has rows to speak of?"""
        return self._info is not None

    def attach(self) -> None:
        attach_all(self._taps, self._router_ran)

    def detach(self) -> None:
        detach_all(self._taps)

    # -- in the forward pass -----------------------------------------------------------------------------------

    def begin(self, info: IterationInfo) -> Callable[[], Began] | None:
        """A pass begins; None where it has only pads."""
        start = perf_counter_ns()
        self._seen = {}
        self._info = None
        requests, is_real = self._requests.of_rows(info), None if info.is_pad is None else ~info.is_pad
        if is_real is not None and not is_real.any():
            return None
        self._info, self._is_real = info, is_real
        began = partial(self._began, info, requests, is_real)
        self.collect_ns += perf_counter_ns() - start
        return began

    def routed(
        self, demand: RouterRan, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Callable[[], Routed] | None:
        """A router has chosen [T, K] with weights [T, K]; None where these are not the rows of the pass."""
        start = perf_counter_ns()
        seen = self._seen.pop(demand.layer, None)
        if self._info is None or len(top_k_index) != len(self._info.is_prefill):
            return None
        if seen is not None and len(seen[1]) != len(top_k_index):
            seen = None
        routed = partial(self._routed, demand, top_k_index, top_k_weights, seen, self._is_real, self._info)
        self.collect_ns += perf_counter_ns() - start
        return routed

    def end(self) -> None:
        """The pass has ended."""
        self._info = None
        self._seen = {}

    def _router_ran(self, layer: int, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        start = perf_counter_ns()
        kept = inputs.detach().clone() if self._wants & {"lookahead", "inputs"} else None
        self._seen[layer] = kept, logits.detach()
        self.collect_ns += perf_counter_ns() - start

    # -- where it is asked for ---------------------------------------------------------------------------------

    def _began(self, info: IterationInfo, requests: npt.NDArray[np.int64], is_real: Mask | None) -> Began:
        embedding = None
        if "embedding" in self._wants:
            if info.embeddings is not None:
                embedding = _cut(info.embeddings, is_real)
            elif info.token_ids is not None:
                with torch.no_grad():
                    embedding = saturated_half(self._embed(_cut(info.token_ids, is_real)))
        token_ids = info.token_ids if "token_ids" in self._wants else None
        return Began(
            _read_only(_cut(requests, is_real)),
            _read_only(_cut(info.is_prefill, is_real)),
            None if embedding is None else _read_only(embedding.astype(np.float32)),
            info.layers,
            None if token_ids is None else _read_only(_cut(token_ids, is_real)),
        )

    def _routed(
        self,
        demand: RouterRan,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        seen: tuple[torch.Tensor | None, torch.Tensor] | None,
        is_real: Mask | None,
        info: IterationInfo,
    ) -> Routed:
        wants = self._wants
        experts = scores = given = lookahead = None
        if wants & {"experts", "scores"}:
            experts = _cut(top_k_index.cpu().numpy(), is_real)
        if "scores" in wants:
            scores = self._scores(demand.layer, seen, experts, top_k_weights, is_real)
        if seen is not None and seen[0] is not None:
            inputs = seen[0] if is_real is None else seen[0][torch.from_numpy(is_real).to(seen[0].device)]
            if "inputs" in wants:
                given = saturated_half(inputs).astype(np.float32)
            if "lookahead" in wants:
                lookahead = self._look_ahead(demand.layer, inputs, info)
        parts = (experts, scores, lookahead, given)
        return Routed(demand, *(None if one is None else _read_only(one) for one in parts))

    def _scores(self, layer: int, seen: Any, experts: Any, top_k_weights: torch.Tensor, is_real: Mask | None) -> Floats:
        tap = self._taps[layer]
        if seen is None or tap is None:  # what is known of the router is what it chose
            weights = _cut(saturated_half(top_k_weights.detach()), is_real)
            return scores_of_choices(experts, weights.astype(np.float32), self._layers[layer].num_experts)
        scores: Floats = _cut(tap.normalised(seen[1]).half().cpu().numpy(), is_real).astype(np.float32)
        return scores

    def _look_ahead(self, layer: int, inputs: torch.Tensor, info: IterationInfo) -> Floats:
        """[T, D, E], 0 where no layer is so far ahead, and for layers of another width."""
        stack = range(len(self._layers)) if info.layers is None else info.layers
        num_experts = max(one.num_experts for one in self._layers)
        lookahead = np.zeros((len(inputs), self._distance, num_experts), np.float32)
        for distance in range(1, self._distance + 1):
            ahead = layer_ahead(layer, distance, stack, info.decodes)
            if ahead is None:
                break
            tap = self._taps[ahead]
            if tap is not None and tap.hidden_size == inputs.shape[-1]:
                scores = tap.scores(inputs).half().cpu().numpy()
                lookahead[:, distance - 1, : scores.shape[-1]] = scores
        return lookahead


def _cut(values: npt.NDArray[Any], is_real: Mask | None) -> npt.NDArray[Any]:
    return values if is_real is None else values[is_real]


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.setflags(write=False)
    return values

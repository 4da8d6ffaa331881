"""Records what a loaded model routes, as a trace in a folder, for as long as a `with` block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from expertly.api import handle
from expertly.core.errors import ModelUseError, TraceError
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, IterationInfo, Routed, Want
from expertly.engine.observe import Collector, embedder
from expertly.model.routers import HookedRouter, find_routers
from expertly.model.structure import dense_shape
from expertly_lab.trace.schema import NO_EXPERT, Array, FieldInfo, TraceLayer, trace_field
from expertly_lab.trace.writer import TraceWriter


class Recording:
    """An observer of the engine that writes a pass's rows without padding, in the order in which experts see them. A
    pass that fails, or runs no MoE layer, is left out. `absent`: fields that cannot be recorded, with reasons.
    """

    wants_token_ids = True

    def __init__(
        self,
        writer: TraceWriter,
        layers: Sequence[TraceLayer],
        collector: Collector | None,
        fields: Mapping[str, FieldInfo],
        absent: dict[str, str],
    ) -> None:
        self.writer = writer
        self.absent = absent
        self._requests: npt.NDArray[np.int32] | None = None  # of a batch; None: the last one begun
        self._collector = collector
        self._fields = fields
        self._num_experts = np.array([layer.num_experts for layer in layers])
        self._top_k = [layer.top_k for layer in layers]
        self._chosen = [trace_field(name, layers) for name in ("experts", "weights")]
        self._info: IterationInfo | None = None
        self._ran: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._began: Callable[[], Began] | None = None
        self._routed: list[Callable[[], Routed]] = []

    def begin_request(self, category: str | None = None, prompt: str | None = None, num_prompt_tokens: int = 0) -> int:
        """What the model runs from now on belongs to a new request. Returns its number."""
        self._requests = None
        return self.writer.begin_request(category, prompt, num_prompt_tokens)

    def begin_batch(self, requests: Sequence[int]) -> None:
        """What the model runs from now on is a batch; `requests` are the numbers of its sequences' requests."""
        self._requests = np.array(requests, np.int32)

    def begin_iteration(self, info: IterationInfo) -> None:
        self._info = info
        self._ran, self._routed = {}, []
        self._began = None if self._collector is None else self._collector.begin(info)

    def router_ran(
        self, layer: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> None:
        # Copied once for all layers at the end: a copy a layer would make an accelerator wait each time.
        if self._info is not None and len(top_k_index) == len(self._info.is_prefill):
            self._ran[layer] = top_k_index, top_k_weights
            if self._collector is not None:
                routed = self._collector.routed(RouterRan(layer, [], [], [], 0), top_k_index, top_k_weights)
                self._routed += [] if routed is None else [routed]

    def end_iteration(self, ok: bool) -> None:
        info, self._info = self._info, None
        ran, self._ran = self._ran, {}
        if info is None or not ok or not ran:
            return
        rows = self._rows(info, ran)
        if info.is_pad is not None:
            is_real = ~info.is_pad
            rows = {name: column[is_real] for name, column in rows.items()}
        if len(rows["token"]):
            self.writer.append(rows | self._optional(len(rows["token"])))

    def _rows(self, info: IterationInfo, ran: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Array]:
        num_rows = len(info.is_prefill)
        experts, weights = (_blank(field, num_rows) for field in self._chosen)
        for top_k in dict.fromkeys(self._top_k[layer] for layer in ran):
            layers = [layer for layer in ran if self._top_k[layer] == top_k]
            index = torch.stack([ran[layer][0] for layer in layers], 1).cpu().numpy()  # [T, layers, K]
            is_none = (index < 0) | (index >= self._num_experts[layers, None])
            experts[:, layers, :top_k] = np.where(is_none, NO_EXPERT, index)
            weights[:, layers, :top_k] = torch.stack([ran[layer][1] for layer in layers], 1).half().cpu().numpy()
        token = np.full(num_rows, -1, np.int32) if info.token_ids is None else info.token_ids
        rows = {"token": token, "is_prefill": info.is_prefill, "experts": experts, "weights": weights}
        return rows if self._requests is None else rows | {"request": self._request_of_rows(info)}

    def _optional(self, num_rows: int) -> dict[str, Array]:
        """The optional fields of the pass that ended. A layer that did not run has zeros."""
        rows = {name: _blank(field, num_rows) for name, field in self._fields.items()}
        embedding = None if self._began is None else self._began().embedding
        if "embedding" in rows and embedding is not None:
            rows["embedding"][:] = embedding
        for shown in (routed() for routed in self._routed):
            for name in rows.keys() - {"embedding"}:
                values = getattr(shown, COLLECTED[name])
                rows[name][:, shown.layer][tuple(map(slice, values.shape))] = values
        return rows

    def _request_of_rows(self, info: IterationInfo) -> Array:
        assert self._requests is not None and info.sequences is not None, "the engine asks for them"
        if info.num_requests != len(self._requests):
            raise TraceError(
                f"a batch of {info.num_requests} sequences, but {len(self._requests)} requests were named for its rows"
            )
        return self._requests[info.sequences]


def _blank(field: FieldInfo, num_rows: int) -> Array:
    """[T, ...] zeros, or NO_EXPERT in `experts`."""
    return np.full((num_rows, *field.shape), NO_EXPERT if field.name == "experts" else 0, field.dtype)


MAX_DISTANCE = 8
"""How many layers ahead `lookahead` looks."""

COLLECTED: Mapping[str, Want] = {
    "embedding": "embedding",
    "probs": "scores",
    "router_inputs": "inputs",
    "lookahead": "lookahead",
}
"""The optional fields of a trace, as a Collector calls them."""


@contextmanager
def record(
    model: Any, folder: Path, *, full: bool = False, name: str | None = None, created: str = "", command: str = ""
) -> Iterator[Recording]:
    """Record every forward pass of a loaded model until the block ends; announce requests before they run.

    `full` adds routing scores, router inputs, lookahead and embeddings, as far as the model has them. Tokens do not
    change. An exception in the block leaves the trace partial, with all that was recorded. Raises TraceError where
    `folder` is not new or empty, ModelUseError where the model is being recorded already.
    """
    loaded = handle(model)
    if loaded.engine.observer is not None:
        raise ModelUseError("this model is being recorded already: one recording at a time")
    geometry = loaded.store.manifest.layers
    layers = tuple(TraceLayer.of(layer) for layer in geometry)
    routers = find_routers(model, geometry)
    fields, absent = _optional_fields(model, layers, routers) if full else ({}, {})
    note = "; ".join(f"no {field}: {reason}" for field, reason in absent.items())
    writer = TraceWriter(
        folder,
        model=name or loaded.store.manifest.source,
        layers=layers,
        fields=[trace_field("experts", layers, note=note), *fields.values()],
        dense=dense_shape(model),
        created=created,
        command=command,
    )
    wants = {COLLECTED[name] for name in fields}
    collector = Collector(wants, geometry, routers, embedder(model), MAX_DISTANCE) if fields else None
    recording = Recording(writer, layers, collector, fields, absent)
    with writer:
        if collector is not None:
            collector.attach()
        loaded.engine.observer = recording
        try:
            yield recording
        finally:
            loaded.engine.observer = None
            if collector is not None:
                collector.detach()


def _optional_fields(
    model: Any, layers: Sequence[TraceLayer], routers: Sequence[HookedRouter | None]
) -> tuple[dict[str, FieldInfo], dict[str, str]]:
    """The fields of a full recording, and why the others cannot be there."""
    unseen = [layer for layer, router in enumerate(routers) if router is None]
    deaf = [layer for layer, router in enumerate(routers) if router is not None and not router.can_look_ahead]
    width = max((router.hidden_size for router in routers if router is not None), default=1)
    fields = {"embedding": trace_field("embedding", layers, hidden_size=model.get_input_embeddings().weight.shape[1])}
    absent = {}
    if unseen:
        reason = f"no router was found beside the experts of layers {_listed(unseen)}"
        absent = dict.fromkeys(("probs", "router_inputs", "lookahead"), reason)
    else:
        fields["probs"] = trace_field("probs", layers)
        fields["router_inputs"] = trace_field("router_inputs", layers, hidden_size=width)
        if deaf:
            absent["lookahead"] = f"the routers of layers {_listed(deaf)} need more than hidden states"
        else:
            fields["lookahead"] = trace_field("lookahead", layers, max_distance=MAX_DISTANCE)
    return fields, absent


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:5])) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")

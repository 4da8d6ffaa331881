"""Recording what a loaded model routes: a trace in a folder, for as long as a `with` block runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from expertly.api import handle
from expertly.core.errors import ModelUseError
from expertly.engine.observe import embedder
from expertly.lab.recorder import Recorder
from expertly.lab.score_recorder import ScoreRecorder
from expertly.model.routers import RouterTap, find_routers
from expertly.model.structure import dense_shape
from expertly.trace.schema import FieldInfo, TraceLayer, trace_field
from expertly.trace.writer import TraceWriter

MAX_DISTANCE = 8
"""Layers that `lookahead` looks ahead."""


class Recording:
    """A recording under way. `absent` says of each optional field that was asked for why it is not there."""

    def __init__(self, writer: TraceWriter, recorder: Recorder, absent: dict[str, str]) -> None:
        self.absent = absent
        self._writer = writer
        self._recorder = recorder

    @property
    def num_rows(self) -> int:
        return self._writer.num_rows

    @property
    def num_iterations(self) -> int:
        return self._writer.num_iterations

    def begin_request(self, category: str | None = None, prompt: str | None = None, num_prompt_tokens: int = 0) -> int:
        """What the model runs from now on belongs to a new request. Returns its number."""
        self._recorder.requests = None
        return self._writer.begin_request(category, prompt, num_prompt_tokens)

    def begin_batch(self, requests: Sequence[int]) -> None:
        """What the model runs from now on is a batch; `requests` are the numbers of its sequences' requests."""
        self._recorder.requests = np.array(requests, np.int32)


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
    taps = find_routers(model, geometry)
    fields, absent = _optional_fields(model, layers, taps) if full else ({}, {})
    note = "; ".join(f"no {field}: {reason}" for field, reason in absent.items())
    writer = TraceWriter(
        folder,
        model=name or loaded.store.manifest.source,
        layers=layers,
        fields=[trace_field("experts", layers, note=note), *fields.values()],
        dense=dense_shape(model),
        scoring=_scoring(taps),
        created=created,
        command=command,
    )
    scores = ScoreRecorder(taps, embedder(model), fields) if fields else None
    recorder = Recorder(layers, writer.append, scores)
    with writer:
        if scores is not None:
            scores.attach()
        loaded.engine.observer = recorder
        try:
            yield Recording(writer, recorder, absent)
        finally:
            loaded.engine.observer = None
            if scores is not None:
                scores.detach()


def _optional_fields(
    model: Any, layers: Sequence[TraceLayer], taps: Sequence[RouterTap | None]
) -> tuple[dict[str, FieldInfo], dict[str, str]]:
    """The fields of a full recording, and why the others cannot be there."""
    unseen = [layer for layer, tap in enumerate(taps) if tap is None]
    deaf = [layer for layer, tap in enumerate(taps) if tap is not None and not tap.can_look_ahead]
    width = max((tap.hidden_size for tap in taps if tap is not None), default=1)
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


def _listed(layers: Sequence[int], limit: int = 5) -> str:
    return ", ".join(map(str, layers[:limit])) + (f" and {len(layers) - limit} more" if len(layers) > limit else "")


def _scoring(taps: Sequence[RouterTap | None]) -> str:
    found = {None if tap is None else tap.scoring for tap in taps}
    scoring = found.pop()
    return scoring if scoring is not None and not found else "unknown"

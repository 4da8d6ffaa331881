"""A loaded model without an engine: its runtime asks the unmodified model's own experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expertly.core.observation import IterationInfo
from expertly.model.loading import load_dense
from expertly.model.packing import pack
from expertly.store.manifest import Manifest
from tests.families import load_reference


@dataclass
class Iteration:
    """One begin and end as the runtime saw them, and the rows of each layer that ran in between."""

    info: IterationInfo
    ok: bool | None = None
    layer_rows: list[tuple[int, int]] = field(default_factory=list)  # (layer, T)


class ToyRuntime:
    """Keeps what it was told."""

    wants_token_ids = False

    def __init__(self, reference: Any, manifest: Manifest) -> None:
        self.experts = [reference.get_submodule(site) for site in manifest.sites]
        self.layers = manifest.layers
        self.iterations: list[Iteration] = []
        self.num_calls = 0
        self.fail_at_call: int | None = None
        self.failure: BaseException = OSError("the disk said no")

    def begin_iteration(self, info: IterationInfo) -> None:
        assert not self.iterations or self.iterations[-1].ok is not None
        self.iterations.append(Iteration(info))

    def check_logits(self, logits: torch.Tensor) -> None: ...

    def check_output(self, hidden_states: torch.Tensor) -> None:
        assert hidden_states.dim() == 3

    def end_iteration(self, ok: bool) -> None:
        assert self.iterations[-1].ok is None
        self.iterations[-1].ok = ok

    def forward_experts(
        self,
        module: nn.Module,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == self.fail_at_call:
            raise self.failure
        geometry = self.layers[layer]
        assert hidden_states.shape[1] == geometry.hidden_size
        assert top_k_index.shape == top_k_weights.shape == (hidden_states.shape[0], geometry.top_k)
        if self.iterations and self.iterations[-1].ok is None:
            self.iterations[-1].layer_rows.append((layer, hidden_states.shape[0]))
        with torch.no_grad():
            output: torch.Tensor = self.experts[layer].forward(hidden_states, top_k_index, top_k_weights)
        return output


@dataclass
class Toy:
    """A checkpoint, its store, the unmodified model and the one loaded from the store."""

    source: Path
    store: Path
    manifest: Manifest
    reference: Any
    runtime: ToyRuntime
    model: Any

    @classmethod
    def make(cls, source: Path, store: Path, dtype: torch.dtype = torch.float32) -> Toy:
        manifest = pack(source, store, str(dtype).removeprefix("torch.")).manifest
        reference = load_reference(source, dtype=dtype)
        runtime = ToyRuntime(reference, manifest)
        return cls(source, store, manifest, reference, runtime, load_dense(store, manifest, dtype, "cpu", runtime))

"""A store without a packer and a runtime without an engine: the whole weights, in the canonical layout, in Python."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

from expertly.core.observation import IterationInfo
from expertly.model.loading import load_dense
from expertly.model.structure import build_meta_model, find_experts
from expertly.store.manifest import Manifest
from tests.families import load_reference
from tests.model.checkpoints import canonical

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_GRANITE_EXPERTS = ("input_linear.weight", "output_linear.weight")


def is_expert_weight(name: str) -> bool:
    """Is this tensor of a checkpoint part of an expert's matrices?"""
    return (".experts." in name and not name.endswith("bias")) or name.endswith(_GRANITE_EXPERTS)


def make_toy_store(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Manifest:
    """The dense tensors of a checkpoint in the layout of a packed store, and its manifest; no expert bytes."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".json" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    dense = {name: tensor for name, tensor in tensors.items() if not is_expert_weight(name)}
    assert len(dense) < len(tensors)
    save_file(dense, folder / "dense.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(dense, "dense.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sites = find_experts(build_meta_model(source), dtype.itemsize)
    return Manifest(
        identity="toy",
        source=str(source),
        model_type="toy",
        dtype=_DTYPES[dtype],
        layers=tuple(site.geometry for site in sites),
        sites=tuple(site.name for site in sites),
        files={},
    )


@dataclass
class Iteration:
    """One begin and end as the runtime saw them, and the rows of each layer that ran in between."""

    info: IterationInfo
    ok: bool | None = None
    layer_rows: list[tuple[int, int]] = field(default_factory=list)  # (layer, T)


class ToyRuntime:
    """Computes experts from the canonical layout, token by token; keeps what it was told."""

    wants_token_ids = False

    def __init__(self, source: Path, dtype: torch.dtype = torch.float32) -> None:
        self.reference = load_reference(source, dtype=dtype)
        state = self.reference.state_dict()
        self.sites = find_experts(build_meta_model(source), dtype.itemsize)
        self.weights = [canonical(site, state) for site in self.sites]
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
        geometry = self.sites[layer].geometry
        assert hidden_states.shape[1] == geometry.hidden_size
        assert top_k_index.shape == top_k_weights.shape == (hidden_states.shape[0], geometry.top_k)
        if self.iterations and self.iterations[-1].ok is None:
            self.iterations[-1].layer_rows.append((layer, hidden_states.shape[0]))
        output = torch.zeros_like(hidden_states)
        for token, ids in enumerate(top_k_index.tolist()):
            for k, expert in enumerate(ids):
                if expert < geometry.num_experts:
                    one = self._expert(module, layer, expert, hidden_states[token])
                    output[token] += (one * top_k_weights[token, k]).to(output.dtype)
        return output

    def _expert(self, module: Any, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        site, rows = self.sites[layer], self.weights[layer][expert].unbind(1)
        inner = [linear(x, matrix) for matrix in rows[:-1]]
        if not site.has_gate:
            return linear(module.act_fn(inner[0]), rows[-1].T)
        fused = torch.cat(inner, -1) if site.is_concatenated else torch.stack(inner, -1).flatten(-2)
        if getattr(module, "has_bias", False):
            fused = fused + module.gate_up_proj_bias[expert]
        output = linear(module._apply_gate(fused), rows[-1].T)
        return output + module.down_proj_bias[expert] if getattr(module, "has_bias", False) else output


@dataclass
class Toy:
    """A checkpoint, its toy store and a model loaded from it."""

    source: Path
    store: Path
    manifest: Manifest
    runtime: ToyRuntime
    model: Any

    @property
    def reference(self) -> Any:
        """The unmodified model."""
        return self.runtime.reference

    @classmethod
    def make(cls, source: Path, store: Path, dtype: torch.dtype = torch.float32) -> Toy:
        manifest = make_toy_store(source, store, dtype)
        runtime = ToyRuntime(source, dtype)
        return cls(source, store, manifest, runtime, load_dense(store, manifest, dtype, "cpu", runtime))

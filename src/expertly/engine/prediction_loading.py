"""From a loaded model and a system to what predicts for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from expertly.engine.collector import OF_ROUTERS, Collector, Embed
from expertly.engine.engine import Engine
from expertly.engine.prediction import Matcher, Prefetching
from expertly.engine.saved_maps import SavedMaps
from expertly.models.routers import RouterTap, find_routers
from expertly.parts import System
from expertly.policies.predictor.fmoe import FMoE
from expertly.store.packed import PackedStore


def make_prefetching(
    system: System,
    model: Any,
    store: PackedStore,
    engine: Engine,
    matcher: Matcher,
    maps: Path | None,
    *,
    path_is_auto: bool,
) -> Prefetching | None:
    """What predicts for a loaded model; None where the system does not. `maps`: see SavedMaps.

    Where router scores are wanted, one forward pass shows where the routers are; the engine is not told of it. Raises
    ConfigError where the model cannot show what the predictor must see, StoreError as SavedMaps.read.
    """
    geometry = engine.controller.geometry
    predictor = system.predictor(geometry)
    if predictor is None:
        return None
    taps: Sequence[RouterTap | None] = ()
    if predictor.wants & OF_ROUTERS:
        taps = find_routers(model, geometry.layers)
    collector = Collector(predictor.wants, geometry.layers, taps, embedder(model), system.distance)
    saved = None
    if maps is not None and isinstance(predictor, FMoE):
        manifest = store.manifest
        saved = SavedMaps(maps, path_is_auto, manifest.identity, manifest.source, predictor)
        saved.read(geometry, model.get_input_embeddings().weight.shape[1])
    return Prefetching(engine.controller, engine.backend, predictor, collector, matcher, saved)


def embedder(model: Any) -> Embed:
    """Ids [T] to what the input embedding makes of them, [T, H]. It holds on to the embedding, not to the model."""
    module = model.get_input_embeddings()

    def embed(token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        embedded: torch.Tensor = module.forward(torch.from_numpy(token_ids.astype(np.int64)).to(module.weight.device))
        return embedded

    return embed

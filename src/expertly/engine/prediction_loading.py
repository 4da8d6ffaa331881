"""From a loaded model and a system to what predicts for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.errors import ConfigError
from expertly.engine.collector import OF_ROUTERS, Collector, Embed
from expertly.engine.learned import LearnedFiles, SavedState
from expertly.engine.prediction import Matcher, Prefetching
from expertly.engine.runtime import Engine
from expertly.model.routers import RouterTap, find_routers
from expertly.policies.known import Known
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore


def make_prefetching(
    system: System,
    model: Any,
    store: PackedStore,
    engine: Engine,
    matcher: Matcher,
    files: LearnedFiles,
    *,
    weights: LearnedWeights | None = None,
) -> Prefetching | None:
    """What predicts for a loaded model; None where the system does not. `weights`: of a learned predictor.

    Where router scores are wanted, one forward pass shows where the routers are; the engine is not told of it. Raises
    ConfigError where the model cannot show what the predictor must see, or the weights are of another; StoreError as
    SavedState.read.
    """
    geometry = engine.executor.geometry
    predictor = system.predictor(geometry, Known(learned=weights))
    if predictor is None:
        return None
    taps: Sequence[RouterTap | None] = ()
    if predictor.wants & OF_ROUTERS:
        taps = find_routers(model, geometry.layers)
    if weights is not None:
        _check_width(weights, taps)
    collector = Collector(predictor.wants, geometry.layers, taps, embedder(model), system.distance)
    saved = None
    if files.of_prediction is not None and predictor.learned is not None:
        manifest = store.manifest
        saved = SavedState(predictor, files.of_prediction, manifest.identity, manifest.source, is_auto=files.is_auto)
        saved.read(model.get_input_embeddings().weight.shape[1])
    return Prefetching(engine.executor, predictor, collector, matcher, saved)


def _check_width(weights: LearnedWeights, taps: Sequence[RouterTap | None]) -> None:
    width = max((tap.hidden_size for tap in taps if tap is not None), default=0)
    if weights.mlps and width != weights.hidden_size:
        raise ConfigError(
            f"predictor: its weights are for router inputs of {weights.hidden_size} numbers; this model's have {width}"
        )


def embedder(model: Any) -> Embed:
    """Ids [T] to what the input embedding makes of them, [T, H]. It holds on to the embedding, not to the model."""
    module = model.get_input_embeddings()

    def embed(token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        embedded: torch.Tensor = module.forward(torch.from_numpy(token_ids.astype(np.int64)).to(module.weight.device))
        return embedded

    return embed

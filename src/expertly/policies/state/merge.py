"""Several map stores made one, and a store made smaller: what is redundant goes, as in fMoE, section 4.4."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from expertly.core.errors import ConfigError
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import MapStore


def merged(stores: Sequence[MapStore], capacity: int) -> MapStore:
    """A store of `capacity` maps, given those of `stores` (at least one) one after the other, each oldest first.

    Weight and quota are the first one's. Requests of two stores are never the same: they are numbered down from -1.
    Raises ConfigError where shapes or embeddings differ.
    """
    first = stores[0]
    out = MapStore(first.shape, capacity, semantic_weight=first.semantic_weight, quota=first.quota)
    sizes = {store.embeddings.shape[1] for store in stores if store.embeddings is not None}
    if len(sizes) > 1:
        raise ConfigError(f"embeddings of {' and '.join(map(str, sorted(sizes)))} numbers: not of one model")
    num_requests = 0
    for store in stores:
        if store.shape != first.shape:
            raise ConfigError("maps of other layers, experts or top-k: not of one model")
        order = np.argsort(store.born[: store.num_maps], kind="stable")
        found, ranks = np.unique(store.requests[order], return_inverse=True)
        out.add(
            store.maps[:, order].transpose(1, 0, 2),
            store.chosen[order],
            -1 - num_requests - ranks.reshape(-1),
            None if store.embeddings is None else store.embeddings[order],
        )
        num_requests += len(found)
    return out


def merged_matrices(stores: Sequence[Matrices], capacity: int) -> Matrices:
    """The same of activation matrices: each given one after the other, the oldest first, and in a full collection each
    replaces the nearest to it. Raises ConfigError where shapes differ.
    """
    out = Matrices(stores[0].shape, capacity)
    for store in stores:
        if store.shape != out.shape:
            raise ConfigError("matrices of other layers, experts or top-k: not of one model")
        out.extend(store)
    return out

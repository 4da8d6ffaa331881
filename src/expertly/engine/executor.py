"""What the engine asks of whoever holds the experts of a model: a Shard, or with workers a Cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Routed
from expertly.engine.compute import Dispatch, Early
from expertly.engine.remote import RemoteShard
from expertly.engine.shard import Shard, Waits
from expertly.scheduler.counters import LayerCounters


class Executor(Protocol):
    """All experts of one model. One call at a time. `Shard` documents the methods."""

    geometry: Geometry
    remotes: Sequence[RemoteShard]

    @property
    def shard(self) -> Shard:
        """This machine's part of it."""

    def bind(self, modules: Sequence[nn.Module]) -> None: ...

    def begin(self) -> None: ...

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None, early: Early | None = None
    ) -> tuple[torch.Tensor, Waits]: ...

    def note_times(self, router: RouterRan, begin: Any, end: Any, waits: Waits) -> None: ...

    def settle(self) -> None: ...

    def layer_counters(self, layer: int) -> LayerCounters: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...

"""The options of all importers."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.errors import TraceError
from expertly.core.geometry import DenseShape
from expertly.trace.schema import TraceLayer


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What a source may leave open. `layers` must fit what the source says."""

    model: str
    layers: tuple[TraceLayer, ...] | None = None
    dense: DenseShape | None = None
    num_experts: int | None = None
    created: str = ""
    command: str = ""

    def layers_of(self, where: str, num_layers: int, top_k: int, guessed_experts: int) -> tuple[TraceLayer, ...]:
        """The layers of a source that has `num_layers` layers of `top_k`.

        Raises TraceError if `self.layers` are not those.
        """
        if self.layers is None:
            return (TraceLayer(self.num_experts or guessed_experts, top_k),) * num_layers
        if len(self.layers) != num_layers:
            raise TraceError(f"{where}: {num_layers} layers, but the geometry has {len(self.layers)}")
        largest = max(layer.top_k for layer in self.layers)
        if largest != top_k:
            raise TraceError(f"{where}: top-{top_k} routing, but the geometry chooses {largest}")
        for layer in self.layers:
            if self.num_experts not in (None, layer.num_experts):
                raise TraceError(f"num_experts={self.num_experts}: but the geometry has {layer.num_experts}")
        return self.layers

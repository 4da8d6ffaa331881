"""The sizes of a trace's experts: its own, or those of a description that is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expertly.core.errors import TraceError

if TYPE_CHECKING:
    from expertly.trace.reader import Trace


def trace_geometry(trace: Trace, name: str | None) -> tuple[Any, Any, str | None]:
    """Layers and dense shape to simulate, and where they come from; None where nobody knows the sizes."""
    from expertly.sim.hardware import read_geometry

    manifest = trace.manifest
    if name is None:
        layers = tuple(layer.geometry() for layer in manifest.layers)
        if any(layer is None for layer in layers):
            return None, None, None
        return layers, manifest.dense, "trace"
    given = read_geometry(name)
    routed = [(layer.num_experts, layer.top_k) for layer in manifest.layers]
    if [(layer.num_experts, layer.top_k) for layer in given.layers] != routed:
        raise TraceError(
            f"geometry={name!r}: {_shape_of(given.layers)}, but {trace.folder} routes {_shape_of(manifest.layers)}"
        )
    return given.layers, given.dense, given.name


def _shape_of(layers: Any) -> str:
    return f"{len(layers)} layers of {layers[0].num_experts} experts, top-{layers[0].top_k}"

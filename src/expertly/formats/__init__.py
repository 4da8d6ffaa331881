"""Weight formats: how quantised experts lie in bytes. A format is one file here, and in native/ a function of its own.

The store, slots and transfers see bytes; a format says how many, takes them from a checkpoint's own tensors, and gives
the weights back. Formats are found by their names, in `FORMATS`.
"""

from __future__ import annotations

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.formats.fp8 import FP8
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.tiles import TiledFormat

__all__ = ["FORMATS", "TiledFormat", "check_format"]

FORMATS: dict[str, TiledFormat] = {one.name: one for one in (MXFP4, FP8)}


def check_format(layer: LayerGeometry) -> None:
    """Raises ConfigError where the layer's format is unknown, or its blocks are not that format's."""
    if not layer.format:
        return
    if layer.format not in FORMATS:
        raise ConfigError(f"format={layer.format!r:.80}: unknown; accepted: {', '.join(FORMATS)}")
    expected = FORMATS[layer.format].geometry(layer)
    if layer != expected:
        raise ConfigError(
            f"block_size={layer.block_size}, block_nbytes={layer.block_nbytes}: must be {expected.block_size} and "
            f"{expected.block_nbytes} in {layer.format}"
        )

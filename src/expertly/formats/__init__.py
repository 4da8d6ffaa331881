"""Weight formats: how quantised experts lie in bytes. A format is one file here, and in native/ a function of its own.

The store, slots and transfers see bytes; a format says how many, takes them from a checkpoint's own tensors, and gives
the weights back. Formats are found by their names, in `FORMATS`.
"""

from __future__ import annotations

from functools import cache

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.formats.fp8 import FP8
from expertly.formats.gguf import GGUF_FORMATS, Q4_0, Q8_0
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.tiles import ExpertFormat, RoundingFormat, TiledFormat

__all__ = [
    "FORMATS",
    "ROUNDED_TO",
    "ExpertFormat",
    "RoundingFormat",
    "TiledFormat",
    "check_format",
    "expert_format",
    "rounding_format",
]

FORMATS: dict[str, TiledFormat] = {one.name: one for one in (MXFP4, FP8, *GGUF_FORMATS)}

ROUNDED_TO: dict[str, RoundingFormat] = {"mxfp4": MXFP4, "int4": Q4_0, "int8": Q8_0}
"""What weights of a checkpoint that is not quantised can be rounded to, as --quantize calls it."""


def rounding_format(name: object) -> RoundingFormat:
    """Of a name in ROUNDED_TO. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in ROUNDED_TO:
        raise ConfigError(f"quantize={name!r:.80}: not a format to round to; accepted: {', '.join(ROUNDED_TO)}")
    return ROUNDED_TO[name]


@cache
def expert_format(name: str) -> ExpertFormat:
    """Of a name in FORMATS, or two with a plus: gate's and up's, then down's. Raises ConfigError for another."""
    inner, _, down = name.partition("+")
    for one in (inner, down or inner):
        if one not in FORMATS:
            raise ConfigError(f"format={name!r:.80}: unknown; accepted: {', '.join(FORMATS)}")
    return ExpertFormat(FORMATS[inner], FORMATS[down or inner])


def check_format(layer: LayerGeometry) -> None:
    """Raises ConfigError where the layer's format is unknown, or its blocks are not that format's."""
    if not layer.format:
        return
    expected = expert_format(layer.format).geometry(layer)
    if layer != expected:
        raise ConfigError(
            f"block_size={layer.block_size}, block_nbytes={layer.block_nbytes}: must be {expected.block_size} and "
            f"{expected.block_nbytes} in {layer.format}"
        )

"""Weight formats: how quantised experts lie in bytes. A format is one file here and one function in native/.

Store, slots and transfers see bytes. A format gives their number, makes them from a checkpoint's tensors, and decodes
them to weights. `FORMATS` has all formats by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from expertly.core.errors import ConfigError, UnsupportedModelError
from expertly.core.geometry import LayerGeometry
from expertly.formats.fp8 import FP8
from expertly.formats.gguf import GGUF_FORMATS, Q4_0, Q8_0
from expertly.formats.gptq import AWQ, awq, gptq
from expertly.formats.int4 import PACK_QUANTIZED, Int4Format, pack_quantized
from expertly.formats.mxfp4 import MXFP4
from expertly.formats.tiles import ExpertFormat, RoundingFormat, TiledFormat

FORMATS: dict[str, TiledFormat] = {one.name: one for one in (MXFP4, FP8, *GGUF_FORMATS, *PACK_QUANTIZED, *AWQ)}

ROUNDED_TO: dict[str, RoundingFormat] = {"mxfp4": MXFP4, "int4": Q4_0, "int8": Q8_0}
"""Formats to which an unquantised checkpoint can be rounded, by their names in --quantize."""


def rounding_format(name: object) -> RoundingFormat:
    """The format in ROUNDED_TO. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in ROUNDED_TO:
        raise ConfigError(f"quantize={name!r:.80}: not a format to round to; accepted: {', '.join(ROUNDED_TO)}")
    return ROUNDED_TO[name]


@cache
def expert_format(name: str) -> ExpertFormat:
    """The format with a name in FORMATS, or two names with a plus: of gate and up, then of down. Raises ConfigError."""
    inner, _, down = name.partition("+")
    for one in (inner, down or inner):
        if one not in FORMATS:
            raise ConfigError(f"format={name!r:.80}: unknown; accepted: {', '.join(FORMATS)}")
    return ExpertFormat(FORMATS[inner], FORMATS[down or inner])


def check_format(layer: LayerGeometry) -> None:
    """Raises ConfigError where the layer's format is unknown, or its block sizes are not that format's."""
    if not layer.format:
        return
    form = expert_format(layer.format)
    expected = form.geometry(layer)
    if (layer.block_size, layer.block_nbytes) != (expected.block_size, expected.block_nbytes):
        raise ConfigError(
            f"block_size={layer.block_size}, block_nbytes={layer.block_nbytes}: must be {expected.block_size} and "
            f"{expected.block_nbytes} in {layer.format}"
        )


_GROUPED: dict[str, Callable[[Mapping[str, Any], str], Sequence[Int4Format]]] = {
    "compressed-tensors": pack_quantized,
    "gptq": gptq,
    "awq": awq,
}
GROUP_METHODS = tuple(_GROUPED)
"""Values of `quant_method` that `group_formats` knows."""


def group_formats(quantization: Mapping[str, Any], dtype: str) -> Sequence[Int4Format]:
    """The formats that matrices of a checkpoint with this `quantization_config` may have, if the model computes in
    `dtype`; they differ in the dtype of scales. They take tensors as the checkpoint has them; their tiles are those of
    the format with the same name in FORMATS.

    Raises UnsupportedModelError naming the field of the config that is not supported.
    """
    return _GROUPED[quantization["quant_method"]](quantization, dtype)


def format_of(quantization: object, dtypes: Mapping[str, str], dtype: str) -> str:
    """The name of a checkpoint's format, by `TiledFormat.is_of`; "" where there is none, or its quantizer refuses."""
    if not isinstance(quantization, dict):
        return ""
    forms: Iterable[TiledFormat] = FORMATS.values()
    if quantization.get("quant_method") in GROUP_METHODS:
        try:
            forms = group_formats(quantization, dtype)
        except UnsupportedModelError:
            return ""
    return next((form.name for form in forms if form.is_of(quantization, dtypes, dtype)), "")

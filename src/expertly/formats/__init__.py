"""Weight formats: how quantised experts lie in bytes. A format is one file here and one function in native/.

Store, slots and transfers see bytes. A format gives their number, makes them from a checkpoint's tensors, and decodes
them to weights. `FORMATS` has all formats by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from expertly.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from expertly.core.geometry import LayerGeometry
from expertly.formats.compressed import CompressedLayout, ModelOptLayout
from expertly.formats.fp8 import FP8, FP8_ROWS, FbgemmLayout, Fp8Layout
from expertly.formats.gguf import GGUF_FORMATS, Q4_0, Q8_0
from expertly.formats.gptq import AwqLayout, GptqLayout, auto_round
from expertly.formats.halves import HALVES
from expertly.formats.int4 import INT4
from expertly.formats.layouts import Header, Layout, is_plain
from expertly.formats.mlx import MlxLayout
from expertly.formats.mxfp4 import MXFP4, Mxfp4Layout
from expertly.formats.nvfp4 import NVFP4
from expertly.formats.tiles import ExpertFormat, RoundingFormat, TiledFormat

FORMATS: dict[str, TiledFormat] = {
    form.name: form for form in (MXFP4, FP8, FP8_ROWS, NVFP4, *GGUF_FORMATS, *HALVES, *INT4)
}

ROUNDED_TO: dict[str, RoundingFormat] = {"mxfp4": MXFP4, "int4": Q4_0, "int8": Q8_0}
"""Formats to which an unquantised checkpoint can be rounded, by their names in --quantize."""


def rounding_format(name: object) -> RoundingFormat:
    """The format in ROUNDED_TO. Raises ConfigError naming what is accepted."""
    if not isinstance(name, str) or name not in ROUNDED_TO:
        raise ConfigError(f"quantize={name!r:.80}: not a format to round to; accepted: {', '.join(ROUNDED_TO)}")
    return ROUNDED_TO[name]


@cache
def expert_format(name: str) -> ExpertFormat:
    """The format with a name in FORMATS, or names with a plus between: of gate and up, then of down; or of all three.
    Raises ConfigError.
    """
    names = name.split("+")
    if len(names) > 3 or not set(names) <= FORMATS.keys():
        raise ConfigError(f"format={name!r:.80}: unknown; accepted: {', '.join(FORMATS)}")
    return ExpertFormat(FORMATS[names[0]], FORMATS[names[len(names) // 3]], FORMATS[names[-1]])


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


LAYOUTS: dict[str, Callable[[Mapping[str, Any], str], Layout]] = {
    "mxfp4": Mxfp4Layout,
    "fp8": Fp8Layout,
    "fbgemm_fp8": FbgemmLayout,
    "compressed-tensors": CompressedLayout,
    "compressed_tensors": CompressedLayout,
    "modelopt": ModelOptLayout,
    "modelopt_fp4": ModelOptLayout,
    "gptq": GptqLayout,
    "awq": AwqLayout,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "mlx": MlxLayout,
}
"""By `quant_method` of `quantization_config`; of MLX, which has none, "mlx"."""


@cache
def extension(name: str) -> Any:
    """What an installed distribution calls so in its entry points `expertly.formats`: the class of a `Layout`, or an
    `Architecture` of GGUF files; None where none does. Raises ConfigError where it cannot be loaded.
    """
    for entry in entry_points(group="expertly.formats", name=name):
        try:
            return entry.load()
        except Exception as cause:  # a stranger's module
            raise ConfigError(f"format={name!r:.80}: {entry.value} cannot be loaded: {cause!r:.200}") from cause
    return None


def layout_of(quantization: object, dtype: str) -> Layout | None:
    """Of a config's `quant_method` in LAYOUTS, or an `extension`, for a model that computes in `dtype`; None of another
    method. Raises UnsupportedModelError naming a field.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(quantization, dict) or not isinstance(method, str):
        return None
    made: Any = LAYOUTS.get(method) or extension(method)
    is_layout = method in LAYOUTS or (isinstance(made, type) and issubclass(made, Layout))
    return made(quantization, dtype) if is_layout else None


def format_of(quantization: object, tensors: Mapping[str, Header], dtype: str) -> str:
    """The name of the format that keeps most bytes of a checkpoint with these tensors (none: only the config is known);
    "" where none does, or the layout is refused.
    """
    try:
        layout = layout_of(quantization, dtype)
        if layout is None:
            return ""
        if not tensors:
            form = layout.usual_form()
            return "" if form is None else form.name
        sizes: Counter[str] = Counter()
        for stem, matrix in layout.matrices(tensors).items():
            if not is_plain(matrix):
                layout.check(stem, matrix)
                form = layout.form_of(stem, matrix)
                sizes[form.name if form else ""] += math.prod(next(iter(matrix.values()))[1])
    except (UnsupportedModelError, CheckpointError):  # packing says so, naming the file
        return ""
    return max(sizes, key=lambda name: sizes[name], default="")

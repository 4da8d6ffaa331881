"""transformers' model of a quantised checkpoint, with the weights that it has dequantised."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from transformers import PreTrainedModel

from tests.formats.gguf_files import load_gguf
from tests.formats.gptq_files import load_gptq
from tests.model.checkpoints import load_dequantised


@cache  # some take seconds to dequantise
def reference_of(source: Path) -> PreTrainedModel:
    if source.suffix == ".gguf":
        return load_gguf(source)
    method = json.loads((source / "config.json").read_text())["quantization_config"]["quant_method"]
    return load_gptq(source) if method in ("gptq", "awq") else load_dequantised(source)

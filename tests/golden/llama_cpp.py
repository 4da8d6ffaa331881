"""Greedy tokens of llama.cpp on the files of `gguf_models`: neither our code nor that of transformers took part.
`python -m tests.golden.llama_cpp` records them, with llama-cpp-py-sync installed (0.11739; it wants glibc 2.38).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.families import NUM_NEW_TOKENS, VOCAB_SIZE, make_prompts
from tests.formats.gguf_models import CASES, make_model, write_model

RECORDED = Path(__file__).with_suffix(".json")

UNLIKE = {
    "deepseek v2, groups": "it ranks groups by their two best experts, transformers and DeepSeek by the best",
    "deepseek v2 lite": "it takes models of 27 layers for such, which this is not",
    "glm 4.7 flash": "it takes models of 47 layers for such",
    "gpt-oss": "it rounds the range of YaRN to whole dimensions, which the config says not to do",
    "phimoe": "it chooses experts by softmax, transformers and Microsoft by sparsemixer",
    "phimoe, long texts": "the same; and it wants a bias of the head",
}
"""Files of which it computes something else, or which it does not take."""


def tokens_of(path: str) -> list[int]:
    from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

    lib, ffi = get_lib(), get_ffi()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.flash_attn_type = 256, 1, 0
    settings.type_k = settings.type_v = 0  # float32
    context: Any = lib.llama_init_from_model(model, settings)
    tokens, new = make_prompts(1, length=40)[0], list[int]()
    for place in range(len(tokens) + NUM_NEW_TOKENS - 1):
        token = ffi.new("llama_token[]", [tokens[place]])
        assert lib.llama_decode(context, lib.llama_batch_get_one(token, 1)) == 0
        if place >= len(tokens) - 1:
            logits = list(lib.llama_get_logits(context)[0:VOCAB_SIZE])
            tokens.append(logits.index(max(logits)))
            new.append(tokens[-1])
    return new


def record() -> None:
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if name in UNLIKE:
                continue
            path = write_model(Path(folder) / "model.gguf", make_model(case), case)
            run = subprocess.run([sys.executable, "-m", __spec__.name, str(path)], capture_output=True, check=True)
            recorded[name] = json.loads(run.stdout)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in recorded.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    print(json.dumps(tokens_of(sys.argv[1]))) if sys.argv[1:] else record()

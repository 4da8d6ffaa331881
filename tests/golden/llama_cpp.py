"""Greedy tokens of llama.cpp on a file: neither our code nor that of transformers took part. They are asked of the
package xllamacpp, 2026.10.11549 or newer; `make test-peers` installs it and asks. `PYTHONPATH=.venv/peers
.venv/bin/python -m tests.golden.llama_cpp` records those of the files of `gguf_models`, for tests without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")

UNLIKE = {
    "deepseek v2, groups": "it ranks groups by their two best experts, transformers and DeepSeek by the best",
    "deepseek v2 lite": "it takes models of 27 layers for such, which this is not",
    "glm 4.7 flash": "it takes models of 47 layers for such, and scores experts of this by softmax",
    "gpt-oss": "it rounds the range of YaRN to whole dimensions, which the config says not to do",
    "phimoe": "it chooses experts by softmax, transformers and Microsoft by sparsemixer",
    "phimoe, long texts": "the same; and it wants a bias of the head",
}
"""Files of which it computes something else, or which it does not take."""

REFUSED = {
    "deepseek v2 lite": "key not found in model: deepseek2.attention.q_lora_rank",
    "phimoe, long texts": "tensor 'output.bias' not found",
}
"""Those that it does not take, and what it says."""


def tokens_of(path: Path, prompt: Sequence[int], num_new_tokens: int) -> list[int]:
    """Asked in a process of its own, which llama.cpp may end. The file must have a vocabulary. RuntimeError: what it
    says of a file that it refuses.
    """
    command = [sys.executable, __file__, str(path), json.dumps(list(prompt)), str(num_new_tokens)]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if run.returncode != 0:
        raise RuntimeError(f"llama.cpp ended with {run.returncode}: {run.stderr}")
    tokens: list[int] = json.loads(run.stdout)
    return tokens


def _ask(path: str, prompt: str, num_new_tokens: str) -> list[int]:
    import xllamacpp

    settings: Any = xllamacpp.CommonParams()
    settings.model.path, settings.verbosity = path, 1  # errors
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.fit_params = 256, 1, False, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    request = {"prompt": json.loads(prompt), "max_tokens": int(num_new_tokens), "temperature": 0, "logprobs": 1}
    answer = xllamacpp.Server(settings).handle_completions(request)
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]


def record() -> None:
    from tests.families import NUM_NEW_TOKENS, make_prompts
    from tests.formats.gguf_models import CASES, VOCABULARY, make_model, write_model

    recorded, prompt = {}, make_prompts(1, length=40)[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if name in UNLIKE:
                continue
            path = write_model(Path(folder) / "model.gguf", make_model(case), case, metadata=VOCABULARY)
            recorded[name] = tokens_of(path, prompt, NUM_NEW_TOKENS)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in recorded.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    print(json.dumps(_ask(*sys.argv[1:]))) if sys.argv[1:] else record()

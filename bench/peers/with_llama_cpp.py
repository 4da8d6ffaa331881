"""llama.cpp as a peer, by the C functions of llama-cpp-python: weights are mapped from the GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np


def load(settings: dict[str, Any]) -> LlamaCpp:
    return LlamaCpp(settings)


class LlamaCpp:
    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers, model_params.use_extra_bufts = 0, settings["copies"]  # 4-bit weights, reordered
        self._model = llama_cpp.llama_model_load_from_file(settings["gguf"].encode(), model_params)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {settings['gguf']}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = settings["context"]
        params.n_threads = params.n_threads_batch = 1
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise OSError("llama.cpp cannot make a context")
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def begin(self, token_ids: list[int], num_threads: int) -> int:
        self._lib.llama_set_n_threads(self._context, num_threads, num_threads)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        return self._run(token_ids)

    def step(self, token_id: int) -> int:
        return self._run([token_id])

    def facts(self) -> dict[str, Any]:
        return {}

    def _run(self, token_ids: list[int]) -> int:
        tokens = (self._lib.llama_token * len(token_ids))(*token_ids)
        code = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(token_ids)))
        if code:
            raise OSError(f"llama_decode: {code}")
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._num_tokens,)).argmax())

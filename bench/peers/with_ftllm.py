"""ftllm (FastLLM) as a peer: experts are read from the checkpoint's files through a cache in RAM, products in bfloat16.

It takes no tokens but a prompt's: what it decodes is its own greedy text, so that it loads other experts than the rest.
"""

from __future__ import annotations

import ctypes
from typing import Any

COUNTED = {"bytes_loaded": "disk_bytes", "hits": "cpu_hits", "misses": "misses"}


def load(settings: dict[str, Any]) -> FastLlm:
    return FastLlm(settings)


class FastLlm:
    def __init__(self, settings: dict[str, Any]) -> None:
        from ftllm import llm

        self._llm, self._lib, self._context = llm, llm.fastllm_lib, settings["context"]
        self._threads, self._handle = 1, -1
        llm.set_cpu_threads(self._threads)
        llm.set_device_map("cpu")
        if settings["cache_bytes"] is not None:
            llm.set_device_map("disk", True)  # of the experts
            llm.set_moe_cpu_cache(settings["cache_bytes"])
        self._model = llm.model(settings["model"], dtype="bfloat16", max_context_length=self._context)
        self._model.set_atype("bfloat16")
        self._model.set_moe_atype("bfloat16")

    def begin(self, token_ids: list[int], num_threads: int) -> int:
        if num_threads != self._threads:
            self._threads = num_threads
            self._llm.set_cpu_threads(num_threads)
        if self._handle >= 0:
            self._model.abort_handle(self._handle)
        ids, (num_stops, stops) = (ctypes.c_int * len(token_ids))(*token_ids), self._model.stop_token_ctypes(None)
        numbers = [ctypes.c_float(1.0), ctypes.c_int(1), ctypes.c_float(1.0), ctypes.c_float(1.0)]
        length = ctypes.c_int(self._context - len(token_ids))
        self._handle = self._lib.launch_response_llm_model(
            self._model.model, len(token_ids), ids, length, length, ctypes.c_bool(False), *numbers,
            ctypes.c_bool(False), num_stops, stops,
        )  # fmt: skip
        return self._next()

    def step(self, token_id: int) -> int:
        return self._next()

    def facts(self) -> dict[str, Any]:
        stats = self._llm.get_disk_moe_cache_stats()
        return {name: stats[theirs] for name, theirs in COUNTED.items()} | {"counters": list(COUNTED)}

    def _next(self) -> int:
        token = int(self._lib.fetch_response_llm_model(self._model.model, self._handle))
        if token < 0:
            raise OSError(f"ftllm ended its text: {token}")
        return token

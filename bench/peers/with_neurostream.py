"""neurostream as a peer: rows of a GGUF file's matrices are read as they are needed; torch computes in float32."""

from __future__ import annotations

from typing import Any


def load(settings: dict[str, Any]) -> NeuroStreamPeer:
    return NeuroStreamPeer(settings)


class NeuroStreamPeer:
    def __init__(self, settings: dict[str, Any]) -> None:
        import neurostream.api
        from neurostream.model.qwen3 import KVCache

        neurostream.api.GGUFTokenizer = lambda gguf: None  # the file has no vocabulary: token ids are fed
        self._stream = neurostream.api.NeuroStream.load(settings["gguf"], device="cpu", **settings["budgets"])
        self._empty = lambda: KVCache(self._stream.cfg.n_layer)

    def begin(self, token_ids: list[int], num_threads: int) -> int:
        import torch

        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        self._cache = self._empty()
        return self._run(token_ids)

    def step(self, token_id: int) -> int:
        return self._run([token_id])

    def facts(self) -> dict[str, Any]:
        return {}

    def _run(self, token_ids: list[int]) -> int:
        import torch

        with torch.no_grad():
            logits = self._stream.model.forward(torch.tensor(token_ids), self._cache, start_pos=self._cache.length)
        return int(logits[-1].argmax())

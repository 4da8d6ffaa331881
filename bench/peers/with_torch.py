"""What peers that run a torch model have in common."""

from __future__ import annotations

from typing import Any


class TorchPeer:
    """`_model`: a causal language model of transformers, with one sequence."""

    _model: Any
    _past: dict[str, Any]  # the KV cache under its name, which transformers 5.24 changed

    def begin(self, token_ids: list[int], num_threads: int) -> int:
        import torch

        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        self._past = {}
        return self._run(token_ids)

    def step(self, token_id: int) -> int:
        return self._run([token_id])

    def _run(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            out = self._model(ids, **self._past, use_cache=True, logits_to_keep=1)
        self._past = {name: out[name] for name in {"cache", "past_key_values"} & out.keys()}
        return int(out.logits[0, -1].argmax())

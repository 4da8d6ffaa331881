"""transformers with accelerate's disk offload as a peer; with all the memory there is, transformers alone."""

from __future__ import annotations

from typing import Any


def load(settings: dict[str, Any]) -> Accelerate:
    return Accelerate(settings)


class Accelerate:
    def __init__(self, settings: dict[str, Any]) -> None:
        from expertly.engine.instructions import keep_off_trapped_instructions

        keep_off_trapped_instructions()
        import torch
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {}
        if settings["cpu_bytes"] is not None:
            options = {
                "device_map": "auto",
                "max_memory": {"cpu": settings["cpu_bytes"]},
                "offload_folder": settings["offload_folder"],
            }
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16, **options).eval()
        self._past: Any = None

    def begin(self, token_ids: list[int], num_threads: int) -> int:
        import torch

        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        self._past = None
        return self._run(token_ids)

    def step(self, token_id: int) -> int:
        return self._run([token_id])

    def facts(self) -> dict[str, Any]:
        return {}

    def _run(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            out = self._model(ids, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = out.past_key_values
        return int(out.logits[0, -1].argmax())

"""transformers with accelerate's disk offload as a peer; with all the memory there is, transformers alone."""

from __future__ import annotations

from typing import Any

from with_torch import TorchPeer


def load(settings: dict[str, Any]) -> Accelerate:
    return Accelerate(settings)


class Accelerate(TorchPeer):
    def __init__(self, settings: dict[str, Any]) -> None:
        from expertly.engine.process import keep_off_trapped_instructions

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

    def facts(self) -> dict[str, Any]:
        return {}

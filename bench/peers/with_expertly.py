"""`expertly` as a peer."""

from __future__ import annotations

from typing import Any


def load(settings: dict[str, Any]) -> Expertly:
    return Expertly(settings)


class Expertly:
    def __init__(self, settings: dict[str, Any]) -> None:
        import expertly

        self._model, _ = expertly.load(
            settings["model"],
            system=settings["system"],
            memory=settings["memory"],
            context=settings["context"] if settings["memory"] == "auto" else None,
            codec=settings["codec"],
            maps="off",
            device="cpu",
        )
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
        import expertly
        from expertly.engine.api import handle

        stats = expertly.stats(self._model).as_dict()
        decode = stats["phases"]["decode"]
        return {
            "memory_bytes": stats["memory_bytes"],
            "dense_bytes": handle(self._model).store.dense_nbytes,
            "why": stats["memory_reason"],
            "codec_is": stats["codec"]["name"],
            **{name: decode[name] for name in ("bytes_loaded", "stall_s", "hits", "partial_hits", "misses")},
            "counters": ["bytes_loaded", "stall_s", "hits", "partial_hits", "misses"],
        }

    def _run(self, token_ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            out = self._model(ids, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = out.past_key_values
        return int(out.logits[0, -1].argmax())

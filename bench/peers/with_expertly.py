"""`expertly` as a peer."""

from __future__ import annotations

from typing import Any

from with_torch import TorchPeer


def load(settings: dict[str, Any]) -> Expertly:
    return Expertly(settings)


class Expertly(TorchPeer):
    def __init__(self, settings: dict[str, Any]) -> None:
        from expertly.model.lean import import_lean

        import_lean()  # as `expertly run` does
        import expertly

        self._model, _ = expertly.load(
            settings["model"],
            system=settings["system"],
            memory=settings["memory"],
            context=settings["context"] if settings["memory"] == "auto" else None,
            codec=settings["codec"],
            quantize=settings["quantize"],
            learned="off",
            device="cpu",
        )

    def facts(self) -> dict[str, Any]:
        import expertly
        from expertly.api import handle

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

"""`expertly` as a peer."""

from __future__ import annotations

from typing import Any

from with_torch import TorchPeer

COUNTED = ["bytes_loaded", "stall_s", "hits", "partial_hits", "misses"]


def load(settings: dict[str, Any]) -> Expertly:
    return Expertly(settings)


class Expertly(TorchPeer):
    def __init__(self, settings: dict[str, Any]) -> None:
        import expertly

        asked = {name: settings[name] for name in ("system", "memory", "quantize")}
        asked["context"] = settings["context"] if settings["memory"] == "auto" else None
        self._model, _ = expertly.load(settings["model"], device="cpu", **asked)

    def facts(self) -> dict[str, Any]:
        import expertly
        from expertly.api import handle

        stats = expertly.stats(self._model).as_dict()
        decode = stats["phases"]["decode"]
        return {
            "memory_bytes": stats["memory_bytes"],
            "dense_bytes": handle(self._model).store.dense_nbytes,
            "why": stats["memory_reason"],
            **{name: decode[name] for name in COUNTED},
            "counters": COUNTED,
        }

"""`expertly` as a peer, also with workers on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from with_torch import TorchPeer

COUNTED = ["bytes_loaded", "stall_s", "hits", "partial_hits", "misses"]


def load(settings: dict[str, Any]) -> Expertly:
    return Expertly(settings)


class Expertly(TorchPeer):
    def __init__(self, settings: dict[str, Any]) -> None:
        from expertly.model.lean import import_lean

        import_lean()  # as `expertly run` does
        import expertly

        groups = settings.get("workers")
        self._of_layers: dict[str, float] = {}
        asked = {name: settings[name] for name in ("system", "memory", "codec", "quantize")}
        asked["context"] = settings["context"] if settings["memory"] == "auto" else None
        if groups:
            asked |= {"workers": put_workers_in(groups), "worker_memory": settings["worker_memory"]}
        self._model, _ = expertly.load(settings["model"], learned="off", device="cpu", **asked)
        if groups:
            self._watch(expertly.api.handle(self._model).engine.executor)

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
            **{name: decode[name] for name in COUNTED},
            **self._of_layers,
            "counters": [*COUNTED, *self._of_layers],
        }

    def _watch(self, group: Any) -> None:
        """Count layers, and their time beyond the longest computing of any member, this process or a worker."""
        took_ns, total = list[int](), self._of_layers
        total |= {"layers": 0, "beyond_s": 0.0}

        def timed(run: Callable[..., Any], its_ns: Callable[[Any], int] | None = None) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                start = time.perf_counter_ns()
                found = run(*args)
                took_ns.append(its_ns(found) if its_ns else time.perf_counter_ns() - start)
                return found

            return call

        whole = timed(group.run_layer)

        def layer(*args: Any) -> Any:
            took_ns.clear()
            found = whole(*args)
            total["layers"] += 1
            total["beyond_s"] += (took_ns.pop() - max(took_ns)) / 1e9
            return found

        group.run_layer = layer
        for shard in group.shards:
            shard.run_layer = timed(shard.run_layer)
        for remote in group.remotes:
            remote.take = timed(remote.take, lambda ran: ran.took_ns)


def put_workers_in(groups: list[str]) -> int:
    """How many to start; each is to enter its memory cgroup before it imports torch."""
    from expertly.engine import ray_workers

    start, plain = ray_workers.RayPeer._start, ray_workers.RayWorker

    def start_inside(peer: Any) -> Any:
        group = Path(groups[int(peer.name.rpartition("-")[2]) - 1])

        class Inside(plain):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any) -> None:
                (group / "cgroup.procs").write_text(str(os.getpid()))
                super().__init__(*args)

        ray_workers.RayWorker = Inside  # type: ignore[misc]
        return start(peer)

    ray_workers.RayPeer._start = start_inside  # type: ignore[method-assign]
    return len(groups)

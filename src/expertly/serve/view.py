"""What can be seen of a running server: for Prometheus, for programs, for the dashboard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from expertly.serve.memory import MemorySplit
from expertly.serve.metrics import EngineMetrics, RequestMetrics, rendered
from expertly.serve.readings import Readings
from expertly.serve.scheduler import RequestScheduler
from expertly.serve.service import About

_RATE_S = 5.0
"""Over how long tokens per second are told."""


class View:
    """Any thread may ask. `note` is called about once a second."""

    METRICS_TYPE = CONTENT_TYPE_LATEST

    def __init__(
        self,
        about: About,
        readings: Readings,
        scheduler: RequestScheduler,
        metrics: RequestMetrics,
        split: MemorySplit,
        now_s: Callable[[], float],
    ) -> None:
        self._about = about
        self._readings = readings
        self._scheduler = scheduler
        self._metrics = metrics
        self._split = split
        self._now_s = now_s
        self._written: deque[tuple[float, int]] = deque([(now_s(), 0)])
        metrics.registry.register(EngineMetrics(readings, scheduler, split))

    def note(self) -> None:
        """Remember what rates are told from."""
        self._readings.note()
        now = self._now_s()
        self._written.append((now, self._metrics.num_written))
        while len(self._written) > 2 and now - self._written[1][0] >= _RATE_S:
            self._written.popleft()

    def metrics(self) -> bytes:
        return rendered(self._metrics)

    def experts(self) -> dict[str, Any]:
        """How many segments of each expert are there, and how each layer fared of late."""
        stats = self._readings.stats()
        seconds, _, recent = self._readings.recent()
        layers = []
        for number, (row, tally) in enumerate(zip(self._readings.residency(), recent, strict=True)):
            decode = stats["layers"][number]["decode"]
            layers.append(
                {
                    "layer": number,
                    "segments_present": row,
                    "recent_hit_rate": tally.hit_rate,
                    "recent_demands": tally.demands,
                    "recent_bytes_loaded": tally.loaded_nbytes,
                    "recent_stall_s": tally.stall_ns / 1e9,
                    "hit_rate": decode["hit_rate"],
                }
            )
        return {
            "object": "experts",
            "system": stats["system"],
            "segments": stats["segments"],
            "memory_bytes": stats["memory_bytes"],
            "expert_bytes": stats["expert_bytes"],
            "recent_s": seconds,
            "layers": layers,
        }

    def state(self) -> dict[str, Any]:
        """The numbers of one look at the server."""
        stats, scheduler = self._readings.stats(), self._scheduler
        seconds, tokens, recent = self._readings.recent()
        demands, hits = sum(one.demands for one in recent), sum(one.hits for one in recent)
        first_s, first = self._written[0]
        passed = self._now_s() - first_s
        prefetched = sum(one["prefetched"] for one in stats["phases"].values())
        needed = sum(one["prefetched_needed"] for one in stats["phases"].values())
        return {
            "object": "state",
            "model": self._about.as_dict(),
            "draining": scheduler.is_draining,
            "problem": scheduler.problem,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "max_running": scheduler.room.max_running,
            "max_queue": scheduler.room.max_queue,
            "kv_pages": scheduler.room.num_pages,
            "kv_pages_free": scheduler.free_pages,
            "tokens_per_s": (self._metrics.num_written - first) / passed if passed > 0 else None,
            "tokens_written": self._metrics.num_written,
            "recent": {
                "seconds": seconds,
                "tokens_computed": tokens,
                "hit_rate": hits / demands if demands else None,
                "partial_hit_rate": sum(one.partial_hits for one in recent) / demands if demands else None,
                "stall_share": sum(one.stall_ns for one in recent) / 1e9 / seconds if seconds > 0 else None,
                "bytes_loaded": sum(one.loaded_nbytes for one in recent),
            },
            "history": _history_of(stats),
            "prefetch_accuracy": needed / prefetched if prefetched else None,
            "memory": {
                **self._split.as_dict(),
                "experts_bytes": stats["memory_bytes"],
                "experts_resident_bytes": sum(device["resident_bytes"] for device in stats["devices"]),
                "all_experts_bytes": stats["expert_bytes"],
                **self._readings.host_memory(),
            },
        }


def _history_of(stats: dict[str, Any]) -> str | None:
    """Whether what it predicts by, or else evicts by, is from earlier runs; None where it learns neither."""
    told = [one["history"] for one in (stats["prediction"], stats["reuse"]) if one is not None]
    return next((history for history in told if history is not None), None)

"""Tells a SimulationWatcher what a loaded model does, so that a run and its simulation can be laid side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from expertly.api import handle
from expertly.core.messages import Span
from expertly.engine.compute import LayerCall
from expertly.sim.link import SimulationWatcher


@contextmanager
def watched(model: Any, watcher: SimulationWatcher) -> Iterator[None]:
    """Within the block `watcher` is told what the model's passes do, by `time.perf_counter_ns`: of a model with one
    device that computes as it is called, a CPU. No other model may run meanwhile.

    All of the computing thread's time has a name: "dense" before a layer's experts, "expert 7" (or the first of several
    that are computed together), "ask" and "take" for calls of the transport, "wait" where it waits, "decide" for all
    else of a layer's experts, and "head" from the last layer to the next pass. A span has "moved" from when it was
    asked for, or the one before it had come, until the thread took it.
    """
    engine = handle(model).engine
    shard, told = engine.executor.shards[0], _Told(watcher)
    run, began, compute = engine.forward_experts, shard.begin, LayerCall.compute
    names = {"submit": "ask", "prefetch": "ask", "cancel": "ask", "poll": "take", "wait": "wait"}
    calls = {name: getattr(shard.device, name) for name in names}

    def begin() -> None:
        told.until("head", -1)
        began()

    def experts(module: Any, layer: int, *rest: Any) -> Any:
        told.until("dense", layer)
        out = run(module, layer, *rest)
        told.until("decide", layer)
        return out

    shard.begin, engine.forward_experts = begin, experts  # type: ignore[method-assign, assignment]
    LayerCall.compute = told.computing(compute)  # type: ignore[method-assign]
    for name, what in names.items():
        setattr(shard.device, name, told.calling(calls[name], what))
    try:
        yield
        told.until("head", -1)
    finally:
        LayerCall.compute = compute  # type: ignore[method-assign]
        del shard.begin, engine.forward_experts
        for name, call in calls.items():
            setattr(shard.device, name, call)


class _Told:
    """What a watcher has been told so far."""

    def __init__(self, watcher: SimulationWatcher) -> None:
        self._watcher = watcher
        self._until_ns = 0  # 0: no pass has begun
        self._asked_ns: dict[Span, int] = {}  # of spans that have not come
        self._came_ns = 0  # when the last one did

    def until(self, what: str, layer: int, now_ns: int | None = None) -> None:
        """This was done until now."""
        now_ns = now_ns or time.perf_counter_ns()
        if self._until_ns:
            self._watcher.computed(what, layer, self._until_ns, now_ns)
        self._until_ns = now_ns

    def computing(self, compute: Callable[..., None]) -> Callable[..., None]:
        def told(call: LayerCall, spans: Any) -> None:
            begin_ns = time.perf_counter_ns()
            self.until("decide", call.work.router.layer, begin_ns)
            compute(call, spans)
            self.until(f"expert {spans[0].expert}", spans[0].layer)

        return told

    def calling(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            found = call(*args)
            end_ns = time.perf_counter_ns()
            self.until("decide", -1, begin_ns)
            self._watcher.spent(what, begin_ns, end_ns)
            self._until_ns = end_ns
            if what == "ask" and found is None:
                self._asked_ns |= dict.fromkeys(args[0], begin_ns)
            elif what != "ask" and found is not None:
                self._watcher.moved("link", found, max(self._came_ns, self._asked_ns.pop(found, end_ns)), end_ns)
                self._came_ns = end_ns
            return found

        return told

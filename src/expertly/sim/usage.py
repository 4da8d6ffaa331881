"""What a training part shows of each layer's decode: the misses of every cache size, and what predictions name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation import ALLOCATIONS
from expertly.policies.allocation.adapmoe import StackDistances
from expertly.policies.known import Known, Usage
from expertly.policies.predictor import Predictor
from expertly.scheduler.system import System
from expertly.sim.workload import RowRange, Workload
from expertly.trace.reader import Trace


class UsageOfTraining:
    """Looked at once for all systems that predict alike."""

    def __init__(self, trace: Trace, spans: Sequence[RowRange]) -> None:
        self._trace = trace
        self._spans = list(spans)
        self._found: dict[tuple[object, ...], Usage] = {}

    def of(self, system: System, geometry: Geometry, known: Known) -> Usage | None:
        """None without a training part, or where the system's allocation makes nothing of it."""
        if not self._spans or system.keeps_everything or not ALLOCATIONS[system.allocation].takes_usage:
            return None
        key = (system.prediction, system.distance, *system.options_of("prediction").items())
        if key not in self._found:
            self._found[key] = self._look(system, geometry, known)
        return self._found[key]

    def _look(self, system: System, geometry: Geometry, known: Known) -> Usage:
        """Its predictor runs beside the training part as it will beside the rest, cold: what a predictor has learned
        from it would be right too often.
        """
        predictor = None if "future" in system.needs else system.predictor(geometry, replace(known, future=None))
        seen = [StackDistances(layer.num_experts) for layer in geometry.layers]
        named = _Named(geometry.num_layers)
        for iteration in Workload(self._trace, self._spans).iterations():
            if predictor is not None:
                named.note(predictor.begin_iteration(iteration.began(predictor.wants)))
            for router in iteration.layers:
                needed = decoding(router)
                seen[router.layer].add(needed)
                named.spoke(router.layer, {expert for _, expert in needed})
                if predictor is not None:
                    named.note(predictor.router_ran(iteration.routed(router, predictor.wants)))
            if predictor is not None:
                predictor.end_iteration(True)
        num_requests = len({span.request for span in self._spans})
        return Usage(
            tuple(one.misses() for one in seen), named.recall(), f"{num_requests} requests{_without(system, predictor)}"
        )


class _Named:
    """Of what each layer needed, how much the newest prediction of it had named."""

    def __init__(self, num_layers: int) -> None:
        self._said: dict[int, Sequence[int]] = {}
        self._needed = [0] * num_layers
        self._named = [0] * num_layers

    def note(self, predictions: Iterable[Prediction]) -> None:
        for prediction in predictions:
            self._said[prediction.layer] = prediction.experts

    def spoke(self, layer: int, needed: set[int]) -> None:
        self._needed[layer] += len(needed)
        self._named[layer] += len(needed.intersection(self._said.pop(layer, ())))

    def recall(self) -> tuple[float, ...]:
        return tuple(named / max(1, num) for named, num in zip(self._named, self._needed, strict=True))


def decoding(router: RouterRan) -> list[tuple[int, int]]:
    """(tokens, expert) of what decode needs."""
    every = zip(router.num_tokens, router.experts, router.is_decode, strict=True)
    return [(num, expert) for num, expert, is_decode in every if num and is_decode]


def _without(system: System, predictor: Predictor | None) -> str:
    if predictor is None and system.prediction != "none":
        return "; what is predicted is not known of them, and counts as nothing"
    return ""

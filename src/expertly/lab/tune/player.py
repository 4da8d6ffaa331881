"""Candidates on the engine, several loaded at a time where the memory is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from expertly import api
from expertly.core.errors import ExpertlyError
from expertly.engine.device import kind_of
from expertly.engine.memory import available_host_nbytes
from expertly.lab.playing import Played, RecordedRequest, feed, learn
from expertly.lab.tune.candidates import Candidate
from expertly.lab.tune.workload import TunedWorkload
from expertly.policies.allocation.moepic import SplitPlan

BESIDE_NBYTES = 256 << 20
"""Of a loaded model, beside dense weights and experts: KV cache, activations."""

Load = Callable[..., tuple[Any, Any]]


class EnginePlayer:
    """Loads a candidate when it is played first, and again where others took its place; each time it runs the
    workload's first request, which fills its caches. What learns has learned from the training part. For a `with`.
    """

    def __init__(
        self,
        workload: TunedWorkload,
        plan: Callable[[Candidate], SplitPlan | None],
        load: Load,
        scratch: Path,
    ) -> None:
        """`load` takes the arguments of `expertly.load` that differ between candidates; maps go to `scratch`."""
        self._workload = workload
        self._plan = plan
        self._load = load
        self._scratch = scratch
        self._models: dict[Candidate, Any] = {}  # the one that was played longest ago first

    def __enter__(self) -> EnginePlayer:
        return self

    def __exit__(self, *_: object) -> None:
        while self._models:
            self._drop_oldest()

    def play(self, candidate: Candidate, request: RecordedRequest) -> Played:
        model = self._models.pop(candidate, None)
        if model is None:
            model = self._loaded(candidate)
        self._models[candidate] = model
        return feed(model, request.tokens, request.num_prompt)

    def maps(self, candidate: Candidate) -> Path:
        """Where what it learns goes when it is unloaded."""
        safe = "".join(letter if letter.isalnum() else "-" for letter in candidate.label)
        return self._scratch / f"{safe[:150]}.learned"

    def _loaded(self, candidate: Candidate) -> Any:
        while self._models and not self._has_room(next(iter(self._models.values())), candidate):
            self._drop_oldest()
        system = candidate.system
        model, _ = self._load(
            system=system.name,
            memory=candidate.budget_nbytes,
            plan=self._plan(candidate),
            learned=str(self.maps(candidate)) if system.learns is not None else None,
            codec=candidate.codec,
        )
        if system.learns is not None and not self.maps(candidate).exists():
            learn(model, self._workload.trace, self._workload.schedule)
        first = self._workload.requests[0]
        feed(model, first.tokens, first.num_prompt)
        return model

    def _has_room(self, other: Any, candidate: Candidate) -> bool:
        """Beside what is loaded; `other` is some of that."""
        store, device = api.handle(other).store, other.device
        needed = candidate.budget_nbytes + store.dense_nbytes + BESIDE_NBYTES
        if not kind_of(device).runs_on_host and available_host_nbytes() < store.experts_nbytes:
            return False
        return kind_of(device).available_nbytes(device) > needed

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._models))
        with suppress(ExpertlyError):  # a file of maps that cannot be written is no reason to stop
            api.unload(self._models.pop(oldest))

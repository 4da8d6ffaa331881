"""What deciding about prefetches takes of a layer, measured with a scheduler whose experts have no bytes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from random import Random
from typing import cast

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.core.observation import Routed
from expertly.policies.predictor import Predictor
from expertly.scheduler.budget import Budget
from expertly.scheduler.loop import Prefetcher, run_layer
from expertly.scheduler.observations import InlineChannel
from expertly.scheduler.presets import get_system

_SYSTEM = "moe-infinity"
"""Which takes predictions as they come, evicts for them, and goes by what is nearest: as most do."""


class Planning:
    """Two schedulers with caches of `budget`, given the same random experts beside a model's layers: one prefetches."""

    def __init__(self, geometry: Geometry, budget: Budget) -> None:
        self._geometry = geometry
        self._random = Random(0)
        self._guess = _Guess()
        self._links = _AtOnce(), _AtOnce()
        system = get_system(_SYSTEM)
        self._schedulers = [system.scheduler(geometry, system.budget(geometry, budget)) for _ in self._links]
        channel = InlineChannel(cast(Predictor, self._guess))
        self._prefetcher = Prefetcher(self._schedulers[0], self._links[0], channel)

    def ran(self, layer: int, num_guessed: int) -> tuple[int, int]:
        """The layer ran, in its turn, and of the next one so many experts were predicted: how many were prefetched, and
        how many nanoseconds that took.
        """
        geometry, shape = self._geometry, self._geometry.layers[layer]
        following = (layer + 1) % geometry.num_layers
        num_next = geometry.layers[following].num_experts
        guessed = self._random.sample(range(num_next), min(num_guessed, num_next))
        self._guess.prediction = Prediction(following, guessed, [1.0] * len(guessed), 1)
        experts = sorted(self._random.sample(range(shape.num_experts), shape.top_k))
        router = RouterRan(layer, experts, [1] * len(experts), [True] * len(experts), 1)
        if not layer:
            self._prefetcher.begin_iteration(dict)  # type: ignore[arg-type] # nobody looks at it
        before, took_ns = self._links[0].num_prefetched, []
        for scheduler, link, prefetcher in zip(self._schedulers, self._links, (self._prefetcher, None), strict=True):
            routed = None if prefetcher is None else partial(Routed, router)
            begin = time.perf_counter_ns()
            run_layer(scheduler, link, router, lambda spans: None, prefetcher, routed)
            took_ns.append(time.perf_counter_ns() - begin)
        return self._links[0].num_prefetched - before, took_ns[0] - took_ns[1]


class _Guess:
    """Predicts what it was told to."""

    prediction: Prediction

    def begin_iteration(self, began: object) -> Iterable[Prediction]:
        return ()

    def router_ran(self, routed: Routed) -> Iterable[Prediction]:
        return (self.prediction,)


class _AtOnce:
    """A PrefetchTransport that takes no time."""

    def __init__(self) -> None:
        self.num_prefetched = 0  # spans
        self._coming: deque[Span] = deque()
        self.submit = self._coming.extend
        self.wait = self._coming.popleft

    def prefetch(self, spans: Sequence[Span]) -> None:
        self.num_prefetched += len(spans)
        self._coming.extend(spans)

    def poll(self) -> Span | None:
        return self._coming.popleft() if self._coming else None

    def cancel(self, layer: int, experts: Collection[int] | None = None) -> Sequence[Span]:
        return ()

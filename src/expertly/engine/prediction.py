"""The parts of an engine that predict, put together: what is seen, who predicts, what is loaded ahead, what is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from expertly.core.errors import ConfigError
from expertly.core.messages import RouterRan
from expertly.core.observation import IterationInfo, Routed
from expertly.engine.collector import Collector
from expertly.engine.device import kind_of
from expertly.engine.learned import SAVE_EVERY_S, LearnedExchange, SavedState
from expertly.engine.matcher import ThreadChannel
from expertly.engine.runtime import Executor
from expertly.policies.predictor import Predictor
from expertly.scheduler.observations import Channel, InlineChannel, ObservationQueue
from expertly.scheduler.system import System

Matcher = Literal["auto", "thread", "inline"]
MATCHERS: tuple[Matcher, ...] = ("auto", "thread", "inline")


def choose_matcher(system: System, matcher: Matcher) -> Matcher:
    """Where a system predicts; "auto" is beside the forward pass, unless that waits for what is predicted in any case.
    Raises ConfigError naming what is accepted.
    """
    if matcher not in MATCHERS:
        raise ConfigError(f"matcher={matcher!r}: unknown; accepted: {', '.join(MATCHERS)}")
    is_synchronous = system.transfer == "synchronous"
    if matcher == "auto":
        return "inline" if is_synchronous else "thread"
    if system.prediction == "none":
        raise ConfigError(f"matcher={matcher!r}: system {system.name!r} predicts nothing; accepted: auto")
    if matcher == "thread" and is_synchronous:
        raise ConfigError(
            f"matcher='thread': system {system.name!r} waits for what it predicts (transfer=synchronous); accepted: "
            f"auto, inline"
        )
    return matcher


class Prefetching:
    """Watches a model's forward passes, which the engine announces, and loads what is predicted.

    `matcher`: "thread" predicts beside the forward pass, which never waits for it; "inline" within it. `maps`: where
    what was learned is read from and written to.
    """

    def __init__(
        self,
        executor: Executor,
        predictor: Predictor,
        collector: Collector,
        matcher: Matcher = "thread",
        maps: SavedState | None = None,
    ) -> None:
        self.predictor = predictor
        self.maps = maps
        self.matcher = matcher
        self.collector = collector
        self._thread: ThreadChannel | None = None
        channel: Channel
        if matcher == "inline":
            channel = InlineChannel(predictor)
        else:
            backlog = ObservationQueue.of_layers(executor.geometry.num_layers)
            save = None if maps is None else maps.save
            device = executor.shards[0].device.torch_device
            channel = self._thread = ThreadChannel(
                predictor, backlog, save, SAVE_EVERY_S, context=lambda: _thread_of(device)
            )
        self._executor = executor
        executor.predict_from(channel)
        collector.attach()

    @property
    def num_late(self) -> int:
        """Predictions that came too late; on several devices, once on each of them."""
        return self._executor.num_late

    @property
    def num_dropped(self) -> int:
        """Contexts that the matcher thread did not get to."""
        return 0 if self._thread is None else self._thread.num_dropped

    @property
    def error(self) -> BaseException | None:
        """What ended predicting."""
        return None if self._thread is None else self._thread.error

    def share(self, every_s: float) -> LearnedExchange | None:
        """Exchange with others what is learned, about so often while something is, and at the end; None where nothing
        is learned, or it is kept nowhere. A matcher that is no thread exchanges at the end only.
        """
        if self.maps is None:
            return None
        if self._thread is not None:
            self._thread.save_every(every_s)
        return self.maps.share()

    def begin_iteration(self, info: IterationInfo) -> None:
        """A forward pass begins. Raises what predicting raised."""
        began = self.collector.begin(info)
        if began is not None:
            self._executor.begin_iteration(began, info.layers)

    def router_ran(
        self, demand: RouterRan, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Callable[[], Routed] | None:
        """What the predictor may see of a layer that is about to run; None where it is no part of the pass."""
        return self.collector.routed(demand, top_k_index, top_k_weights)

    def end_iteration(self, ok: bool) -> None:
        """The pass ended."""
        if self.collector.is_open:
            self.collector.end()
            self._executor.end_iteration(ok)

    def close(self) -> None:
        """End the matcher and write the maps, unless predicting failed. Raises StoreError where a file that somebody
        named cannot be written.
        """
        self.collector.detach()
        has_ended = self._thread is None or self._thread.close()
        if self.maps is not None and has_ended and self.error is None:
            self.predictor.finish()
            self.maps.close()


@contextlib.contextmanager
def _thread_of(device: torch.device) -> Iterator[None]:
    """Where the matcher thread runs: what it is told was computed when it was told, so it need not wait for what the
    model has queued since.
    """
    with torch.inference_mode(), kind_of(device).beside(device):
        yield

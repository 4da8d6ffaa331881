"""Which requests run and which wait: they are admitted in the order they came, each when all of its texts have places.
Those that run share the KV cache by turns (model/turns.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from expertly.core.errors import EngineClosedError
from expertly.model.batching import Entry, Stepper
from expertly.serve.errors import ApiError, busy, failed, unavailable
from expertly.serve.request import ServedRequest, Text
from expertly.serve.sampling import SampledToken, Sampler

_SHUTTING_DOWN = "this server is shutting down"
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

log = logging.getLogger("expertly.serve")


@dataclass(frozen=True, slots=True)
class Room:
    """What may run at a time: `max_running` texts, in `num_pages` pages of KV cache. `context`: tokens of the longest
    text, prompt included, that the pages hold when it runs alone. `max_queue` requests may wait.
    """

    context: int
    num_pages: int
    max_running: int
    max_queue: int
    is_one_at_a_time: bool = False


class RequestMetrics:
    """What happened to requests, counted for Prometheus."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name, text = "expertly_time_to_first_token_seconds", "From a request's arrival"
        self._first = Histogram(name, text, buckets=_FIRST_S, registry=registry)
        name, text = "expertly_time_per_output_token_seconds", "Between a text's tokens"
        self._token = Histogram(name, text, buckets=_TOKEN_S, registry=registry)
        self._requests = Counter("expertly_requests", "By how they ended", ["outcome"], registry=registry)
        self._prompt = Counter("expertly_prompt_tokens", "Of requests that ended", registry=registry)
        self.num_written = 0

    def token(self, request: ServedRequest, now_s: float, last_s: float | None) -> None:
        """A text of the request got a token; `last_s`: when it got its previous one, None for its first."""
        if request.first_s is None:
            request.first_s = now_s
            self._first.observe(now_s - request.came_s)
        if last_s is not None:
            self._token.observe(now_s - last_s)
        self.num_written += 1

    def ended(self, request: ServedRequest, outcome: str) -> None:
        """`outcome`: "stop" or "length" of its last text, "cancelled" or "failed"."""
        self._requests.labels(outcome).inc()
        first = "-" if request.first_s is None else f"{request.first_s - request.came_s:.3f} s"
        seconds = time.perf_counter() - request.came_s
        text = "request %d: %s after %d tokens, the first after %s, all in %.3f s"
        log.info(text, request.number, outcome, request.num_tokens, first, seconds)
        self._prompt.inc(request.num_prompt_tokens)


class RequestScheduler:
    """Lives in the server's event loop, which alone calls it; the model's threads call `told` and `failed`."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.metrics = RequestMetrics()
        self.waiting: deque[ServedRequest] = deque()
        self.running: dict[str, Text] = {}
        self.is_draining = False
        self.num_failed_steps = 0
        self.sampler = Sampler(self.sampled)
        self._stepper: Stepper | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._problem: str | None = None
        self._is_closing = False

    def start(self, make: Callable[[Sampler, Callable[..., None]], Stepper]) -> None:
        """Accept requests from now on, in the running loop. `make(sampler, failed)` makes what runs the model."""
        self._loop = asyncio.get_running_loop()
        self._stepper = make(self.sampler, self.failed)

    def close(self) -> None:
        """End the model's threads; requests that they leave fail. Any thread may call. Idempotent."""
        if self._stepper is not None:
            self._is_closing = True  # passes that fail from now on were ended on purpose
            self._stepper.close()
            self._problem = self._problem or _SHUTTING_DOWN
            self._later(self.abort)

    @property
    def problem(self) -> str | None:
        """Why nothing can be served any more; None where it can."""
        if self._problem is None and self._stepper is not None and not self._stepper.is_alive():
            return "the thread that runs the model has ended"
        return self._problem

    @property
    def free_pages(self) -> int:
        """Pages that no running text has; those kept for later prompts are among them."""
        share = 1.0 if self._stepper is None else self._stepper.free_share()
        return int(share * self.room.num_pages)

    @property
    def num_preempted(self) -> int:
        return 0 if self._stepper is None else self._stepper.num_preempted()

    def submit(self, request: ServedRequest) -> None:
        """Run the request, or queue it. Raises ApiError 429 where the queue is full, 503 where none is accepted."""
        if self.problem is not None:
            raise unavailable(self.problem, "model_stopped")
        if self.is_draining:
            raise unavailable(_SHUTTING_DOWN, "draining")
        if not self.waiting and self._fits(request):
            self._admit(request)
            return
        if len(self.waiting) >= self.room.max_queue:
            raise busy(f"{len(self.waiting)} requests wait already, which is all that may (--max-queue)", "queue_full")
        self.waiting.append(request)

    def cancel(self, request: ServedRequest) -> None:
        """Drop a request whose client has gone. Idempotent."""
        if request in self.waiting or any(text.name in self.running for text in request.texts):
            self._end(request, "cancelled")
        self._next()

    def drain(self) -> bool:
        """Accept no more requests. Returns whether all accepted ones have ended."""
        self.is_draining = True
        return not self.waiting and not self.running

    def abort(self) -> None:
        for request in (*self.waiting, *dict.fromkeys(text.request for text in self.running.values())):
            self._fail(request, unavailable(_SHUTTING_DOWN, "draining"))

    def sampled(self, choices: Sequence[tuple[str, SampledToken]]) -> None:
        self._later(self._take, choices)

    def failed(self, of_step: Sequence[str], unharmed: Sequence[str], error: BaseException) -> None:
        self._later(self._failed, of_step, unharmed, error)

    def _later(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop was closed: who waited in it is gone with it
            self._loop.call_soon_threadsafe(call, *args)

    def _take(self, choices: Sequence[tuple[str, SampledToken]]) -> None:
        for name, choice in choices:
            text = self.running.get(name)
            if text is None:
                continue
            request = text.request
            if choice.problem is not None:
                self._fail(request, failed(" ".join(choice.problem.partition("\n<")[0].split())))
                continue
            if not text.tokens:
                text.num_cached = self._running_stepper.num_cached(name)
            try:
                delta = text.add(choice)
            except Exception as error:  # a tokenizer's: it fails this request alone
                self._fail(request, failed(f"token {choice.token} cannot be made text: {error}"))
                continue
            now_s = time.perf_counter()
            self.metrics.token(request, now_s, text.last_s)
            text.last_s = now_s
            request.deltas.put_nowait(delta)
            if delta.reason is not None:
                self._release(text)
                if all(each.reason is not None for each in request.texts):
                    request.deltas.put_nowait(None)
                    self.metrics.ended(request, delta.reason)
        self._next()

    def _failed(self, of_step: Sequence[str], unharmed: Sequence[str], error: BaseException) -> None:
        if self._is_closing:
            self.abort()
            return
        self.num_failed_steps += 1
        if isinstance(error, EngineClosedError):
            self._problem = str(error)
            unharmed, of_step = [], list(self.running)
        reason = " ".join(str(error).split()) or type(error).__name__
        for name in of_step:
            if (text := self.running.get(name)) is not None:
                self._fail(text.request, failed(f"the forward pass of this request failed: {reason}"))
        for name in unharmed:
            if (text := self.running.get(name)) is not None:
                self._begin(text)
        if self._problem is not None:
            for request in list(self.waiting):
                self._fail(request, unavailable(self._problem, "model_stopped"))
        self._next()

    @property
    def _running_stepper(self) -> Stepper:
        assert self._stepper is not None, "it accepts nothing before it was started"
        return self._stepper

    def _fits(self, request: ServedRequest) -> bool:
        if self.room.is_one_at_a_time:
            return not self.running
        return len(self.running) + len(request.texts) <= self.room.max_running

    def _admit(self, request: ServedRequest) -> None:
        for text in request.texts:
            self.running[text.name] = text
            self._begin(text)

    def _begin(self, text: Text) -> None:
        """Begin a text, or continue one after a failed pass; what it has written is then part of its prompt."""
        self.sampler.add(text.name, text.sampling, text.prompt)
        left = text.max_tokens - len(text.tokens)
        self._running_stepper.submit(Entry(text.name, [*text.prompt, *text.tokens], left, text.ends))

    def _release(self, text: Text) -> None:
        """Free a text's place. The model is told to end a text that was cancelled or met a stop string."""
        if self.running.pop(text.name, None) is None:
            return
        if text.reason is None or text.stops.matched:
            self._running_stepper.cancel(text.name)
        self.sampler.remove(text.name)

    def _end(self, request: ServedRequest, outcome: str) -> None:
        """Drop a request that runs or waits."""
        for text in request.texts:
            self._release(text)
        if request in self.waiting:
            self.waiting.remove(request)
        self.metrics.ended(request, outcome)

    def _fail(self, request: ServedRequest, error: ApiError) -> None:
        self._end(request, "failed")
        request.deltas.put_nowait(error)

    def _next(self) -> None:
        """Admit waiting requests in order, as long as they fit."""
        while self.waiting and self._fits(self.waiting[0]):
            self._admit(self.waiting.popleft())

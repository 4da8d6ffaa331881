"""What predictors see of a model that runs, the thread on which they predict, and `Prefetching`, which joins both to an
engine.

T rows without pads, E experts, K top-k, H hidden, D distances looked ahead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.core.messages import RouterRan
from expertly.core.observation import Began, Floats, IterationInfo, Routed, Want, layer_ahead, scores_of_choices
from expertly.engine.device import kind_of
from expertly.engine.learned import SAVE_EVERY_S, LearnedExchange, LearnedFiles, SavedState
from expertly.engine.runtime import Engine, Executor
from expertly.model.hooks import saturated_half
from expertly.model.routers import RouterTap, attach_all, detach_all, find_routers
from expertly.policies.known import Known
from expertly.policies.predictor import Predictor
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.observations import Channel, InlineChannel, ObservationQueue, Seen, Work
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

Embed = Callable[[npt.NDArray[np.int32]], torch.Tensor]
"""Token ids [T] to what the model's input embedding makes of them, [T, H]."""

OF_ROUTERS: frozenset[Want] = frozenset({"scores", "inputs", "lookahead"})
"""What only the routers themselves can show."""


# -- what a forward pass shows -----------------------------------------------------------------------------------------


class RequestNumbers:
    """Numbers requests as they come; no two have the same.

    A sequence in prefill is a new request. One that decodes goes on with the number it had in the pass before: it has
    the same place in a batch of as many, or, where sequences lie side by side (continuous batching), the next position;
    a prompt that comes in parts is known by it, too. Where neither says, it has a new number.
    """

    def __init__(self) -> None:
        self._next = 0
        self._numbers: Ids = np.empty(0, np.int64)  # of the sequences of the last pass
        self._following: dict[int, list[int]] = {}  # position that would come next -> requests, in order

    def of_rows(self, info: IterationInfo) -> Ids:
        """[T], pads included: theirs mean nothing. Needs the `sequences` of the pass; to be called once a pass."""
        assert info.sequences is not None, "the engine asks for them"
        sequences = info.sequences
        if info.starts is not None:
            return self._side_by_side(info, sequences, info.starts.tolist())
        num_sequences = int(sequences[-1]) + 1
        if info.phase == "prefill" or len(self._numbers) != num_sequences:
            self._numbers = np.arange(self._next, self._next + num_sequences)
            self._next += num_sequences
        return self._numbers[sequences]

    def _side_by_side(self, info: IterationInfo, sequences: npt.NDArray[np.int32], starts: list[int]) -> Ids:
        is_real = slice(None) if info.is_pad is None else ~info.is_pad
        lengths = np.bincount(sequences[is_real], minlength=len(starts))
        following: dict[int, list[int]] = {}
        numbers = np.full(len(starts), -1)
        for sequence, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
            if not length:
                continue
            known = self._following.get(start) if start else None
            if known:
                numbers[sequence] = known.pop(0)
            else:
                numbers[sequence] = self._next
                self._next += 1
            following.setdefault(start + length, []).append(int(numbers[sequence]))
        self._numbers, self._following = numbers, following
        return numbers[sequences]


class CannotLookAheadError(ConfigError):
    """Nothing can ask a model's routers early."""


class Collector:
    """Notes what a forward pass shows; watches the routers from `attach` to `detach`.

    `begin` and `routed` note references, and copies of what the model may overwrite. The functions that they return do
    the arithmetic, once and in any thread, and round through float16 as a trace does: who predicts from a recorded
    trace sees the same.
    """

    def __init__(
        self,
        wants: Collection[Want],
        layers: Sequence[LayerGeometry],
        taps: Sequence[RouterTap | None],
        embed: Embed,
        distance: int,
    ) -> None:
        """`taps` of all layers, where OF_ROUTERS are wanted. Raises CannotLookAheadError where a router cannot look
        ahead as it should, ConfigError where it does not show its inputs.
        """
        self.collect_ns = 0
        """Time that the forward pass spent here."""
        self._wants = frozenset(wants)
        self._layers = layers
        self._taps = taps if self._wants & OF_ROUTERS else ()
        self._embed = embed
        self._distance = min(distance, len(layers) - 1)
        self.is_watching = True
        """Whether routers are looked at in this pass; they are not where nobody is to predict it."""
        self._requests = RequestNumbers()
        self._info: IterationInfo | None = None
        self._is_real: Mask | None = None  # None: all rows are
        self._seen: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # router input [T, H], logits [T, E]
        deaf = [layer for layer, tap in enumerate(taps) if tap is None or not tap.can_look_ahead]
        if "lookahead" in self._wants and deaf:
            raise CannotLookAheadError(
                f"prediction: it looks ahead, but nothing can ask the routers of layers {deaf} to do so"
            )
        unseen = [layer for layer, tap in enumerate(taps) if tap is None]
        if "inputs" in self._wants and unseen:
            raise ConfigError(f"prediction: it needs the routers' inputs, which layers {unseen} do not show")

    @property
    def is_open(self) -> bool:
        """Is a pass under way that has rows to speak of?"""
        return self._info is not None

    def attach(self) -> None:
        attach_all(self._taps, self._router_ran)

    def detach(self) -> None:
        detach_all(self._taps)

    # -- in the forward pass -----------------------------------------------------------------------------------

    def begin(self, info: IterationInfo) -> Callable[[], Began] | None:
        """A pass begins; None where it has only pads."""
        start = perf_counter_ns()
        self._seen = {}
        self._info = None
        requests, is_real = self._requests.of_rows(info), None if info.is_pad is None else ~info.is_pad
        if is_real is not None and not is_real.any():
            return None
        self._info, self._is_real = info, is_real
        began = partial(self._began, info, requests, is_real)
        self.collect_ns += perf_counter_ns() - start
        return began

    def routed(
        self, demand: RouterRan, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> Callable[[], Routed] | None:
        """A router has chosen [T, K] with weights [T, K]; None where these are not the rows of the pass."""
        start = perf_counter_ns()
        seen = self._seen.pop(demand.layer, None)
        if self._info is None or not self.is_watching or len(top_k_index) != len(self._info.is_prefill):
            return None
        if seen is not None and len(seen[1]) != len(top_k_index):
            seen = None
        routed = partial(self._routed, demand, top_k_index, top_k_weights, seen, self._is_real, self._info)
        self.collect_ns += perf_counter_ns() - start
        return routed

    def end(self) -> None:
        """The pass has ended."""
        self._info = None
        self._seen = {}

    def _router_ran(self, layer: int, inputs: torch.Tensor, logits: torch.Tensor) -> None:
        if not self.is_watching:
            return
        start = perf_counter_ns()
        kept = inputs.detach().clone() if self._wants & {"lookahead", "inputs"} else None
        self._seen[layer] = kept, logits.detach()
        self.collect_ns += perf_counter_ns() - start

    # -- where it is asked for ---------------------------------------------------------------------------------

    def _began(self, info: IterationInfo, requests: npt.NDArray[np.int64], is_real: Mask | None) -> Began:
        embedding = None
        if "embedding" in self._wants:
            if info.embeddings is not None:
                embedding = _cut(info.embeddings, is_real)
            elif info.token_ids is not None:
                with torch.no_grad():
                    embedding = saturated_half(self._embed(_cut(info.token_ids, is_real)))
        token_ids = info.token_ids if "token_ids" in self._wants else None
        return Began(
            _read_only(_cut(requests, is_real)),
            _read_only(_cut(info.is_prefill, is_real)),
            None if embedding is None else _read_only(embedding.astype(np.float32)),
            info.layers,
            None if token_ids is None else _read_only(_cut(token_ids, is_real)),
        )

    def _routed(
        self,
        demand: RouterRan,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        seen: tuple[torch.Tensor | None, torch.Tensor] | None,
        is_real: Mask | None,
        info: IterationInfo,
    ) -> Routed:
        wants, layer = self._wants, demand.layer
        inputs, logits = (None, None) if seen is None else seen
        experts = scores = given = lookahead = None
        if wants & {"experts", "scores"}:
            experts = _read_only(_cut(top_k_index.cpu().numpy(), is_real))
        if "scores" in wants:
            assert experts is not None
            tap = self._taps[layer]
            if logits is None or tap is None:  # what is known of the router is what it chose
                weights = _cut(saturated_half(top_k_weights.detach()), is_real).astype(np.float32)
                scores = scores_of_choices(experts, weights, self._layers[layer].num_experts)
            else:
                scores = _cut(tap.normalised(logits).half().cpu().numpy(), is_real).astype(np.float32)
            _read_only(scores)
        if inputs is not None:
            if is_real is not None:
                inputs = inputs[torch.from_numpy(is_real).to(inputs.device)]
            if "inputs" in wants:
                given = _read_only(saturated_half(inputs).astype(np.float32))
            if "lookahead" in wants:
                lookahead = _read_only(self._look_ahead(layer, inputs, info))
        return Routed(demand, experts, scores, lookahead, given)

    def _look_ahead(self, layer: int, inputs: torch.Tensor, info: IterationInfo) -> Floats:
        """[T, D, E], 0 where no layer is so far ahead, and for layers of another width."""
        stack = range(len(self._layers)) if info.layers is None else info.layers
        num_experts = max(one.num_experts for one in self._layers)
        lookahead = np.zeros((len(inputs), self._distance, num_experts), np.float32)
        for distance in range(1, self._distance + 1):
            ahead = layer_ahead(layer, distance, stack, info.decodes)
            if ahead is None:
                break
            tap = self._taps[ahead]
            if tap is not None and tap.hidden_size == inputs.shape[-1]:
                scores = tap.scores(inputs).half().cpu().numpy()
                lookahead[:, distance - 1, : scores.shape[-1]] = scores
        return lookahead


def _cut(values: npt.NDArray[Any], is_real: Mask | None) -> npt.NDArray[Any]:
    return values if is_real is None else values[is_real]


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.setflags(write=False)
    return values


# -- the predictor's thread (fMoE, section 4.3) ------------------------------------------------------------------------


class PredictorThread:
    """A Channel whose predictor has a thread of its own.

    `queue` decides which observations wait and which are dropped. What predicting raises is raised by the next `take`,
    once; from then on nothing is predicted. The thread enters `context`. It calls `save` about `save_every_s` after it
    had something to do: when nothing waits, or after twice that time between two observations.
    """

    def __init__(
        self,
        predictor: Predictor,
        queue: ObservationQueue,
        save: Callable[[], object] | None = None,
        save_every_s: float = 60.0,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.error: BaseException | None = None
        """What ended predicting, once it was raised by `take`, too."""
        self._predictor = predictor
        self._queue = queue
        self._save = save
        self._save_every_s = save_every_s
        self._context = context
        self._ready: deque[Seen] = deque()
        self._untold: BaseException | None = None
        self._busy_since: float | None = None  # when it first had something to do after `save`
        self._is_open = True
        self._ends_at: float | None = None  # when the thread ends, whatever waits
        self._saves_last = False  # nobody waits for its end
        self._lock = threading.RLock()  # re-entrant: a garbage collection may close another model's channel
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._serve, name="expertly-predictor", daemon=True)
        self._thread.start()

    # -- the forward pass's side -------------------------------------------------------------------------------
    # An interrupt may come anywhere; it cannot come between taking the lock itself and the block that gives it back, as
    # it could within the condition's own code.

    @property
    def num_dropped(self) -> int:
        """Observations that nobody read, because of too many."""
        return self._queue.num_dropped

    def save_every(self, seconds: float) -> None:
        with self._lock:
            self._save_every_s = seconds
            self._changed.notify()

    def begin_iteration(self, step: int, began: Callable[[], Began]) -> None:
        with self._lock:
            if self._is_open:
                self._queue.begin_iteration(step, began)
                self._changed.notify()

    def router_ran(self, step: int, routed: Callable[[], Routed]) -> None:
        with self._lock:
            if self._is_open:
                self._queue.router_ran(step, routed)
                self._changed.notify()

    def end_iteration(self, ok: bool) -> None:
        with self._lock:
            if self._is_open:
                self._queue.end_iteration(ok)
                self._changed.notify()

    def take(self) -> Seen | None:
        """The next prediction that is ready. Raises what making one raised, once."""
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        return self._ready.popleft() if self._ready else None  # nobody else takes

    def close(self, wait_s: float = 1.0) -> bool:
        """Read what still waits, for so long at most, and end the thread. Idempotent; True when it has ended. Called by
        the thread itself it cannot have: then it calls `save` at its end.
        """
        with self._lock:
            self._is_open = False
            if self._ends_at is None:
                self._ends_at = time.monotonic() + wait_s
            self._changed.notify()
        if self._thread is threading.current_thread():  # a garbage collection in the thread itself
            self._saves_last = True
            return False
        with contextlib.suppress(RuntimeError):  # until it is not ours: an interrupt may have come as it was given back
            while True:
                self._lock.release()
        self._thread.join(wait_s + 10.0)
        return not self._thread.is_alive()

    # -- the thread's side -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with self._context():
                while (work := self._next()) is not None:
                    work()
                if self._saves_last and self._save is not None:
                    self._save_now()
        except BaseException as error:  # handed to the next `take`
            with self._changed:
                self._is_open = False
                self._queue.clear()
                self._untold = self.error = error

    def _next(self) -> Callable[[], None] | None:
        """What to do next, when there is something; None: end."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._ends_at is not None and now >= self._ends_at:
                    return None
                waited_s = 0.0 if self._busy_since is None else now - self._busy_since
                if self._save is not None and waited_s >= 2 * self._save_every_s:
                    return self._save_now
                work = self._queue.next()
                if work is not None:
                    self._busy_since = self._busy_since or now
                    return partial(self._read, work)
                if not self._is_open:
                    return None
                if self._save is None or self._busy_since is None:
                    self._changed.wait()
                elif waited_s >= self._save_every_s:
                    return self._save_now
                else:
                    self._changed.wait(self._save_every_s - waited_s)

    def _save_now(self) -> None:
        assert self._save is not None
        self._busy_since = None
        self._save()

    def _read(self, work: Work) -> None:
        for prediction in work.do(self._predictor):
            self._ready.append(Seen(work.step, prediction))


# -- an engine that predicts -------------------------------------------------------------------------------------------


Matcher = Literal["auto", "thread", "inline"]
MATCHERS: tuple[Matcher, ...] = ("auto", "thread", "inline")


def choose_matcher(system: System, matcher: Matcher) -> Matcher:
    """Where a system predicts; "auto" is beside the forward pass, unless that waits for what is predicted in any case.
    Raises ConfigError naming what is accepted.
    """
    if matcher not in MATCHERS:
        raise ConfigError(f"predict={matcher!r}: unknown; accepted: {', '.join(MATCHERS)}")
    is_synchronous = system.transfer == "synchronous"
    if matcher == "auto":
        return "inline" if is_synchronous else "thread"
    if system.prediction == "none":
        raise ConfigError(f"predict={matcher!r}: system {system.name!r} predicts nothing; accepted: auto")
    if matcher == "thread" and is_synchronous:
        raise ConfigError(
            f"predict='thread': system {system.name!r} waits for what it predicts (transfer=synchronous); accepted: "
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
        self.router_ran = collector.routed
        """What the predictor may see of a layer that is about to run; None where it is no part of the pass."""
        self._executor = executor
        self._thread: PredictorThread | None = None
        channel: Channel
        if matcher == "inline":
            channel = InlineChannel(predictor)
        else:
            queue = ObservationQueue.of_layers(executor.geometry.num_layers)
            save = None if maps is None else maps.save
            device = executor.shards[0].device.torch_device
            channel = self._thread = PredictorThread(
                predictor, queue, save, SAVE_EVERY_S, context=lambda: _thread_of(device)
            )
        executor.predict_from(channel)
        collector.attach()

    @property
    def num_dropped(self) -> int:
        """Observations that the predictor's thread did not get to."""
        return 0 if self._thread is None else self._thread.num_dropped

    @property
    def error(self) -> BaseException | None:
        """What ended predicting."""
        return None if self._thread is None else self._thread.error

    def share(self, every_s: float) -> LearnedExchange | None:
        """Exchange with others what is learned, about so often while something is, and at the end; None where nothing
        is learned, or it is kept nowhere. Who predicts inline exchanges at the end only.
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
            self.collector.is_watching = self._executor.observes

    def end_iteration(self, ok: bool) -> None:
        if self.collector.is_open:
            self.collector.end()
            self._executor.end_iteration(ok)

    def close(self) -> None:
        """End the thread and write what was learned, unless predicting failed. Raises StoreError where a file that
        somebody named cannot be written.
        """
        self.collector.detach()
        has_ended = self._thread is None or self._thread.close()
        if self.maps is not None and has_ended and self.error is None:
            self.predictor.finish()
            self.maps.close()


@contextlib.contextmanager
def _thread_of(device: torch.device) -> Iterator[None]:
    """What it is told was computed by then, so it need not wait for what the model has queued since."""
    with torch.inference_mode(), kind_of(device).beside(device):
        yield


def make_prefetching(
    system: System,
    model: Any,
    store: PackedStore,
    engine: Engine,
    matcher: Matcher,
    files: LearnedFiles,
    *,
    weights: LearnedWeights | None = None,
) -> Prefetching | None:
    """What predicts for a loaded model; None where the system does not. `weights`: of a learned predictor.

    Where router scores are wanted, one forward pass shows where the routers are; the engine is not told of it. Raises
    CannotLookAheadError where nothing can ask these early, ConfigError where the model cannot otherwise show what the
    predictor must see, or the weights are of another; StoreError as SavedState.read.
    """
    geometry = engine.executor.geometry
    predictor = system.predictor(geometry, Known(given=(weights,)))
    if predictor is None:
        return None
    taps: Sequence[RouterTap | None] = find_routers(model, geometry.layers) if predictor.wants & OF_ROUTERS else ()
    if weights is not None and weights.mlps:
        width = max((tap.hidden_size for tap in taps if tap is not None), default=0)
        if width != weights.hidden_size:
            found = f"for router inputs of {weights.hidden_size} numbers; this model's have {width}"
            raise ConfigError(f"predictor: its weights are {found}")
    collector = Collector(predictor.wants, geometry.layers, taps, embedder(model), system.distance)
    saved = None
    if files.of_prediction is not None and predictor.learned is not None:
        manifest = store.manifest
        saved = SavedState(predictor, files.of_prediction, manifest.identity, manifest.source, is_auto=files.is_auto)
        saved.read(model.get_input_embeddings().weight.shape[1])
    return Prefetching(engine.executor, predictor, collector, matcher, saved)


def embedder(model: Any) -> Embed:
    """Ids [T] to what the input embedding makes of them, [T, H]. It holds on to the embedding, not to the model."""
    module = model.get_input_embeddings()

    def embed(token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        embedded: torch.Tensor = module.forward(torch.from_numpy(token_ids.astype(np.int64)).to(module.weight.device))
        return embedded

    return embed

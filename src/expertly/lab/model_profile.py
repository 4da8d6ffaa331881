"""What a loaded model's passes and transfers cost on this machine, measured by running the engine itself."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle
from typing import Any, cast

import torch

from expertly.api import handle
from expertly.core.costs import CodecCosts, LayerTime, Link, MeasuredCompute
from expertly.core.errors import ConfigError, ModelUseError
from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan, Span
from expertly.core.observation import Began, IterationInfo, Routed
from expertly.core.resources import NUM_READERS
from expertly.engine.compute import LayerCall, LayerCompute, PartialExpert
from expertly.engine.cpu import CpuDevice
from expertly.engine.device import kind_of
from expertly.engine.observe import Collector, PredictorThread, embedder
from expertly.engine.reading import MIN_READ_NBYTES
from expertly.engine.runtime import dispatch
from expertly.hardware.measure import store_costs
from expertly.lab.planning import Planning
from expertly.lab.playing import forward
from expertly.lab.profile_fits import (
    LayerSample,
    Shot,
    cuts,
    fit_decoding,
    fit_layers,
    fit_link,
    layer_times,
    parts_and_part,
    samples_of,
)
from expertly.model.hooks import experts_modules
from expertly.model.routers import HookedRouter, find_routers
from expertly.policies.eviction.reuse import Reuse
from expertly.policies.known import NOTHING
from expertly.policies.predictor import Predictor
from expertly.policies.predictor.lookahead import Lookahead
from expertly.policies.predictor.popularity import Popularity
from expertly.scheduler.loop import run_layer
from expertly.scheduler.observations import Channel, InlineChannel, ObservationQueue
from expertly.sim.hardware import PredictorCosts

TOKENS = (1, 2, 4, 16, 64, 256)
CONTEXT = 32
"""Tokens in the KV cache when a decode step is measured."""

MAX_BATCH = 4
"""Up to so many tokens are measured as a batch of decoding requests; more as a prompt."""

PIECES = (1, 2, 4, 8)
"""How many spans are loaded at once to measure the link."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What the simulator needs to know of one model on one machine."""

    link: Link
    compute: MeasuredCompute
    predictor: PredictorCosts
    layers: tuple[LayerTime, ...] = ()  # of decode steps of one token, from which the costs of loading come


def measure_model(model: Any, seconds: float = 20.0, tokens: Sequence[int] = TOKENS) -> ModelProfile:
    """Measure for about `seconds` a model that `expertly.load` loaded with part of its experts in memory; passes of
    these numbers of `tokens`, which rise.

    Random tokens run through it, so its cache and its statistics are no longer what they were. Everything is measured
    in turn, again and again, and medians are taken, so that what else the machine does in some of that time is no
    part of it. Raises ConfigError where the memory budget leaves nothing to measure, ModelUseError for models whose
    layers' experts differ in shape and for encoder-decoder models.
    """
    measurement = Measurement(model, tokens)
    start, count = time.monotonic(), 0
    with torch.no_grad():
        while not count or time.monotonic() - start < seconds:
            for task in measurement.tasks():
                task()
                if count and time.monotonic() - start >= seconds:
                    break
            count += 1
    return measurement.profile()


def compressed_costs(model: Any, measured: ModelProfile) -> tuple[Link, CodecCosts] | None:
    """What reading and decoding of the model's compressed store cost apart, as the simulator adds them up; measured
    loads have both in them. None for a store that is not compressed.
    """
    store = handle(model).store
    if store.codec == "none":
        return None
    disk, costs = store_costs(store)
    if kind_of(model.device).runs_on_host:  # computing takes the processors that decode
        costs = fit_decoding(measured.layers, disk, costs, measured.compute, store.geometry(1))
    return disk, costs


@dataclass(slots=True)
class _Samples:
    """Nanoseconds measured with one number of tokens."""

    between: list[int] = field(default_factory=list)  # from one layer's experts to the next one's, of a pass
    outside: list[int] = field(default_factory=list)  # of a pass, outside all of its experts and what is between them
    one: list[int] = field(default_factory=list)  # one resident expert through the engine
    each: list[int] = field(default_factory=list)  # each further one
    in_parts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by the number of parts, alone

    def add(self, other: _Samples) -> None:
        self.between += other.between
        self.outside += other.outside


class _Onlooker:
    """Shows passes to a predictor: an Observer of the engine. Nothing is prefetched."""

    wants_token_ids = True

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        routers: Sequence[HookedRouter | None],
        *,
        has_thread: bool = True,
        is_light: bool = False,
    ) -> None:
        """`has_thread`: the predictor has one; else the pass itself predicts. `is_light`: it goes by counts alone."""
        self.predictor = _TimedPredictor(geometry, routers, is_light=is_light)
        self.collector = Collector(self.predictor.wants, geometry.layers, routers, embedder(model), 1)
        predictor = cast(Predictor, self.predictor)
        queue = ObservationQueue.of_layers(geometry.num_layers)
        self.thread = PredictorThread(predictor, queue) if has_thread else None
        self._channel: Channel = InlineChannel(predictor) if self.thread is None else self.thread

    def begin_iteration(self, info: IterationInfo) -> None:
        if (began := self.collector.begin(info)) is not None:
            self._channel.begin_iteration(0, began)

    def router_ran(self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        begin_ns = time.perf_counter_ns()
        if (routed := self.collector.routed(RouterRan(layer, [], [], [], 0), index, weights)) is not None:
            if self.thread is not None:
                begin_ns = time.perf_counter_ns()
            self._channel.router_ran(layer, partial(self.predictor.saw, begin_ns, routed))
            if self.thread is None:
                while self._channel.take() is not None:
                    pass

    def end_iteration(self, ok: bool) -> None:
        self.collector.end()
        self._channel.end_iteration(ok)


class _TimedPredictor:
    """Predicts the next layer from its router or, where a router cannot be asked, from how often experts were chosen;
    and takes the time.
    """

    def __init__(self, geometry: Geometry, routers: Sequence[HookedRouter | None], *, is_light: bool) -> None:
        can_ask = not is_light and all(router is not None and router.can_look_ahead for router in routers)
        self._predictor = (Lookahead if can_ask else Popularity).make(geometry, NOTHING)
        self.wants = self._predictor.wants
        self.took_ns: list[int] = []
        """For each router, until it was predicted: from when it was published, or the one before it was read; from when
        it ran, where the pass itself predicts.
        """
        self._since_ns = 0

    def saw(self, at_ns: int, routed: Callable[[], Routed]) -> Routed:
        """A router that ran, or was published, then is read."""
        self._since_ns = max(self._since_ns, at_ns)
        return routed()

    def begin_iteration(self, began: Began) -> Iterable[Prediction]:
        return self._predictor.begin_iteration(began)

    def router_ran(self, routed: Routed) -> Iterator[Prediction]:
        yield from self._predictor.router_ran(routed)
        now = time.perf_counter_ns()
        self.took_ns.append(now - self._since_ns)
        self._since_ns = now

    def end_iteration(self, ok: bool) -> None:
        self._predictor.end_iteration(ok)


class Measurement:
    """The measurements of one model so far; run all `tasks` at least once before `profile`."""

    def __init__(self, model: Any, tokens: Sequence[int] = TOKENS) -> None:
        self._model = model
        self._tokens = tuple(tokens)
        self._handle = handle(model)
        self._engine = self._handle.engine
        self._scheduler = self._engine.scheduler
        self._geometry = self._scheduler.geometry
        self._modules = experts_modules(model)
        self._layer = self._geometry.layers[0]
        self._generator = torch.Generator().manual_seed(0)
        self._turn = 0
        self._of_tokens = {num_tokens: _Samples() for num_tokens in tokens}
        self._shots: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # by spans and segments each
        self._prefetches_longer: dict[int, list[int]] = defaultdict(list)  # than the same loads, by their number
        self._alone: list[int] = []  # computing an expert
        self._loading: list[int] = []  # the same while spans are on their way
        self._layers_run: list[LayerSample] = []  # of decode steps of one token
        self._loading_passes = _Samples()  # those of them in which layers loaded
        self._num_loading: list[int] = []  # and in how many
        self._routers: list[HookedRouter | None] = []
        self._observed: list[int] = []  # what a layer took longer with an onlooker
        self._predicted: list[int] = []  # and how long it took to predict
        self._observed_light: list[int] = []  # the same of one that goes by counts alone
        self._predicted_light: list[int] = []
        self._inline: list[int] = []  # the same where the pass itself predicts
        self._observed_inline: list[int] = []
        self._inline_light: list[int] = []
        self._observed_inline_light: list[int] = []
        self._by_itself: list[int] = []  # what an expert takes longer that is computed by itself
        self._prefetched: dict[int, list[int]] = defaultdict(list)  # and beside so many prefetches
        self._planned: dict[int, list[tuple[int, int]]] = defaultdict(list)  # what deciding about them took, by guesses
        self._planning = Planning(self._geometry, self._scheduler.budget)
        self._decided: list[int] = []  # and where an eviction policy learned from its router's choice
        self._policy = cast(Reuse, Reuse.make(self._geometry, self._geometry.num_experts - 1))
        self._processor_ns: list[int] = []  # that this thread had in each layer's experts, of the last pass
        if model.config.is_encoder_decoder:
            raise ModelUseError("an encoder-decoder model's passes are of two kinds: its costs cannot be measured yet")
        if set(self._geometry.layers) != {self._layer}:
            raise ModelUseError("this model's layers have experts of several shapes: its costs cannot be measured yet")

    def tasks(self) -> Iterator[Callable[[], None]]:
        """Each measures one thing a few times. Run them without gradients, in this order."""
        for tokens in reversed(self._tokens):
            if tokens > MAX_BATCH:
                yield partial(self._prompt, tokens)
            else:
                yield partial(self._decode, tokens)
            if tokens > MAX_BATCH or tokens == self._tokens[-1]:
                yield from self._of_one_token()  # most of what a simulation adds up: it is measured most often
            yield partial(self._resident_experts, tokens)
            yield partial(self._parts, tokens)

    def _of_one_token(self) -> Iterator[Callable[[], None]]:
        yield partial(self._decode, 1)
        yield partial(self._resident_experts, 1)
        yield self._link
        yield self._busy_link
        yield self._observe

    def tasks_of_a_token(self) -> Iterator[Callable[[], None]]:
        """The tasks for what a decode step of one request depends on: a fraction of the time, to follow a drifting
        machine.
        """
        for task in (self._decode, self._resident_experts, self._parts):
            yield partial(task, 1)
        yield self._observe

    def profile(self) -> ModelProfile:
        """The medians of what the tasks have measured."""
        samples = [self._of_tokens[tokens] for tokens in self._tokens]
        if not samples[0].outside:
            samples[0].add(self._loading_passes)
        between = [_median(one.between) for one in samples]
        expert = [max(1, _median(one.each)) for one in samples]
        parts = [parts_and_part(one.in_parts) for one in samples]
        around = [max(0, ns - _median(one.in_parts[1])) for one, ns in zip(samples, expert, strict=True)]
        nbytes = self._geometry.segment_nbytes(0)
        shots = [
            Shot(n, n * size * nbytes, *map(_median, zip(*times, strict=True)))
            for (n, size), times in self._shots.items()
        ]
        costs = fit_layers(self._layers_run, self._layer.top_k, expert[0], self._layer.expert_nbytes, fit_link(shots))
        by_itself_ns = max(0, _median(self._by_itself or [0]))
        around_experts = [max(0, _median(one.one) - e) for one, e in zip(samples, expert, strict=True)]
        if costs.resident_ns is not None:
            around_experts[0] = max(0, costs.resident_ns - self._layer.top_k * expert[0])
        # Differences of two medians, which noise may eat: more tokens take no less.
        whole_parts = accumulate((whole for whole, _ in parts), max)
        head = accumulate((max(0, _median(one.outside) - b) for one, b in zip(samples, between, strict=True)), max)
        source = self._handle.store.manifest.source
        prefetch_ns, prefetch_each_ns = _line([(num, _median(times)) for num, times in self._prefetched.items()])
        plan_ns, plan_each_ns = self._planning_ns()
        with self._threads(1):
            num_threads = torch.get_num_threads()
        compute = MeasuredCompute(
            model=source if source.isprintable() else ascii(source),
            dtype=self._handle.store.manifest.dtype,
            num_threads=num_threads,
            context=CONTEXT,
            num_layers=self._geometry.num_layers,
            layer=self._layer,
            tokens=self._tokens,
            dense_ns=tuple(b + more for b, more in zip(between, around_experts, strict=True)),
            head_ns=tuple(head),
            expert_ns=tuple(expert),
            parts_ns=tuple(whole_parts),
            part_ns=tuple(each + more + by_itself_ns for (_, each), more in zip(parts, around, strict=True)),
            submit_ns=costs.submit_ns + self._waking_ns(samples[0]),
            load_ns=costs.load_ns,
            slowdown_while_loading=max(1.0, round(_median(self._loading) / _median(self._alone), 3)),
            observe_ns=max(0, _median(self._observed or [0])),
            observe_light_ns=max(0, _median(self._observed_light or [0])),
            plan_ns=plan_ns,
            prefetch_ns=prefetch_ns,
            prefetch_each_ns=plan_each_ns + max(0, prefetch_each_ns - costs.load_ns),
            decide_ns=max(0, _median(self._decided or [0])),
        )
        link = costs.link
        device = self._engine.device
        if isinstance(device, CpuDevice):  # readers or their caller begin prefetches, small ones together
            num, longer_ns = max((num, _median(times)) for num, times in self._prefetches_longer.items())
            num_reads = min(NUM_READERS, -(-self._layer.expert_nbytes // MIN_READ_NBYTES))
            num_latencies = -(-num // (NUM_READERS // num_reads)) if link.arrive_together else num
            link = replace(
                link,
                prefetch_latency_ns=max(1, (longer_ns + link.latency_ns) // num_latencies),
                prefetch_read_nbytes=MIN_READ_NBYTES,
                prefetches_when_called=device.prefetches_when_called,
            )
        predictor = PredictorCosts()
        if self._predicted:
            inline_ns = max(_median(self._inline), _median(self._observed_inline))
            inline_light_ns = max(_median(self._inline_light), _median(self._observed_inline_light))
            predictor = PredictorCosts(
                _median(self._predicted),
                inline_ns=inline_ns,
                light_ns=_median(self._predicted_light),
                inline_light_ns=inline_light_ns,
            )
        return ModelProfile(link, compute, predictor, layer_times(self._layers_run))

    def _waking_ns(self, quiet: _Samples) -> int:
        """What a layer that loads adds to a pass outside of experts: afterwards caches are cold, and threads asleep."""
        if not self._num_loading:
            return 0
        between, passes = self._geometry.num_layers - 1, (self._loading_passes, quiet)
        loading_ns, quiet_ns = (_median(one.outside) + between * _median(one.between) for one in passes)
        return max(0, round((loading_ns - quiet_ns) / statistics.mean(self._num_loading)))

    def _planning_ns(self) -> tuple[int, int]:
        """What deciding about prefetches takes of a layer, and each expert of them."""
        each = [([num for num, _ in one], [ns for _, ns in one]) for one in self._planned.values()]
        num_segments = self._geometry.segments_per_expert
        return _line([(statistics.mean(num) / num_segments, _median(ns)) for num, ns in each])

    # -- whole passes ------------------------------------------------------------------------------------------

    def _ids(self, num_requests: int, num_tokens: int) -> torch.Tensor:
        vocabulary = self._model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (num_requests, num_tokens), generator=self._generator)
        return ids.to(self._engine.device.torch_device)

    def _forward(self, ids: torch.Tensor, cache: Any) -> Any:
        """One pass as `generate` makes it: logits of the last token alone where the model can, and choosing a token."""
        logits, cache = forward(self._model, ids, cache)
        logits.argmax(-1).tolist()
        return cache

    def _decode(self, num_requests: int) -> None:
        """Decode steps after short prompts. Each is made twice: the second time all its experts are here."""
        cache = self._forward(self._ids(num_requests, CONTEXT), None)
        cache = self._forward(self._ids(num_requests, 1), cache)
        for step in range(12 // num_requests):
            if step % 2 == 0:
                ids, as_before = self._ids(num_requests, 1), deepcopy(cache)
            else:
                cache = as_before
            before = self._counts()
            cache, took = self._pass(ids, cache)
            after = self._counts()
            samples = self._of_tokens[num_requests]
            if num_requests == 1:
                processor_ns = None if self._engine.threads is None else self._processor_ns
                self._layers_run += samples_of(before, after, self._layer.expert_nbytes, processor_ns)
                if num_loading := sum(new[1] > old[1] for old, new in zip(before, after, strict=True)):
                    self._num_loading.append(num_loading)
                    samples = self._loading_passes
            samples.add(took)

    def _observe(self) -> None:
        """Decode steps whose experts are here: as they are, with an onlooker, beside prefetches, with a policy."""
        layers, engine = self._geometry.layers, self._engine
        self._routers = self._routers or find_routers(self._model, layers)
        make = partial(_Onlooker, self._model, self._geometry, self._routers)
        beside, light, inline = make(), make(is_light=True), make(has_thread=False)
        inline_light = make(has_thread=False, is_light=True)
        onlookers: tuple[tuple[_Onlooker, list[int], list[int]], ...] = (
            (beside, self._observed, self._predicted),
            (light, self._observed_light, self._predicted_light),
            (inline, self._observed_inline, self._inline),
            (inline_light, self._observed_inline_light, self._inline_light),
        )
        cache, before = self._forward(self._ids(1, CONTEXT), None), engine.observer

        def took_ns(ids: torch.Tensor) -> int:
            again = deepcopy(cache)
            return _timed(lambda: self._forward(ids, again))

        try:
            for _ in range(6):
                ids = self._ids(1, 1)
                took_ns(ids)
                loaded, alone_ns = self._loaded_nbytes(), took_ns(ids)
                if self._loaded_nbytes() > loaded:
                    continue  # the cache does not hold a step's experts
                for onlooker, observed, predicted in onlookers:
                    onlooker.collector.attach()
                    engine.observer = onlooker
                    observed.append((took_ns(ids) - alone_ns) // len(layers))
                    onlooker.collector.detach()
                    engine.observer = before
                    predicted += onlooker.predictor.took_ns
                    onlooker.predictor.took_ns = []
                for num_spans in (1, self._layer.top_k):
                    with self._prefetching(num_spans) as num:
                        self._prefetched[num].append((took_ns(ids) - alone_ns) // len(layers))
                    with self._deciding_about(num_spans):
                        took_ns(ids)
                with self._deciding():
                    self._decided.append((took_ns(ids) - alone_ns) // len(layers))
        finally:
            for onlooker, *_ in onlookers:
                onlooker.collector.detach()
                if onlooker.thread is not None:
                    onlooker.thread.close()
            engine.observer = before

    def _loaded_nbytes(self) -> int:
        return sum(nbytes for _, nbytes, *_ in self._counts())

    @contextmanager
    def _prefetching(self, num_spans: int) -> Iterator[int]:
        """Within the block, so many experts are prefetched beside each layer, into empty places, of which there may be
        fewer: their number. No layer may load.
        """
        engine: Any = self._engine
        device, run, num_coming = engine.device, engine.forward_experts, 0
        loads = self._loads(num_spans, self._geometry.segments_per_expert)

        def beside(*args: Any) -> torch.Tensor:
            nonlocal num_coming
            device.prefetch(loads)
            num_coming += len(loads)
            out = run(*args)
            while device.poll() is not None:
                num_coming -= 1
            return out

        engine.forward_experts = beside
        try:
            yield len(loads)
        finally:
            del engine.forward_experts
            for _ in range(num_coming):
                device.wait()

    @contextmanager
    def _deciding_about(self, num_guessed: int) -> Iterator[None]:
        """Within the block, prefetches of so many experts are decided about beside each layer."""
        engine: Any = self._engine
        run = engine.forward_experts

        def beside(module: Any, layer: int, *rest: Any) -> torch.Tensor:
            self._planned[num_guessed].append(self._planning.ran(layer, num_guessed))
            return run(module, layer, *rest)

        engine.forward_experts = beside
        try:
            yield
        finally:
            del engine.forward_experts

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Within the block, a policy that learns is told what each layer needs."""
        engine: Any = self._engine
        run = engine.forward_experts

        def beside(module: Any, layer: int, hidden: torch.Tensor, index: torch.Tensor, *rest: Any) -> torch.Tensor:
            experts = sorted(index.flatten().tolist())
            self._policy.needed(experts, RouterRan(layer, experts, [1] * len(experts), [True] * len(experts), 1))
            self._policy.all_scores()
            return run(module, layer, hidden, index, *rest)

        engine.forward_experts = beside
        try:
            yield
        finally:
            del engine.forward_experts

    def _counts(self) -> list[tuple[int, ...]]:
        """For each layer in decode: experts not wholly resident, bytes loaded, time of its experts, time waited."""
        return [
            (one.misses + one.partial_hits, one.loaded_nbytes, one.expert_ns, one.stall_ns)
            for one in (counters.decode for counters in self._scheduler.counters)
        ]

    def _prompt(self, num_tokens: int) -> None:
        self._of_tokens[num_tokens].add(self._pass(self._ids(1, num_tokens), None)[1])

    def _pass(self, ids: torch.Tensor, cache: Any) -> tuple[Any, _Samples]:
        """Run one: the KV cache and what it took outside of experts."""
        with self._watched() as times:
            start = time.perf_counter_ns()
            cache = self._forward(ids, cache)
            total = time.perf_counter_ns() - start
        begins, ends = ([wall for wall, _ in which] for which in (times[::2], times[1::2]))
        self._processor_ns = [end - begin for (_, begin), (_, end) in zip(times[::2], times[1::2], strict=True)]
        between = [begin - end for end, begin in zip(ends, begins[1:], strict=False)]
        return cache, _Samples(between or [0], [total - (ends[-1] - begins[0])])

    @contextmanager
    def _watched(self) -> Iterator[list[tuple[int, int]]]:
        """While the block runs: begin and end of each layer's experts, and processor time. Hooks of torch would take
        a tenth of a small model's pass.
        """
        times: list[tuple[int, int]] = []
        engine: Any = self._engine
        run = engine.forward_experts

        def noted(*args: Any) -> torch.Tensor:
            times.append((time.perf_counter_ns(), time.thread_time_ns()))
            out = run(*args)
            times.append((time.perf_counter_ns(), time.thread_time_ns()))
            return out

        engine.forward_experts = noted
        try:
            yield times
        finally:
            del engine.forward_experts

    # -- experts -----------------------------------------------------------------------------------------------

    def _resident(self) -> list[list[Span]]:
        """For each layer with at least two of them, the experts that lie whole in one frame."""
        whole, geometry = self._scheduler.slots.whole, self._geometry
        layers = []
        for layer in range(geometry.num_layers):
            first = geometry.first_expert_id(layer)
            spans = [span for span in whole[first : first + self._layer.num_experts] if span is not None]
            if len(spans) > 1:
                layers.append(spans)
        if not layers:
            nbytes = self._scheduler.budget.memory_nbytes
            raise ConfigError(f"memory={nbytes} bytes: too few experts stay in it to measure them; give it more")
        return layers

    def _some_layers(self, num_tokens: int) -> list[list[Span]]:
        """`_resident`; for many tokens, which take long, only three of its layers."""
        layers = self._resident()
        if num_tokens <= MAX_BATCH:
            return layers
        first = self._turn % len(layers)
        return (layers[first:] + layers[:first])[:3]

    def _hidden(self, num_tokens: int) -> torch.Tensor:
        width = self._layer.hidden_size
        hidden = torch.randn(num_tokens, width, generator=self._generator)
        return hidden.to(self._engine.device.torch_device, getattr(torch, self._handle.store.manifest.dtype))

    def _threads(self, num_tokens: int) -> AbstractContextManager[None]:
        """The compute threads of a pass in which an expert has so many tokens."""
        if self._engine.threads is None:
            return nullcontext()
        num_rows = num_tokens * self._layer.num_experts // self._layer.top_k if num_tokens > MAX_BATCH else num_tokens
        return self._engine.threads.of_pass(num_rows)

    def _run_experts(self, layer: int, experts: list[int], hidden: torch.Tensor) -> int:
        """Nanoseconds of a layer's experts when every token goes to all of these."""
        index = torch.tensor([experts], device=hidden.device).repeat(len(hidden), 1)
        weights = torch.full(index.shape, 1 / len(experts), dtype=hidden.dtype, device=hidden.device)
        with self._threads(len(hidden)):
            start = time.perf_counter_ns()
            self._engine.forward_experts(self._modules[layer], layer, hidden, index, weights)
            self._synchronise()
            return time.perf_counter_ns() - start

    def _resident_experts(self, num_tokens: int) -> None:
        """Several experts of a layer, timed against one of the layer before, so that nothing timed was used just
        before.
        """
        hidden, samples = self._hidden(num_tokens), self._of_tokens[num_tokens]
        before = self._resident()[-1]
        self._run_experts(before[0].layer, [before[0].expert], hidden)  # what is made at a first use is no part of it
        for spans in self._some_layers(num_tokens):
            self._turn += 1
            alone = before[self._turn % len(before)]
            turn = self._turn % len(spans)
            several = [span.expert for span in spans[turn:] + spans[:turn]][: max(2, self._layer.top_k)]
            one = self._run_experts(alone.layer, [alone.expert], hidden)
            samples.one.append(one)
            samples.each.append((self._run_experts(spans[0].layer, several, hidden) - one) // (len(several) - 1))
            if num_tokens == 1 and kind_of(self._engine.device.torch_device).runs_on_host:
                self._by_itself.append(self._runs_longer_ns(spans[0].layer, several, hidden) // (len(several) - 1))
            before = spans

    def _runs_longer_ns(self, layer: int, experts: list[int], hidden: torch.Tensor) -> int:
        """How much longer these experts take if each is computed by itself, as parts are."""
        work = dispatch(layer, torch.tensor([experts]), self._layer.num_experts, None)
        compute, took_ns = self._layer_compute(layer, self._geometry.segments_per_expert), []
        with self._threads(1):
            for together in (True, False, True, False):
                call = LayerCall(compute, work, hidden)
                run = partial(run_layer, self._scheduler, self._engine.device, work.router, call.compute)
                took_ns.append(_timed(partial(run, together=together)))
        return took_ns[3] - took_ns[2]

    def _parts(self, num_tokens: int) -> None:
        """Compute whole experts, and two ways to cut them into parts."""
        hidden, in_parts = self._hidden(num_tokens), self._of_tokens[num_tokens].in_parts
        out = torch.empty_like(hidden)
        few, many = cuts(self._layer.num_blocks)
        experts = self._slot_views(many)
        with self._threads(num_tokens):
            for num_parts in (1, few, many) * (8 if num_tokens <= MAX_BATCH else 2):
                in_parts[num_parts].append(_timed(partial(_in_parts, *next(experts), hidden, out, num_parts)))

    def _slot_views(self, num_segments: int) -> Iterator[tuple[LayerCompute, int, Callable[[], None]]]:
        """Endlessly: the arithmetic of a layer for so many segments, and the first slot of one of its resident experts.
        Goes on where the last call ended, so that no processor cache holds what comes.
        """
        old, resident = self._geometry.segments_per_expert, self._resident()
        computes = {spans[0].layer: self._layer_compute(spans[0].layer, num_segments) for spans in resident}
        frames = [span for spans in resident for span in spans]
        while True:
            self._turn += 1
            span = frames[self._turn % len(frames)]
            yield computes[span.layer], span.slot * num_segments // old, self._synchronise

    def _layer_compute(self, layer: int, num_segments: int) -> LayerCompute:
        device, kernels = self._engine.device, self._engine.executor.shards[0].kernels
        module, rows = self._modules[layer], device.rows(layer)
        return LayerCompute(module, self._layer, num_segments, rows, device.dtype, None, kernels)

    # -- transfers ---------------------------------------------------------------------------------------------

    def _free_frames(self) -> list[int]:
        """The first slots of empty places for a whole expert."""
        num_segments = self._geometry.segments_per_expert
        free = set(self._scheduler.slots.pools[0].free_slots())
        starts = [slot for slot in sorted(free) if slot % num_segments == 0]
        frames = [slot for slot in starts if all(slot + i in free for i in range(num_segments))]
        if not frames:
            nbytes = self._scheduler.budget.memory_nbytes
            raise ConfigError(
                f"memory={nbytes} bytes: all experts stay in it, or its staging slots hold no whole one; give it part "
                "of them"
            )
        return frames

    def _loads(self, num_spans: int, num_segments: int) -> list[Span]:
        """Spans of random experts, to be loaded into empty places; fewer where there are not so many. None is used
        twice: the first read of an expert is compared with its checksum, where it was read to.
        """
        geometry, frames = self._geometry, self._free_frames()
        layers = torch.randint(geometry.num_layers, (num_spans,), generator=self._generator).tolist()
        experts = torch.randperm(self._layer.num_experts, generator=self._generator).tolist()
        pairs = zip(layers, cycle(experts), frames, strict=False)
        return [Span(layer, expert, 0, num_segments, slot) for layer, expert, slot in pairs]

    def _link(self) -> None:
        """How long spans take that are submitted together to an idle link, and how much longer if prefetched."""
        backend, whole = self._engine.device, self._geometry.segments_per_expert
        for n in PIECES:
            for size in sorted({1, whole}):
                loads = self._loads(n, size)
                shot = self._come_ns(loads, backend.submit)
                self._shots[len(loads), size].append(shot)
        longer_ns = self._come_ns(self._loads(n, whole), backend.prefetch)[1] - shot[1]
        self._prefetches_longer[len(loads)].append(longer_ns)

    def _come_ns(self, spans: list[Span], ask: Callable[[Sequence[Span]], None]) -> tuple[int, int]:
        """After how many nanoseconds the first span and the last one were there."""
        start, came_ns = time.perf_counter_ns(), list[int]()
        ask(spans)
        for _ in spans:
            self._engine.device.wait()
            came_ns.append(time.perf_counter_ns() - start)
        self._synchronise()
        return came_ns[0], time.perf_counter_ns() - start

    def _busy_link(self) -> None:
        """Compute an expert alone, and while spans are loading."""
        backend, hidden = self._engine.device, self._hidden(1)
        out = torch.empty_like(hidden)
        experts = self._slot_views(1)
        with self._threads(1):
            for _ in range(2):
                self._alone += [_timed(lambda: _in_parts(*next(experts), hidden, out, 1)) for _ in range(8)]
                loads = self._loads(8, self._geometry.segments_per_expert)
                backend.submit(loads)
                num_coming = len(loads)
                while num_coming:
                    spent = _timed(lambda: _in_parts(*next(experts), hidden, out, 1))
                    while num_coming and backend.poll() is not None:
                        num_coming -= 1
                    if num_coming or not self._loading:
                        self._loading.append(spent)

    def _synchronise(self) -> None:
        if not kind_of(self._engine.device.torch_device).runs_on_host:
            torch.accelerator.synchronize()


def _in_parts(
    compute: LayerCompute,
    slot: int,
    synchronise: Callable[[], None],
    x: torch.Tensor,
    out: torch.Tensor,
    num_parts: int,
) -> None:
    """Compute the expert that begins at `slot`, at once or in equal parts."""
    size = compute.num_segments // num_parts
    spans = [Span(0, 0, first, size, slot + first) for first in range(0, compute.num_segments, size)]
    in_slots = None if compute.slots is None else compute.slots.begin(x, out)
    if in_slots is not None:
        for span in spans:
            in_slots.add([(span, range(len(x)), range(len(x)))])
    elif num_parts == 1:
        compute.whole(x, spans[0], out)
    else:
        expert = PartialExpert(compute, x, out)
        for span in spans:
            expert.add(span)
    synchronise()


def _timed(run: Callable[[], None]) -> int:
    start = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start


def _line(points: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """The value at 0 and what it rises by for each, of a line through the outermost points (x, y); at least 0, as of
    no points.
    """
    if not points:
        return 0, 0
    (few, few_ns), (many, many_ns) = min(points), max(points)
    each_ns = max(0.0, (many_ns - few_ns) / (many - few)) if many > few else 0.0
    return max(0, round(few_ns - few * each_ns)), round(each_ns)


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values))

"""The six numbers of the simulator's clock for a loaded model, measured on this machine by running the engine."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from expertly.api import handle
from expertly.core.errors import ConfigError, ModelUseError
from expertly.core.messages import Span
from expertly.core.resources import cpu_name
from expertly.engine.device import kind_of
from expertly.model.hooks import RanStep, experts_modules
from expertly.model.playing import forward
from expertly.model.structure import dense_shape
from expertly_lab.sim.hardware import Hardware, Link

CONTEXT = 32
"""Tokens in the KV cache when a decode step is measured."""

MANY = 8
"""Spans that are loaded at once to measure the link's rate."""

_NUM_STEPS = 12


def measure_model(model: Any, seconds: float = 20.0) -> Hardware:
    """Measure for about `seconds` a model that `expertly.load` loaded with part of its experts in memory.

    Random tokens run through it, so its cache and its statistics are no longer what they were. Everything is measured
    in turn, again and again, and medians are taken, so that what else the machine does in some of that time is no
    part of it. Raises ConfigError where the memory budget leaves nothing to measure, ModelUseError for models whose
    layers' experts differ in shape and for encoder-decoder models.
    """
    measurement = Measurement(model)
    start = time.monotonic()
    measurement.run()
    while time.monotonic() - start < seconds:
        measurement.run()
    return measurement.hardware()


class Measurement:
    """The measurements of one model so far; `run` at least once before `hardware`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._engine = handle(model).engine
        self._dtype = getattr(torch, handle(model).store.manifest.dtype)
        self._scheduler = self._engine.scheduler
        self._geometry = self._scheduler.geometry
        self._layer = self._geometry.layers[0]
        self._generator = torch.Generator().manual_seed(0)
        self._turn = 0
        self._expert_ns: list[int] = []  # of each expert but the first of several
        self._between_ns: list[int] = []  # from one layer's experts to the next one's
        self._outside_ns: list[int] = []  # of a step, before its first layer's experts and behind the last one's
        self._busy_ns: dict[int, list[int]] = defaultdict(list)  # of a layer's experts, waits left out, by its misses
        self._loads_ns: dict[int, list[int]] = defaultdict(list)  # until so many experts were there
        if set(self._geometry.layers) != {self._layer}:
            raise ModelUseError("this model's layers have experts of several shapes: its costs cannot be measured yet")

    def run(self) -> None:
        """Measure everything once."""
        with torch.no_grad():
            self._decode()
            self._resident_experts()
            self._loads()

    def hardware(self) -> Hardware:
        """The medians of what was measured."""
        expert_ns = max(1, _median(self._expert_ns))
        rate = self._layer.expert_nbytes / expert_ns * 1e9
        few, many = min(self._loads_ns), max(self._loads_ns)
        few_ns, many_ns = _median(self._loads_ns[few]), _median(self._loads_ns[many])
        each_ns = max(1.0, (many_ns - few_ns) / (many - few) if many > few else float(few_ns))
        misses = min(self._busy_ns)  # none, where a step's experts were all here
        around_ns = max(0, _median(self._busy_ns[misses]) - self._layer.top_k * expert_ns)
        extra_ns = [
            (busy_ns - _median(self._busy_ns[misses])) / (num - misses)
            for num, times in self._busy_ns.items()
            for busy_ns in times
            if num > misses
        ]
        dense = dense_shape(self._model)
        between_ns = _median(self._between_ns)
        return Hardware(
            name=cpu_name() if self._runs_on_host else str(self._model.device),
            link=Link(self._layer.expert_nbytes / each_ns * 1e9, max(0, round(few_ns - few * each_ns))),
            expert_nbytes_per_s=rate,
            layer_ns=max(0, round(between_ns + around_ns - dense.layer_nbytes / rate * 1e9)),
            head_ns=max(0, round(_median(self._outside_ns) - between_ns - dense.head_nbytes / rate * 1e9)),
            miss_ns=max(0, round(statistics.median(extra_ns))) if extra_ns else 0,
        )

    @property
    def _runs_on_host(self) -> bool:
        return kind_of(self._engine.device.torch_device).runs_on_host

    # -- passes ------------------------------------------------------------------------------------------------

    def _ids(self, num_tokens: int) -> torch.Tensor:
        vocabulary = self._model.get_input_embeddings().num_embeddings
        return torch.randint(vocabulary, (1, num_tokens), generator=self._generator)

    def _forward(self, ids: torch.Tensor, cache: Any) -> Any:
        """One pass as `generate` makes it: logits of the last token alone where the model can, and choosing a token."""
        logits, cache = forward(self._model, ids, cache)
        logits.argmax(-1).tolist()
        return cache

    def _decode(self) -> None:
        """Decode steps after a short prompt. Each is made twice: the second time all its experts are here."""
        cache = self._forward(self._ids(CONTEXT), None)
        cache = self._forward(self._ids(1), cache)
        for step in range(_NUM_STEPS):
            if step % 2 == 0:
                ids, as_before = self._ids(1), deepcopy(cache)
            else:
                cache = as_before
            before = self._counts()
            with self._watched() as times_ns:
                start_ns = time.perf_counter_ns()
                cache = self._forward(ids, cache)
                total_ns = time.perf_counter_ns() - start_ns
            for old, new in zip(before, self._counts(), strict=True):
                misses, busy_ns = (b - a for a, b in zip(old, new, strict=True))
                self._busy_ns[misses].append(busy_ns)
            begins, ends = times_ns[::2], times_ns[1::2]
            self._between_ns += [begin - end for end, begin in zip(ends, begins[1:], strict=False)] or [0]
            self._outside_ns.append(total_ns - (ends[-1] - begins[0]))

    def _counts(self) -> list[tuple[int, int]]:
        """For each layer in decode: experts not wholly resident, and time of its experts without waits."""
        decode = [counters.decode for counters in self._scheduler.counters]
        return [(counts.misses + counts.partial_hits, counts.expert_ns - counts.stall_ns) for counts in decode]

    @contextmanager
    def _watched(self) -> Iterator[list[int]]:
        """While the block runs: begin and end of each layer's experts. Hooks of torch would take a tenth of a small
        model's pass.
        """
        times_ns: list[int] = []
        engine: Any = self._engine
        run, ran = engine.forward_experts, engine.ran

        def noted(*args: Any) -> torch.Tensor:
            times_ns.append(time.perf_counter_ns())
            out = run(*args)
            times_ns.append(time.perf_counter_ns())
            return out

        def by_itself(layers: Sequence[RanStep]) -> None:
            for *_, clock, _ in layers:
                times_ns.extend(clock[-2:])
            ran(layers)

        engine.forward_experts, engine.ran = noted, by_itself
        try:
            yield times_ns
        finally:
            del engine.forward_experts, engine.ran

    # -- experts -----------------------------------------------------------------------------------------------

    def _resident_experts(self) -> None:
        """Several experts of a layer, timed against one of the layer before, so that nothing timed was used just
        before.
        """
        hidden = torch.randn(1, self._layer.hidden_size, generator=self._generator)
        hidden = hidden.to(self._engine.device.torch_device, self._dtype)
        layers = self._resident()
        before = layers[-1]
        self._run_experts(before[:1], hidden)  # what is made at a first use is no part of it
        for spans in layers:
            self._turn += 1
            turn = self._turn % len(spans)
            several = (spans[turn:] + spans[:turn])[: max(2, self._layer.top_k)]
            alone_ns = self._run_experts([before[self._turn % len(before)]], hidden)
            several_ns = self._run_experts(several, hidden)
            self._expert_ns.append((several_ns - alone_ns) // (len(several) - 1))
            before = spans

    def _resident(self) -> list[list[Span]]:
        """For each layer with at least two of them, the experts that lie whole in one frame."""
        whole, geometry = self._scheduler.cache.whole, self._geometry
        layers = []
        for layer in range(geometry.num_layers):
            first = geometry.first_ids[layer]
            spans = [span for span in whole[first : first + self._layer.num_experts] if span is not None]
            if len(spans) > 1:
                layers.append(spans)
        if not layers:
            nbytes = self._scheduler.budget.memory_nbytes
            raise ConfigError(f"memory={nbytes} bytes: too few experts stay in it to measure them; give it more")
        return layers

    def _run_experts(self, spans: Sequence[Span], hidden: torch.Tensor) -> int:
        """Nanoseconds of these experts of a layer for one token that goes to all of them."""
        layer, experts = spans[0].layer, [span.expert for span in spans]
        index = torch.tensor([experts], device=hidden.device)
        weights = torch.full(index.shape, 1 / len(experts), dtype=hidden.dtype, device=hidden.device)
        module = experts_modules(self._model)[layer]
        return self._timed(lambda: self._engine.forward_experts(module, layer, hidden, index, weights))

    # -- transfers ---------------------------------------------------------------------------------------------

    def _loads(self) -> None:
        """One expert, then several together, from an idle link."""
        for num in (1, MANY):
            spans = self._absent(num)

            def come(spans: Sequence[Span] = spans) -> None:
                self._engine.device.submit(spans)
                for _ in spans:
                    self._engine.device.wait()

            self._loads_ns[len(spans)].append(self._timed(come))

    def _absent(self, num: int) -> list[Span]:
        """Spans of random experts, to be loaded into empty places; fewer where there are not so many."""
        num_segments = self._geometry.segments_per_expert
        free = set(self._scheduler.cache.pools[0].free_slots())
        starts = [slot for slot in sorted(free) if slot % num_segments == 0]
        frames = [slot for slot in starts if all(slot + i in free for i in range(num_segments))][:num]
        if not frames:
            nbytes = self._scheduler.budget.memory_nbytes
            raise ConfigError(
                f"memory={nbytes} bytes: all experts stay in it, or its staging slots hold no whole one; give it part "
                "of them"
            )
        experts = torch.randperm(self._geometry.num_experts, generator=self._generator).tolist()
        places = [divmod(number, self._layer.num_experts) for number in experts[: len(frames)]]
        pairs = zip(places, frames, strict=True)
        return [Span(layer, expert, 0, num_segments, slot) for (layer, expert), slot in pairs]

    def _timed(self, run: Callable[[], object]) -> int:
        start_ns = time.perf_counter_ns()
        run()
        if not self._runs_on_host:
            torch.accelerator.synchronize()
        return time.perf_counter_ns() - start_ns


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values))

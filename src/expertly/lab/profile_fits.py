"""Fits what loading, decoding and computing in parts cost in real passes to how long layers with no, one, two ...
absent experts took.

Measured alone, link, decoder and arithmetic are each faster than together: reader threads and copies share cores and
memory with the arithmetic, and threads wait for the interpreter lock and to be woken. So all costs are taken from
passes in which they happen together.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.core.costs import CodecCosts, LayerTime, Link, MeasuredCompute
from expertly.core.geometry import Geometry
from expertly.core.messages import Span
from expertly.sim.hardware import Hardware
from expertly.sim.link import Clock, VirtualLink


class Shot(NamedTuple):
    """Spans of one size submitted together to an idle link, and nanoseconds until the first and the last was there."""

    num: int
    nbytes: int  # of all
    first_ns: float
    last_ns: float


def fit_link(shots: Sequence[Shot]) -> Link:
    """The Link that explains `shots` best: least squares of relative errors, without negative numbers. Spans arrive
    together if, where most were submitted, the first of them came nearer to the last than to one by itself.
    """
    spans, nbytes, _, times = (np.array(column, dtype=np.float64) for column in zip(*shots, strict=True))
    columns = np.stack([nbytes, np.ones_like(times), spans], axis=1) / times[:, None]
    ns_per_byte, latency_ns, overhead_ns = nonnegative_fit(columns, np.ones_like(times), needs_first=True)
    most = max(shots, key=lambda shot: (shot.nbytes, shot.num))
    one = min(shot.last_ns for shot in shots if shot.nbytes * most.num == most.nbytes * shot.num)
    together = most.num > 1 and most.last_ns - most.first_ns < most.first_ns - one
    return Link(1e9 / ns_per_byte, round(latency_ns), round(overhead_ns), arrive_together=together)


def nonnegative_fit(
    columns: npt.NDArray[np.float64], target: npt.NDArray[np.float64], needs_first: bool = False
) -> list[float]:
    """Factors >= 0 of the columns [n, few] whose weighted sum is nearest to the target [n] in least squares. With
    `needs_first` the first factor is positive; without, all may be 0.
    """
    num = columns.shape[1]
    best: tuple[float, list[float]] = (float("inf"), [0.0] * num)
    for used in (list(some) for size in range(num + 1) for some in combinations(range(num), size)):
        if needs_first and 0 not in used:
            continue
        found, *_ = np.linalg.lstsq(columns[:, used], target, rcond=None)
        if np.any(found < 0) or (needs_first and found[0] <= 0):
            continue
        error = float(np.square(columns[:, used] @ found - target).sum())
        if error < best[0] * (1 - 1e-9):
            values = [0.0] * num
            for column, value in zip(used, found, strict=True):
                values[column] = float(value)
            best = error, values
    return best[1]


_LEAST_SAMPLES = 3
"""A number of absent experts that fewer layers had is left out."""

_GRID = 33
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class LayerSample:
    """One layer of one decode step of one token."""

    num_absent: int  # of its experts, wholly
    total_ns: int  # the experts function
    stall_ns: int  # of it, waited for transfers

    @property
    def busy_ns(self) -> int:
        return self.total_ns - self.stall_ns


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Nanoseconds of the computing thread, and the link that explains the remaining time."""

    resident_ns: int | None  # a layer with every expert resident; None: not seen
    submit_ns: int  # once a layer that loads: deciding, evicting, waking readers, and sharing the cores with them
    load_ns: int  # for each expert loaded
    link: Link


def layer_times(samples: Iterable[LayerSample]) -> tuple[LayerTime, ...]:
    """Times by rising number of absent experts; numbers that were seen too rarely are left out."""
    seen = _by_absent(samples)
    return tuple(LayerTime(n, round(statistics.median(one.total_ns for one in of)), len(of)) for n, of in seen.items())


def _by_absent(samples: Iterable[LayerSample]) -> dict[int, list[LayerSample]]:
    by_absent: dict[int, list[LayerSample]] = defaultdict(list)
    for sample in samples:
        by_absent[sample.num_absent].append(sample)
    return {n: found for n, found in sorted(by_absent.items()) if len(found) >= _LEAST_SAMPLES}


def fit_layers(
    samples: Iterable[LayerSample], top_k: int, expert_ns: int, expert_nbytes: int, fallback: Link
) -> LayerCosts:
    """The costs that explain the layers' times. `expert_ns`: computing one resident expert. Where too few layers loaded
    anything, loading costs nothing and the link is `fallback`, which says in any case whether spans arrive together.
    """
    seen = _by_absent(samples)
    busy = {n: statistics.median(sample.busy_ns for sample in found) for n, found in seen.items()}
    total = {n: statistics.median(sample.total_ns for sample in found) for n, found in seen.items()}
    resident = round(busy[0]) if 0 in busy else None
    loading = [n for n in seen if n]
    if not loading:
        return LayerCosts(resident, 0, 0, fallback)
    base = resident if resident is not None else top_k * expert_ns
    weights = np.sqrt([len(seen[n]) for n in loading])
    columns = np.array([[1.0, n] for n in loading]) * weights[:, None]
    extra = np.array([busy[n] - base for n in loading]) * weights
    submit_ns, load_ns = nonnegative_fit(columns, extra)
    around_ns, together = max(0.0, base - top_k * expert_ns), fallback.arrive_together

    def error(latency_ns: float, each_ns: float) -> float:
        errors = [
            _layer_ns(n, top_k, expert_ns, around_ns + submit_ns, load_ns, latency_ns, each_ns, together) / total[n] - 1
            for n in loading
        ]
        return float(np.square(np.array(errors) * weights).sum())

    latency_ns, each_ns = _least(error, max(total.values()))
    rate = float(expert_nbytes / each_ns * 1e9)
    link = Link(rate, latency_ns=round(latency_ns), overhead_ns=0, arrive_together=together)
    return LayerCosts(resident, round(submit_ns), round(load_ns), link)


def _layer_ns(
    num_absent: int,
    top_k: int,
    expert_ns: float,
    before_ns: float,
    load_ns: float,
    latency_ns: float,
    each_ns: float,
    together: bool,
) -> float:
    """The time of a layer's loop: it computes what has arrived, then what is resident, then waits."""
    now, ready = before_ns, top_k - num_absent
    arrivals = [latency_ns + (num_absent if together else i + 1) * each_ns for i in range(num_absent)]
    for _ in range(top_k):
        if arrivals and (arrivals[0] <= now or not ready):
            now = max(now, arrivals.pop(0)) + load_ns
        else:
            ready -= 1
        now += expert_ns
    return now


def _least(error: Callable[[float, float], float], most_ns: float) -> tuple[float, float]:
    """The (latency, time of each transfer) with the least error, by a grid that is refined around its best point."""
    latencies = (0.0, most_ns)
    eaches = (most_ns / 1e4, most_ns)
    best = (0.0, most_ns)
    for _ in range(_ROUNDS):
        points = [(a, b) for a in np.linspace(*latencies, _GRID) for b in np.geomspace(*eaches, _GRID)]
        best = min(points, key=lambda point: (error(*point), point))
        width = (latencies[1] - latencies[0]) / 8
        latencies = (max(0.0, best[0] - width), best[0] + width)
        factor = (eaches[1] / eaches[0]) ** (1 / 8)
        eaches = (best[1] / factor, best[1] * factor)
    return best


def samples_of(
    before: Sequence[tuple[int, ...]],
    after: Sequence[tuple[int, ...]],
    expert_nbytes: int,
    processor_ns: Sequence[int] | None = None,
) -> list[LayerSample]:
    """The samples of one decode step, from each layer's counters (absent, loaded bytes, total, stalled) before and
    after it. `processor_ns`: where readers decode on the processors that compute, the processor time that the computing
    thread got in each layer; the time it had to wait for a processor is no cost of the layer.
    """
    samples = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        absent, nbytes, total, stall = (b - a for a, b in zip(old, new, strict=True))
        if processor_ns is not None:
            stall = max(0, total - processor_ns[number])
        if total and nbytes == absent * expert_nbytes:  # no part of an expert was here
            samples.append(LayerSample(absent, total, stall))
    return samples


def parts_and_part(in_parts: dict[int, list[int]]) -> tuple[int, int]:
    """Nanoseconds of all neurons of an expert that is computed in parts, and the additional time of each part."""
    medians = sorted((n, round(statistics.median(times))) for n, times in in_parts.items())
    (few, of_few), *rest = medians[1:] or medians  # what cannot be cut is one part
    if not rest:
        return max(1, of_few), 0
    many, of_many = rest[0]
    part = max(0, of_many - of_few) // (many - few)
    return max(1, of_few - few * part), part


def cuts(num_blocks: int) -> tuple[int, int]:
    """Two numbers of parts for an expert: the first divides the second, and the second its blocks."""
    for few, many in ((2, 4), (3, 6), (2, 2), (3, 3)):
        if num_blocks % many == 0:
            return few, many
    smallest = next((p for p in range(5, num_blocks + 1) if num_blocks % p == 0), 1)
    return smallest, smallest


# -- decoding beside computing ---------------------------------------------------------------------------------------


_LEAST_SHARE = 0.2
"""The fitted decoding rate is at least this share of the rate measured alone."""

_RATE_POINTS = 17
_RATE_ROUNDS = 3


def fit_decoding(
    layers: Sequence[LayerTime], disk: Link, costs: CodecCosts, compute: MeasuredCompute, geometry: Geometry
) -> CodecCosts:
    """`costs` with the decoding rate that explains the layers' times; never faster than the given rate. Unchanged where
    no layer loaded anything.
    """
    loading = [one for one in layers if one.num_absent]
    if not loading:
        return costs
    resident = [one.total_ns for one in layers if not one.num_absent]
    around_ns = max(0, resident[0] - compute.layer.top_k * compute.expert_ns[0]) if resident else 0

    def error(rate: float) -> float:
        codec = replace(costs, decode_nbytes_per_s=rate)
        simulated = [around_ns + _decoded_ns(one.num_absent, disk, codec, compute, geometry) for one in loading]
        return sum(one.num_samples * (ns / one.total_ns - 1) ** 2 for ns, one in zip(simulated, loading, strict=True))

    least, most = _LEAST_SHARE * costs.decode_nbytes_per_s, costs.decode_nbytes_per_s
    best = most
    for _ in range(_RATE_ROUNDS):
        rates = [*np.geomspace(least, most, _RATE_POINTS).tolist(), best]
        best = min(rates, key=error)
        step = (most / least) ** (1 / (_RATE_POINTS - 1))
        least, most = max(least, best / step), min(most, best * step)
    return replace(costs, decode_nbytes_per_s=best)


def _decoded_ns(num_absent: int, disk: Link, codec: CodecCosts, compute: MeasuredCompute, geometry: Geometry) -> int:
    """As `_layer_ns`, with the simulator's link, whose readers decode on the processors that compute."""
    clock = Clock()
    link = VirtualLink(
        clock,
        Hardware.read("infinite").with_disk(disk),
        geometry,
        load_ns=compute.load_ns,
        submit_ns=compute.submit_ns,
        codec=codec,
    )
    num_segments = geometry.segments_per_expert
    link.submit([Span(0, expert, 0, num_segments, expert * num_segments) for expert in range(num_absent)])
    left, here = num_absent, compute.layer.top_k - num_absent
    while left or here:
        arrived = link.poll() if left else None
        if arrived is None and not here:
            arrived = link.wait()
        if arrived is None:
            here -= 1
        else:
            left -= 1
        link.computing(clock.now_ns, clock.now_ns + compute.expert_ns[0])
        clock.now_ns += compute.expert_ns[0]
    return clock.now_ns

"""Small traces, a machine whose times can be added up by hand, and studies of the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.scheduler.systems import SYSTEMS, get_system
from expertly_lab.sim.hardware import Hardware, Link
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.sim.study import Memory, Study
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT, TraceLayer, max_experts, max_top_k, trace_field
from expertly_lab.trace.writer import TraceWriter
from tests.weights import random_weights

MAX_DISTANCE = 2
"""Of the lookahead of full traces."""

INFINITE = Link(float("inf"), 0)

Pass = tuple[int | Sequence[int], bool | Sequence[bool], Sequence[Any]]
"""(request of each row, whether each row is prefill, experts [rows][L][<= K]); one value stands for all rows."""


def toy(**changes: Any) -> Hardware:
    """Weights stream at 1 byte/ns, the link brings 1 byte in 2 ns and takes 7 ns to begin when it is idle; a layer
    costs 100 ns beside its weights, a pass 1000, the host 0 a miss."""
    return Hardware(**({"name": "toy", "link": Link(0.5e9, 7), "expert_nbytes_per_s": 1e9} | FIXED | changes))


FIXED = {"layer_ns": 100, "head_ns": 1000, "miss_ns": 0}


def sized(num_layers: int, num_experts: int, top_k: int, width: int = 12) -> tuple[LayerGeometry, ...]:
    """An expert is 4 x `width` bytes."""
    return (LayerGeometry(num_experts, top_k, 2, width, 2, 1),) * num_layers


def make_trace(
    folder: Path,
    passes: Sequence[Pass],
    layers: Sequence[LayerGeometry | TraceLayer],
    *,
    categories: Sequence[str | None] = (),
    num_requests: int = 1,
    rows_per_shard: int = 64,
    dense: DenseShape | None = None,
    is_full: bool = False,
) -> Trace:
    """A trace of these forward passes. A full one has routing scores whose highest are the chosen, embeddings that say
    what the first layer chooses, a lookahead that is right, and router inputs that are the scores.
    """
    of_trace = [TraceLayer.of(layer) if isinstance(layer, LayerGeometry) else layer for layer in layers]
    top_k = max_top_k(of_trace)
    fields = [
        trace_field("probs", of_trace),
        trace_field("embedding", of_trace, hidden_size=of_trace[0].num_experts),
        trace_field("lookahead", of_trace, max_distance=MAX_DISTANCE),
        trace_field("router_inputs", of_trace, hidden_size=max_experts(of_trace)),
    ]
    writer = TraceWriter(
        folder,
        model="toy",
        layers=of_trace,
        fields=fields if is_full else (),
        rows_per_shard=rows_per_shard,
        dense=dense,
    )
    with writer:
        for number in range(num_requests):
            writer.begin_request(categories[number] if categories else None)
        for request, is_prefill, rows in passes:
            num = len(rows)
            experts = np.full((num, len(of_trace), top_k), NO_EXPERT, np.uint16)
            for row, of_layers in enumerate(rows):
                for layer, chosen in enumerate(of_layers):
                    experts[row, layer, : len(chosen)] = chosen
            more = full_fields(experts, of_trace) if is_full else {}
            writer.append(
                {
                    **more,
                    "request": np.broadcast_to(np.array(request, np.int32), num),
                    "is_prefill": np.broadcast_to(np.array(is_prefill), num),
                    "token": np.full(num, -1, np.int32),
                    "experts": experts,
                    "weights": np.where(experts == NO_EXPERT, 0, 1 / top_k).astype(np.float16),
                }
            )
    return Trace.open(folder)


def full_fields(experts: npt.NDArray[np.uint16], layers: Sequence[TraceLayer]) -> dict[str, npt.NDArray[np.float16]]:
    """Of rows that chose `experts` [T, L, K]."""
    num_rows, num_layers = len(experts), len(layers)
    width = max(layer.num_experts for layer in layers)
    logits = np.zeros((num_rows, num_layers, width + 1))
    np.put_along_axis(
        logits, np.minimum(experts, width).astype(np.int64), 3.0 - np.arange(experts.shape[2]) / 4, axis=2
    )
    scores = np.exp(logits[:, :, :width])
    ran = (experts != NO_EXPERT).any(axis=2)
    for index, layer in enumerate(layers):
        scores[:, index, layer.num_experts :] = 0
    scores = np.where(ran[:, :, None], scores / scores.sum(axis=2, keepdims=True), 0)
    lookahead = np.zeros((num_rows, num_layers, MAX_DISTANCE, width))
    for distance in range(1, MAX_DISTANCE + 1):
        lookahead[:, : max(0, num_layers - distance), distance - 1] = scores[:, distance:]
    embedding = scores[:, 0, : layers[0].num_experts] + 0.01
    fields = {"probs": scores, "embedding": embedding, "lookahead": lookahead, "router_inputs": scores}
    return {name: values.astype(np.float16) for name, values in fields.items()}


def random_passes(
    seed: int, layers: Sequence[Any], num_passes: int, *, prompt: int = 0, num_requests: int = 1, gaps: float = 0.0
) -> list[Pass]:
    """Skewed routing; each request begins with a prompt of so many tokens. With `gaps`, some layers do not run for some
    rows and others choose fewer experts."""
    rng = np.random.default_rng(seed)
    popularity = [rng.permutation(1 / np.arange(1, layer.num_experts + 1)) for layer in layers]

    def row() -> list[list[int]]:
        chosen = []
        for each, weights in zip(layers, popularity, strict=True):
            num = each.top_k if rng.random() >= gaps else int(rng.integers(0, each.top_k + 1))
            chosen.append(rng.choice(each.num_experts, num, replace=False, p=weights / weights.sum()).tolist())
        return chosen

    passes: list[Pass] = []
    for request in range(num_requests):
        if prompt:
            passes.append((request, True, [row() for _ in range(prompt)]))
        passes += [(request, False, [row()]) for _ in range(num_passes)]
    return passes


def random_trace(
    folder: Path,
    layers: Sequence[LayerGeometry | TraceLayer],
    seed: int,
    num_passes: int,
    *,
    num_requests: int = 1,
    prompt: int = 0,
    gaps: float = 0.0,
    **settings: Any,
) -> Trace:
    """A trace of `random_passes`."""
    passes = random_passes(seed, layers, num_passes, prompt=prompt, num_requests=num_requests, gaps=gaps)
    return make_trace(folder, passes, layers, num_requests=num_requests, **settings)


def make_study(
    trace: Trace, hardware: Hardware | None = None, *, selection: Selection | None = None, **settings: Any
) -> Study:
    """A study of the trace's own sizes; a learned predictor has weights of no training."""
    settings.setdefault("learned", random_weights(trace.manifest.layers, max_experts(trace.manifest.layers)))
    layers = tuple(layer.geometry() for layer in trace.manifest.layers)
    known: Any = None if None in layers else layers
    schedule = make_schedule(trace, selection or Selection())
    return Study(trace, schedule, hardware or toy(), known, trace.manifest.dense, **settings)


def can_run(trace: Trace) -> list[str]:
    """The presets that this trace has what they need of."""
    return [name for name, each in SYSTEMS.items() if all(need == "future" or trace.has(need) for need in each.needs)]


def results(study: Study, systems: Sequence[str], memory: str | int) -> dict[str, dict[str, Any]]:
    """A row for each system, of one budget: a share or a number of experts a layer."""
    return {system: study.row(get_system(system), _budget(memory)) for system in systems}


def with_bounds(study: Study, systems: Sequence[str], memory: str | int) -> dict[str, dict[str, Any]]:
    """The same with the systems that are run for comparison, and with floors."""
    return {row["system"]: row for row in next(study.results(systems, [_budget(memory)]))}


def _budget(memory: str | int) -> Memory:
    return Memory(memory) if isinstance(memory, str) else Memory(f"{memory}/layer", memory)

"""Requests of a trace run together: their prompts in one pass, then a token of each a pass, until all have ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.reproduce.lab import Lab, Runs
from expertly.sim.schedule import Schedule, first_rows
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace
from expertly.trace.writer import TraceWriter

REQUESTS = 12
"""Run, in all; with `--quick` a third."""


def batched(lab: Lab, hardware: str, size: int) -> Runs:
    """The same requests for every size, of which `size` run together. Routing does not depend on who else runs."""

    def make() -> tuple[Trace, list[RowRange]]:
        schedule = lab.schedule()
        num = REQUESTS // (3 if lab.quick else 1)
        longest = 4 * lab.num_tokens // num
        chosen = [first_rows([span], longest)[0] for span in lab.requests_to_test()[:num]]
        training = first_rows(schedule.training, 2 * lab.num_tokens)
        return write_batches(lab.trace, training, chosen, size, lab.scratch / f"batch-{size}")

    trace, spans = lab.once(("batches", size), make)
    schedule = Schedule(spans[:-1], spans[-1:])
    return lab.once(("batched", hardware, size), lambda: lab.runs_of(schedule, hardware, trace=trace))


def prompts_need(lab: Lab, hardware: str, size: int) -> float:
    """Of a layer's experts, the share that the prompts of a batch need together; the mean over batches and layers."""
    study = batched(lab, hardware, size).study
    span = study.schedule.test[-1]
    columns = {
        name: study.trace.rows(name, span.first_row, span.first_row + span.num_rows)
        for name in ("iteration", "is_prefill", "experts")
    }
    shares = [
        np.unique(columns["experts"][columns["iteration"] == prompt, layer]).size / lab.num_experts
        for prompt in np.unique(columns["iteration"][columns["is_prefill"]])
        for layer in range(len(lab.subject.layers))
    ]
    return float(np.mean(shares))


def write_batches(
    trace: Trace, training: Sequence[RowRange], test: Sequence[RowRange], size: int, folder: Path
) -> tuple[Trace, list[RowRange]]:
    """A trace of `training` one request after the other, then of `test` in batches of `size`; and its spans, the last
    of which is all of the batches.
    """
    manifest = trace.manifest
    fields = [field for name, field in manifest.fields.items() if name != "iteration"]
    stored = [field.name for field in manifest.stored_fields if field.name not in ("iteration", "request")]
    spans: list[RowRange] = []
    with TraceWriter(
        folder,
        model=manifest.model,
        layers=manifest.layers,
        fields=fields,
        dense=manifest.dense,
        scoring=manifest.scoring,
    ) as writer:
        for span in training:
            number = writer.begin_request()
            spans.append(RowRange(number, writer.num_rows, span.num_rows))
            stop = span.first_row + span.num_rows
            for block in trace.blocks(["iteration", *stored], span.first_row, stop):
                sizes = np.unique(block.columns["iteration"], return_counts=True)[1]
                writer.extend({name: block.columns[name] for name in stored}, sizes)
        first = writer.num_rows
        for start in range(0, len(test), size):
            _write_batch(trace, writer, stored, test[start : start + size])
    return Trace.open(folder), [*spans, RowRange(None, first, writer.num_rows - first)]


def _write_batch(trace: Trace, writer: TraceWriter, names: Sequence[str], spans: Sequence[RowRange]) -> None:
    columns: list[dict[str, npt.NDArray[Any]]] = []
    prompts: list[int] = []
    for span in spans:
        number = writer.begin_request()
        rows = {name: trace.rows(name, span.first_row, span.first_row + span.num_rows) for name in names}
        columns.append(rows | {"request": np.full(span.num_rows, number, np.int32)})
        is_prefill = rows["is_prefill"]
        prompts.append(span.num_rows if is_prefill.all() else int(np.argmin(is_prefill)))
    parts = [[(which, 0, num) for which, num in enumerate(prompts) if num]]
    for step in range(max(span.num_rows - num for span, num in zip(spans, prompts, strict=True))):
        at = [(which, num + step) for which, num in enumerate(prompts)]
        parts.append([(which, row, row + 1) for which, row in at if row < spans[which].num_rows])
    for part in parts:
        if part:
            writer.append(
                {name: np.concatenate([columns[which][name][a:b] for which, a, b in part]) for name in columns[0]}
            )

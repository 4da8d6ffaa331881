"""The requests that are compared: those picked of a trace, as spans for the simulator and tokens for the engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from expertly.lab.compare.settings import ComparisonSettings
from expertly.sim.schedule import Schedule, Selection, first_rows, make_schedule
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace


def selection_of(settings: ComparisonSettings, trace: Trace, usual_requests: int | None) -> Selection:
    """`usual_requests`: picked where nobody said how many, and the trace's requests can be told apart."""
    requests = settings.requests
    if requests is None and all(request.has_own_iterations for request in trace.requests):
        requests = usual_requests
    return Selection(requests, None, settings.split, settings.seed)


def pick(trace: Trace, selection: Selection, num_answer: int | None) -> Schedule:
    """The schedule with answers of at most so many tokens; of a trace that is taken whole, so many tokens in all.

    Raises ConfigError as make_schedule.
    """
    schedule = make_schedule(trace, selection)
    if num_answer is None:
        return schedule
    if any(span.request is None for span in schedule.test):
        return replace(schedule, test=first_rows(schedule.test, num_answer))
    test = [
        replace(span, num_rows=min(span.num_rows, num_prompt_rows(trace, span) + num_answer)) for span in schedule.test
    ]
    return replace(schedule, test=test)


def num_prompt_rows(trace: Trace, span: RowRange) -> int:
    """Of a request: the rows of its prompt."""
    return int(trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows).sum())


def middle_decode_iteration(trace: Trace, schedule: Schedule) -> int | None:
    """Counted over the picked requests: the decode step in the middle of the middle one; None where none decodes."""
    count, steps = 0, []
    for span in schedule.test:
        end = span.first_row + span.num_rows
        iteration = trace.rows("iteration", span.first_row, end)
        firsts = np.flatnonzero(np.diff(iteration, prepend=-1))
        is_decode = ~np.maximum.reduceat(trace.rows("is_prefill", span.first_row, end), firsts)
        of_span = (count + np.flatnonzero(is_decode)).tolist()
        if of_span:
            steps.append(of_span)
        count += len(firsts)
    if not steps:
        return None
    middle = steps[len(steps) // 2]
    return int(middle[len(middle) // 2])

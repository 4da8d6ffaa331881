"""From a trace to trained weights and what they are worth: who is trained on, who says when to stop, who judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from expertly.core.errors import ConfigError
from expertly.lab.accuracy import Accuracy, accuracies, means
from expertly.lab.dataset import Dataset, Progress, Rows
from expertly.lab.train import Trained, TrainOptions, train
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace

STOPPING = 10
"""One in so many requests of the part that is learned from says when to stop."""


@dataclass(frozen=True, slots=True)
class TrainingStudy:
    """What came of it. Accuracies are over the decode tokens of the requests kept back; all, where none is decode."""

    trained: Trained
    accuracies: list[Accuracy]
    num_requests: dict[str, int]  # training, stopping, test
    num_rows: dict[str, int]  # training, stopping, test: those that accuracies are over
    scratch_nbytes: int

    def as_dict(self) -> dict[str, Any]:
        """For --json, and for the file."""
        return {
            "requests": self.num_requests,
            "tokens": self.num_rows,
            "epochs": {f"{source}-{target}": num for (source, target), num in self.trained.epochs.items()},
            "mean": {str(distance): row for distance, row in means(self.accuracies).items()},
            "accuracy": [
                {
                    "distance": one.distance,
                    "layer": one.layer,
                    "source": one.source,
                    "learned": one.learned,
                    "lookahead": one.lookahead,
                    "token_id": one.token_id,
                }
                for one in self.accuracies
            ],
        }


def study(
    trace: Trace, split: tuple[int, int], options: TrainOptions, progress: Progress | None = None
) -> TrainingStudy:
    """Train on the first part of the requests, as `simulate --split --seed` shares them out, and judge on the rest.

    Raises ConfigError or TraceError where the trace does not have what that takes.
    """
    schedule = make_schedule(trace, Selection(split=split, seed=options.seed))
    num_stopping = max(1, len(schedule.training) // STOPPING)
    if num_stopping == len(schedule.training):
        raise ConfigError(f"split={split[0]}:{split[1]}: leaves one request to learn from; must be at least 2")
    spans = [*schedule.training, *schedule.test]
    data = Dataset(trace, spans, progress)
    parts = (schedule.training[num_stopping:], schedule.training[:num_stopping], schedule.test)
    all_rows = _rows(spans)
    stopping, training, test = np.split(
        np.arange(data.num_rows), np.cumsum([_num_rows(part) for part in (parts[1], parts[0])])
    )
    trained = train(data, training, stopping, options, progress)
    is_decode = ~np.concatenate([_is_prefill(trace, span) for span in schedule.test])
    judged = test[is_decode] if is_decode.any() else test
    found = accuracies(trace, data, all_rows, trained.weights, np.concatenate([stopping, training]), judged)
    names = ("training", "stopping", "test")
    return TrainingStudy(
        trained,
        found,
        dict(zip(names, map(len, parts), strict=True)),
        dict(zip(names, (len(training), len(stopping), len(judged)), strict=True)),
        data.nbytes,
    )


def _rows(spans: list[RowRange]) -> Rows:
    """The row of the trace that each row of a data set is."""
    return np.concatenate([np.arange(span.first_row, span.first_row + span.num_rows) for span in spans])


def _num_rows(spans: list[RowRange]) -> int:
    return sum(span.num_rows for span in spans)


def _is_prefill(trace: Trace, span: RowRange) -> Any:
    return trace.rows("is_prefill", span.first_row, span.first_row + span.num_rows)

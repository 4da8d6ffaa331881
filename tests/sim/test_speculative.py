"""The next token's first layers, simulated: a lookahead that is right past the last layer, one that knows nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertly.scheduler.presets import get_system
from expertly.sim.study import Memory
from expertly.trace.reader import Trace
from expertly.trace.schema import OPTIONAL
from expertly.trace.writer import TraceWriter
from tests.sim.drive import INFINITE, MAX_DISTANCE, make_study, make_trace, random_passes, results, sized, toy

LAYERS = sized(4, 12, 2)
NEXT_TOKEN = "lru:prediction=lookahead:next_token=yes"


def foretold(trace: Trace, folder: Path) -> Trace:
    """The same rows, with a lookahead that knows the next row's first layers, too."""
    manifest = trace.manifest
    fields = {name: trace.rows(name, 0, trace.num_rows) for name in manifest.fields}
    lookahead, num_layers = fields["lookahead"].copy(), len(manifest.layers)
    for distance in range(1, MAX_DISTANCE + 1):
        for first in range(distance):
            lookahead[:-1, num_layers - distance + first, distance - 1] = fields["probs"][1:, first]
    fields["lookahead"] = lookahead
    optional = [field for name, field in manifest.fields.items() if name in OPTIONAL]
    with TraceWriter(folder, model="toy", layers=manifest.layers, fields=optional) as writer:
        for _ in trace.requests:
            writer.begin_request()
        for number in np.unique(fields["iteration"]):
            rows = fields["iteration"] == number
            writer.append({name: values[rows] for name, values in fields.items() if name != "iteration"})
    return Trace.open(folder)


def full_trace(folder: Path) -> Trace:
    passes = random_passes(3, LAYERS, 60, prompt=5, num_requests=2)
    return make_trace(folder, passes, LAYERS, num_requests=2, is_full=True)


@pytest.mark.parametrize(
    "system", [NEXT_TOKEN, "lru:prediction=lookahead:distance=2:next_token=yes", "lru:prediction=speculative:width=2"]
)
def test_a_lookahead_that_is_right_past_the_last_layer_leaves_nothing_to_miss(system: str, tmp_path: Path) -> None:
    trace = foretold(full_trace(tmp_path / "full"), tmp_path / "foretold")
    study = make_study(trace, toy(link=INFINITE), matcher="inline")
    row = results(study, [system], "60%")[system]
    assert row["predictions_late"] == 0
    counters = study.simulate(get_system(system), Memory("60%").budget(study.geometry)).scheduler.counters
    for counted in counters[:2]:
        right, total = counted.decode.predicted_needed, counted.decode.predicted
        assert right == total >= 2 * 59 * 2, "of each token of both requests"
    assert sum(counted.decode.misses for counted in counters[1:]) == 0
    assert counters[0].decode.misses <= 4, "of the first tokens: what a prompt predicts evicts nothing"
    assert counters[0].prefill.predicted == 2, "the second prompt came instead of the first request's next token"


def test_an_older_trace_knows_nothing_past_the_last_layer(tmp_path: Path) -> None:
    study = make_study(full_trace(tmp_path / "full"), toy(link=INFINITE), matcher="inline")
    rows = results(study, [NEXT_TOKEN, "lru:prediction=lookahead"], "60%")
    ignored = ("system", "name")
    old, within = ({k: v for k, v in row.items() if k not in ignored} for row in list(rows.values())[:2])
    assert rows[NEXT_TOKEN]["recall"] == 1.0 and old == within


@pytest.mark.parametrize("ahead", ["cache", "ring"])
def test_the_window_limits_how_far_down_the_scores_loading_goes(ahead: str, tmp_path: Path) -> None:
    """With a link that takes its time, few segments in flight are few guesses; nothing of a guess is loaded twice."""
    trace = foretold(full_trace(tmp_path / "full"), tmp_path / "foretold")
    study = make_study(trace, toy(), matcher="inline")
    loaded = []
    for window in (1, 2, 8):
        name = get_system(f"lru:prediction=speculative:ahead={ahead}:window={window}").name
        row = results(study, [name], "80%")[name]
        assert row["recall"] == 1.0 and row["bytes_loaded"] >= row["prefetched_bytes"]
        loaded.append(row["prefetched_bytes"])
    assert loaded == sorted(loaded) and loaded[0] < loaded[-1]

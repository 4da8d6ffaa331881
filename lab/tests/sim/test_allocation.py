"""Who gets how many slots, and parts of experts, as a system's own choice: over traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertly.core.geometry import LayerGeometry, ModelShape, fitting_segments
from expertly.policies.known import Known
from expertly.policies.reuse import ReuseModel
from expertly.scheduler.systems import SYSTEMS, get_system
from expertly_lab.sim.hardware import Link
from expertly_lab.sim.schedule import Selection, make_schedule
from expertly_lab.sim.study import BOUNDS, Memory
from expertly_lab.sim.training import TrainingPart
from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import TraceLayer
from lab.tests.sim.drive import make_study, make_trace, random_passes, random_trace, results, sized, toy
from tests.scheduler.drive import one_token

LAYERS = sized(3, 8, 2)


def skewed(folder: Path, *, is_full: bool = True, num_requests: int = 10) -> Trace:
    """Layers 0 and 2 choose the same two experts all the time, layer 1 any."""
    passes = random_passes(0, LAYERS, 30, num_requests=num_requests)
    narrow = [(request, False, [[[2, 3], chosen[1], [0, 1]] for chosen in rows]) for request, _, rows in passes]
    return make_trace(folder / "trace", narrow, LAYERS, num_requests=num_requests, is_full=is_full)


def test_quotas_come_from_the_training_part_and_are_fixed(tmp_path: Path) -> None:
    study = make_study(skewed(tmp_path), selection=Selection(split=(7, 3)))
    rows = results(study, ["adapmoe", "lru:allocation=adapmoe", "lru"], "60%")
    for name in ("adapmoe", "lru:allocation=adapmoe"):
        allocation = rows[name]["allocation"]
        assert (allocation["name"], allocation["moves"]) == ("adapmoe", 0)
        assert allocation["learned"] == "7 requests"
    assert rows["lru:allocation=adapmoe"]["allocation"]["experts"] == [2, 8, 2], "60 % of 24 less 2 for staging"
    assert rows["adapmoe"]["allocation"]["experts"] == [4, 4, 4], "what is predicted needs no place: all are as good"
    assert rows["adapmoe"]["allocation"]["recall"] == [0.0, 1.0, 1.0], "the lookahead of this trace is right"
    assert rows["lru:allocation=adapmoe"]["allocation"]["recall"] == [0.0, 0.0, 0.0]
    assert rows["lru"]["allocation"] is None
    assert rows["lru:allocation=adapmoe"]["hit_rate"] > rows["lru"]["hit_rate"]


def test_without_a_training_part_they_are_learned_online(tmp_path: Path) -> None:
    study = make_study(skewed(tmp_path, is_full=False))
    row = results(study, ["lru:allocation=adapmoe"], "60%")["lru:allocation=adapmoe"]
    assert row["allocation"]["learned"] == "online, from 300 decoded tokens" and row["allocation"]["moves"] == 1
    assert sum(row["allocation"]["experts"]) == 12 and row["allocation"]["experts"][1] == 8


def test_predictors_that_need_the_future_count_as_none(tmp_path: Path) -> None:
    name = "modelled-lookahead:allocation=adapmoe"
    row = results(make_study(skewed(tmp_path), selection=Selection(split=(7, 3))), [name], "60%")[name]
    assert row["allocation"]["recall"] == [0.0, 0.0, 0.0]
    assert row["allocation"]["learned"] == "7 requests; what is predicted is not known of them, and counts as nothing"


# -- parts of experts ----------------------------------------------------------------------------------------------


def test_the_number_nearest_three_that_divides_all() -> None:
    for widths, wanted, expected in [([12], 4, 4), ([12, 18], 4, 3), ([12], 1, 1), ([10], 4, 2), ([10, 25], 4, 1)]:
        assert fitting_segments([LayerGeometry(8, 2, 4, width, 3, 2) for width in widths], wanted) == expected


def test_each_system_has_its_own_segments_and_the_bounds_of_each(tmp_path: Path) -> None:
    trace = random_trace(tmp_path / "trace", LAYERS, 0, 20, prompt=4)
    memory = Memory("40%")
    (rows,) = make_study(trace).results(["lru", "lru:segments=4", "lfu:segments=5"], [memory])
    asked, bounds = rows[:3], rows[3:]
    assert [row["segments"] for row in asked] == [1, 4, 3], "5 does not divide 12"
    assert [(row["system"], row["segments"]) for row in bounds] == [(name, p) for p in (1, 4, 3) for name in BOUNDS]
    for row, name in zip(asked, ("lru", "lru", "lfu"), strict=True):
        study = make_study(trace, segments=row["segments"])
        alone, *rest = next(study.results([name], [memory]))
        assert row | {"system": name} == alone, "what the others are cut into changes nothing"
        assert [bound for bound in bounds if bound["segments"] == row["segments"]] == rest
        assert {each["segments"] for each in next(study.results(["lru:segments=2"], [memory]))} == {row["segments"]}


def test_where_sizes_are_unknown_any_number_divides(tmp_path: Path) -> None:
    bare = [TraceLayer(layer.num_experts, layer.top_k) for layer in LAYERS]
    trace = random_trace(tmp_path / "bare", bare, 0, 20)
    rows = [make_study(trace).row(get_system(name), Memory("40%")) for name in ("lru", "lru:segments=7")]
    assert [row["segments"] for row in rows] == [1, 7] and all(row["hit_rate"] is not None for row in rows)


# -- tops of experts kept ----------


def test_times_of_a_split_layer_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """Segments of 12 bytes, four an expert; 12 slots: 8 for staging and two tops of two. Half an expert takes 24 ns to
    compute, 48 to load, and 7 pass before an idle link begins.

    0     pass 0: 100 ns of dense; both experts are missing. The tops, which are kept, come first: at 100 + 7 + 48 =
          155, 203, then the rest at 251 and 299. Each expert is computed when it is whole, in two halves, as these do
          not lie side by side: 151 ns stalled, until 251 + 4 * 24 = 347. The head takes until 1347.
    1347  pass 1 needs 0, whose top is here, and 2 (1's top goes): from 1447 on 0's top is computed until 1471; the top
          of 2 comes at 1502, the rest of 0 at 1550 and that of 2 at 1598: 79 ns stalled before the rest of 0, 24 before
          2, until 1598 + 2 * 24 = 1646. The head takes until 2646.
    """
    layers = sized(1, 4, 2)
    study = make_study(make_trace(tmp_path / "trace", [(0, False, [[[0, 1]]]), (0, False, [[[0, 2]]])], layers))
    study.segments = 4
    row = results(study, ["lcp:allocation=split"], "75%")["lcp:allocation=split"]
    assert row["tpot_s"] * 1e9 == pytest.approx(2646 / 2, abs=1e-6)
    assert row["stall_share"] == pytest.approx((151 + 79 + 24) / 2646)
    assert (row["hit_rate"], row["partial_hit_rate"], row["bytes_loaded"]) == (0, 1 / 4, 2 * 48 + 24 + 48)
    assert row["allocation"]["split"] == [{"kept_experts": 2, "theta": 0.5}]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Layer 0 chooses among all its experts, and nothing predicts them; the others choose among three."""
    layers = sized(4, 12, 2, width=400)
    passes = random_passes(3, layers, 300)
    for number, (_, _, rows) in enumerate(passes):
        for row in rows:
            row[1:] = [[(number + layer) % 3, (number + layer + 1) % 3] for layer in range(3)]
    return make_trace(tmp_path_factory.mktemp("planted") / "trace", passes, layers, is_full=True)


def test_the_layer_that_needs_more_is_given_more_and_the_others_lose_nothing_by_it(planted: Trace) -> None:
    study = make_study(planted, toy(link=Link(0.25e9, 0)))
    rows = results(study, ["moepic:tau=100:zeta=0.05", "moepic:allocation=split"], "50%")
    ours, fixed = rows["moepic:tau=100:zeta=0.05"], rows["moepic:allocation=split"]
    result = ours["allocation"]
    assert result["configurations"] == 2, "of 300 tokens after each 100"
    assert result["experts"][0] > max(result["experts"][1:])
    assert ours["tpot_s"] < fixed["tpot_s"]
    assert ours["memory_bytes"] == fixed["memory_bytes"]
    assert fixed["allocation"]["split"] == [{"kept_experts": 11, "theta": 0.5}] * 4


# -- a training part teaches `expertly` what is used again soon; other systems are told nothing of it ----------


WIDE = sized(3, 12, 2)


def test_a_training_part_teaches_once_and_only_who_asks(tmp_path: Path) -> None:
    passes = random_passes(0, WIDE, 30, prompt=5, num_requests=10)
    trace = make_trace(tmp_path / "trace", passes, WIDE, num_requests=10)
    geometry = make_study(trace).geometry
    learning = TrainingPart(trace, make_schedule(trace, Selection(split=(7, 3))).training)
    taught = learning.known(SYSTEMS["expertly"], geometry, Known()).get(ReuseModel)
    assert taught is not None and taught is learning.known(SYSTEMS["expertly"], geometry, Known()).get(ReuseModel)
    for system in ("lru", "resident"):
        assert learning.known(SYSTEMS[system], geometry, Known()) == Known()
    assert TrainingPart(trace, []).known(SYSTEMS["expertly"], geometry, Known()) == Known()
    model = ReuseModel(ModelShape.of(geometry))
    model.begin_with(taught)
    for layer in range(3):
        model.observe(one_token(layer, [0, 1]))
    used = np.zeros((3, 12))
    for _, is_prompt, rows in passes:
        for row in [] if is_prompt else rows:
            for layer, experts in enumerate(row):
                used[layer, experts] += 1
    popular = used.argmax(axis=1)
    worth = model.worth().reshape(3, 12)
    assert all(worth[layer, popular[layer]] > np.median(worth[layer]) for layer in range(3))

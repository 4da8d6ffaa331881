"""Tops of experts kept: times that can be added up by hand, and what the configurator makes of a planted trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertly.core.geometry import Geometry
from expertly.sim.compute import compute_model, step_times
from expertly.sim.hardware import Link
from tests.sim.drive import make_study, make_trace, random_passes, results, sized, toy


def test_times_of_a_split_layer_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """Segments of 12 bytes, four an expert; 12 slots: a ring of 8 and two tops of two. Half an expert takes 24 + 10 ns
    to compute, 3 + 48 to load, and 7 pass before an idle link begins.

    0     pass 0: 100 ns of dense; both experts are missing. The tops, which are kept, come first: at 100 + 7 + 51 =
          158, 209, then the rest at 260 and 311. Each is computed in 34 when it is here: 58 + 17 + 17 + 17 ns stalled,
          until 345. The head takes until 1345.
    1345  pass 1 needs 0, whose top is here, and 2 (1's top goes): from 1445 on 0's top is computed until 1479; the top
          of 2 comes at 1503, the rest of 0 at 1554 and that of 2 at 1605: 24 + 17 + 17 ns stalled, until 1639. The
          head takes until 2639.
    """
    layers = sized(1, 4, 2)
    study = make_study(make_trace(tmp_path / "trace", [(0, False, [[[0, 1]]]), (0, False, [[[0, 2]]])], layers))
    study.segments = 4
    row = results(study, ["lcp:allocation=split"], "75%")["lcp:allocation=split"]
    assert row["tpot_s"] * 1e9 == pytest.approx(2639 / 2, abs=1e-6)
    assert row["stall_share"] == pytest.approx((58 + 3 * 17 + 24 + 2 * 17) / 2639)
    assert (row["hit_rate"], row["partial_hit_rate"], row["bytes_loaded"]) == (0, 1 / 4, 2 * 48 + 24 + 48)
    assert row["allocation"]["split"] == [{"kept_experts": 2, "theta": 0.5}]


def test_times_of_a_step_are_those_of_the_machine() -> None:
    shape = Geometry(sized(3, 4, 2), 4)
    hardware = toy(link=Link(0.5e9, 7, 3))
    times = step_times(shape, hardware.link, compute_model(hardware, shape, None))
    assert times.attention_ns == (100,) * 3 and times.moe_ns == (2 * 58,) * 3 and times.head_ns == 1000
    assert times.load_ns == (96 + 4 * 3,) * 3, "a segment at a time"
    assert times.piece_ns == (10,) * 3 and times.ask_ns == (0,) * 3, "a launch"
    whole = step_times(Geometry(sized(3, 4, 2), 1), hardware.link, compute_model(hardware, shape, None))
    assert whole.piece_ns == (0,) * 3, "there are no spans"


@pytest.fixture
def planted(tmp_path: Path) -> Any:
    """Layer 0 chooses among all its experts, and nothing foretells them; the others choose among three."""
    layers = sized(4, 12, 2, width=400)
    passes = random_passes(3, layers, 600)
    for number, (_, _, rows) in enumerate(passes):
        for row in rows:
            row[1:] = [[(number + layer) % 3, (number + layer + 1) % 3] for layer in range(3)]
    return make_trace(tmp_path / "trace", passes, layers, is_full=True)


def test_the_layer_that_needs_more_is_given_more_and_the_others_lose_nothing_by_it(planted: Any) -> None:
    study = make_study(planted, toy(link=Link(0.25e9, 0, 0)), matcher="inline")
    rows = results(study, ["moepic:tau=100", "moepic:allocation=split"], "50%")
    ours, fixed = rows["moepic:tau=100"], rows["moepic:allocation=split"]
    found = ours["allocation"]
    assert found["configurations"] == 7, "of 600 tokens before the first, after 64, and after each 100 more"
    assert found["experts"][0] > max(found["experts"][1:])
    assert ours["tpot_s"] < fixed["tpot_s"]
    assert ours["memory_bytes"] == fixed["memory_bytes"]
    assert fixed["allocation"]["split"] == [{"kept_experts": 11, "theta": 0.5}] * 4


def test_without_sizes_there_are_rates(planted: Any) -> None:
    """Loads take no time there: what is kept is worked out all the same."""
    study = replace(make_study(planted), layers=None)
    row = results(study, ["moepic:tau=100"], "50%")["moepic:tau=100"]
    assert row["allocation"]["configurations"] == 7 and row["hit_rate"] > 0.5 and row["tpot_s"] is None

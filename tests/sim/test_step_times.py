"""The times that a configurator goes by are those of a simulated decode step."""

from __future__ import annotations

import pytest

from expertly.core.geometry import DenseShape, Geometry
from expertly.sim.compute import compute_model, step_times
from expertly.sim.hardware import Hardware
from tests.sim.drive import INFINITE, sized, toy

LAYERS = sized(3, 8, 2)  # an expert is 48 bytes


@pytest.mark.parametrize("segments", [1, 4])
def test_closed_form(segments: int) -> None:
    geometry = Geometry(LAYERS, segments)
    compute = compute_model(toy(), geometry, DenseShape(layer_nbytes=70, head_nbytes=500))
    timing = step_times(geometry, toy().link, compute)
    assert timing.attention_ns == (100 + 70,) * 3
    assert timing.moe_ns == (2 * (10 + 48),) * 3
    assert timing.load_ns == (segments * 3 + 2 * 48,) * 3, "a segment at a time; a busy link hides its latency"
    assert timing.head_ns == 1000 + 500
    assert timing.top_k == (2,) * 3


def test_a_link_that_takes_no_time_exposes_nothing() -> None:
    geometry = Geometry(LAYERS, 2)
    timing = step_times(geometry, INFINITE, compute_model(toy(), geometry, None))
    assert timing.load_ns == (0,) * 3 and timing.exposed_ns(0, 0.0) == 0


def test_a_shipped_machine() -> None:
    hardware = Hardware.read("rtx3090")
    geometry = Geometry(sized(3, 8, 2, width=4096), 2)
    timing = step_times(geometry, hardware.link, compute_model(hardware, geometry, None))
    load_ns = 2 * hardware.link.occupies_ns(geometry.segment_nbytes(0))
    assert timing.load_ns[0] == pytest.approx(load_ns, abs=2)
    assert min(timing.attention_ns + timing.moe_ns) > 0 and timing.head_ns > 0

"""Computing costs, and the times of a decode step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertly.core.geometry import DenseShape, Geometry, LayerGeometry
from expertly_lab.sim.compute import ComputeModel, step_times
from expertly_lab.sim.hardware import Hardware, Link
from lab.tests.sim.drive import INFINITE, sized, toy

LAYER = LayerGeometry(8, 2, 1000, 500, 3, 2)  # 3 000 000 bytes an expert
MACHINE = Hardware("test", Link(1e9, 0), 0.5e9, 11, 13, 0)


def test_one_token_takes_the_weights_read():
    model = ComputeModel(MACHINE, Geometry((LAYER,) * 2, 4), DenseShape(1_000_000, 2_000_000))
    assert model.span_ns(0, 1, 4) == 6_000_000  # 3 MB at 0.5 GB/s
    assert model.span_ns(1, 1, 1) == 1_500_000
    assert model.dense_ns(0, 1) == 2_000_000 + 11
    assert model.head_ns(1) == 4_000_000 + 13


def test_many_tokens_take_in_proportion():
    model = ComputeModel(MACHINE, Geometry((LAYER,)), DenseShape(1_000_000, 2_000_000))
    assert model.span_ns(0, 0, 1) == model.span_ns(0, 64, 1) == model.span_ns(0, 1, 1)
    assert model.span_ns(0, 128, 1) == 2 * model.span_ns(0, 1, 1)
    assert model.dense_ns(0, 640) == 20_000_000 + 11


def test_layers_of_two_shapes_without_the_dense_part():
    small = replace(LAYER, intermediate_size=250)
    model = ComputeModel(MACHINE, Geometry((LAYER, small)), None)
    assert model.span_ns(0, 1, 1) == 2 * model.span_ns(1, 1, 1)
    assert (model.dense_ns(0, 64), model.head_ns(64)) == (11, 13), "fixed times alone"


@pytest.mark.parametrize("segments", [1, 4])
def test_the_times_of_a_decode_step(segments: int) -> None:
    """Those that a configurator goes by. An expert is 48 bytes, and comes a segment at a time."""
    geometry, dense = Geometry(sized(3, 8, 2), segments), DenseShape(layer_nbytes=70, head_nbytes=500)
    machine = toy(miss_ns=3)
    compute = ComputeModel(machine, geometry, dense)
    timing = step_times(machine, geometry, compute)
    assert list(timing.attention_ns) == [100 + 70] * 3
    assert list(timing.moe_ns) == [2 * 48] * 3
    assert list(timing.load_ns) == [2 * 48 + segments * 3] * 3, "a busy link hides its latency"
    assert timing.head_ns == 1000 + 500
    assert list(timing.top_k) == [2] * 3
    fast = step_times(toy(link=INFINITE), geometry, compute)
    assert list(fast.load_ns) == [0] * 3 and fast.exposed_ns(0, 0.0) == 0

"""Computing costs, and the times of a decode step, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertly.core.costs import Link, MeasuredCompute
from expertly.core.errors import HardwareError
from expertly.core.geometry import DenseShape, Geometry, LayerGeometry
from expertly.sim.compute import compute_model, interpolate, step_times
from expertly.sim.hardware import Hardware
from tests.sim.drive import INFINITE, sized, toy

LAYER = LayerGeometry(8, 2, 1000, 500, 3, 2)  # 3 000 000 bytes an expert
MACHINE = Hardware("test", 1e9, 1e10, 0.5, 7, 11, 13, Link(1e9, 0, 0), None, None, None)
TIMES = ((1, 5), (100, 500), (10, 10), (1000, 2000), (1200, 2400), (50, 60))
"""Tokens; the dense part, the head, an expert, its parts together, and what each part takes more."""
MEASURED = MeasuredCompute("a model", "bfloat16", 1, 32, 2, LAYER, *TIMES, 5, 9, 1.5)


def test_a_roofline_of_one_token_is_the_weights_read():
    model = compute_model(MACHINE, Geometry((LAYER,) * 2, 4), DenseShape(1_000_000, 2_000_000))
    assert model.span_ns(0, 1, 4) == 6_000_000 + 7  # 3 MB at 1 GB/s, half of it reached
    assert model.span_ns(1, 1, 1) == 1_500_000 + 7
    assert model.dense_ns(0, 1) == 2_000_000 + 11
    assert model.head_ns(1) == 4_000_000 + 13
    assert model.submit_ns == model.load_ns == 0 and model.slowdown_while_loading == 1


def test_a_roofline_of_many_tokens_is_the_operations():
    model = compute_model(MACHINE, Geometry((LAYER,)), DenseShape(1_000_000, 2_000_000))
    assert model.span_ns(0, 5, 1) == model.span_ns(0, 1, 1), "below the ridge, 10 tokens here"
    assert model.span_ns(0, 100, 1) == 60_000_000 + 7  # 2 * 100 * 1.5e6 operations at 1e10, half of it reached
    assert model.dense_ns(0, 100) == 20_000_000 + 11


def test_a_roofline_of_experts_in_a_format():
    layer = LayerGeometry(8, 2, 1024, 512, 3, 2, "q8_0", 32, 104_448)  # 16 blocks an expert
    dense = DenseShape(1_000_000, 2_000_000)
    for rate, expert_ns in ((None, 3_342_336), (5e8, 6_684_672)):
        model = compute_model(replace(MACHINE, format_nbytes_per_s=rate), Geometry((layer,)), dense)
        assert model.span_ns(0, 1, 1) == expert_ns + 7
        assert model.dense_ns(0, 1) == 2_000_000 + 11


def test_an_expert_of_only_pads_is_computed_all_the_same():
    for hardware in (MACHINE, replace(MACHINE, compute=MEASURED)):
        model = compute_model(hardware, Geometry((LAYER,) * 2), None)
        assert model.span_ns(0, 0, 1) == model.span_ns(0, 1, 1)


def test_layers_of_two_shapes_without_the_dense_part():
    small = replace(LAYER, intermediate_size=250)
    model = compute_model(MACHINE, Geometry((LAYER, small)), None)
    assert model.span_ns(0, 1, 1) - 7 == 2 * (model.span_ns(1, 1, 1) - 7)
    assert (model.dense_ns(0, 64), model.head_ns(64)) == (11, 13), "fixed times alone"


def test_measured_costs_between_and_beyond_what_was_measured():
    model = compute_model(replace(MACHINE, compute=MEASURED), Geometry((LAYER,) * 2, 4), None)
    assert [model.dense_ns(0, n) for n in (1, 2, 5, 9)] == [100, 200, 500, 900]
    assert [model.span_ns(0, n, 4) for n in (1, 3, 5)] == [1000, 1500, 2000], "whole experts"
    assert model.span_ns(0, 1, 1) == 300 + 50, "a quarter of the parts' neurons, and a part"
    assert model.span_ns(0, 5, 2) == 1200 + 60
    assert model.head_ns(100) == 10
    assert (model.submit_ns, model.load_ns) == (5, 9) and model.slowdown_while_loading == 1.5


@pytest.mark.parametrize(
    "layers", [(LAYER,), (LAYER,) * 3, (LAYER, replace(LAYER, top_k=3)), (replace(LAYER, itemsize=4),) * 2]
)
def test_measurements_of_another_model_are_refused(layers: tuple[LayerGeometry, ...]):
    with pytest.raises(HardwareError, match=r"hardware 'test': its \[compute\] was measured for a model \(2 layers"):
        compute_model(replace(MACHINE, compute=MEASURED), Geometry(layers), None)


def test_interpolation():
    assert [interpolate((2, 4, 8), (10, 20, 60), at) for at in (2, 3, 4, 6, 8, 10)] == [10, 15, 20, 40, 60, 80]
    assert interpolate((2, 4), (10, 30), 1) == 0, "straight on, and never negative"
    assert interpolate((3,), (10,), 100) == 10
    assert interpolate((1, 2), (10, 5), 9) == 0


# -- the times that a configurator goes by are those of a simulated decode step ----------


LAYERS = sized(3, 8, 2)  # an expert is 48 bytes


@pytest.mark.parametrize("segments", [1, 4])
def test_the_times_of_a_decode_step(segments: int) -> None:
    geometry = Geometry(LAYERS, segments)
    compute = compute_model(toy(), geometry, DenseShape(layer_nbytes=70, head_nbytes=500))
    timing = step_times(geometry, toy().link, compute)
    assert timing.attention_ns == (100 + 70,) * 3
    assert timing.moe_ns == (2 * (10 + 48),) * 3
    assert timing.load_ns == (segments * 3 + 2 * 48,) * 3, "a segment at a time; a busy link hides its latency"
    assert timing.head_ns == 1000 + 500
    assert timing.top_k == (2,) * 3
    fast = step_times(geometry, INFINITE, compute)
    assert fast.load_ns == (0,) * 3 and fast.exposed_ns(0, 0.0) == 0

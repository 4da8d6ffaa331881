"""The rate of decoding that explains what layers took, where that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertly.core.costs import CodecCosts, LayerTime, Link, MeasuredCompute
from expertly.core.geometry import Geometry
from expertly.lab.profile_fits import fit_decoding
from tests.sim.drive import INFINITE, sized

GEOMETRY = Geometry(sized(2, 8, 4, width=250_000), 1)  # experts of a million bytes
ALONE = CodecCosts(0.5, 1e9, threads=2, threads_beside=2)
COMPUTE = MeasuredCompute(
    model="toy",
    dtype="float32",
    num_threads=1,
    context=1,
    num_layers=2,
    layer=GEOMETRY.layers[0],
    tokens=(1,),
    dense_ns=(0,),
    head_ns=(0,),
    expert_ns=(0,),
    parts_ns=(0,),
    part_ns=(0,),
    submit_ns=0,
    load_ns=0,
    slowdown_while_loading=1.0,
)


def layers(nbytes_per_s: float, around_ns: int = 0, counts: tuple[int, ...] = (1, 2, 4)) -> list[LayerTime]:
    """Of a machine that only decodes, by two processors of so many bytes a second each."""
    loading = [LayerTime(n, around_ns + round(n * 1e9 * 1e6 / (2 * nbytes_per_s)), 9) for n in counts]
    return [LayerTime(0, around_ns, 9), *loading]


@pytest.mark.parametrize("rate", [0.25e9, 0.6e9, 0.9e9])
@pytest.mark.parametrize("around_ns", [0, 3_000_000])
def test_the_rate_is_found(rate: float, around_ns: int) -> None:
    found = fit_decoding(layers(rate, around_ns), INFINITE, ALONE, COMPUTE, GEOMETRY)
    assert found.decode_nbytes_per_s == pytest.approx(rate, rel=0.03)
    assert replace(found, decode_nbytes_per_s=1e9) == ALONE


def test_it_is_never_more_than_alone_nor_out_of_all_proportion() -> None:
    assert fit_decoding(layers(5e9), INFINITE, ALONE, COMPUTE, GEOMETRY) == ALONE
    slow = fit_decoding(layers(0.01e9), INFINITE, ALONE, COMPUTE, GEOMETRY)
    assert slow.decode_nbytes_per_s == pytest.approx(0.2e9)


def test_without_layers_that_loaded_it_is_what_it_was() -> None:
    for one in ([], [LayerTime(0, 5_000_000, 100)]):
        assert fit_decoding(one, INFINITE, ALONE, COMPUTE, GEOMETRY) == ALONE


def test_what_the_disk_takes_is_not_taken_for_decoding() -> None:
    """500 KB a read at 0.25 GB/s are 2 ms an expert; the last one is decoded in one after that."""
    disk = Link(0.25e9, 0, 0)
    times = [LayerTime(0, 0, 9), *(LayerTime(n, n * 2_000_000 + 500_000, 9) for n in (1, 2, 3))]
    found = fit_decoding(times, disk, ALONE, COMPUTE, GEOMETRY)
    assert found.decode_nbytes_per_s > 0.4e9, "by the times alone it would be 0.2"


def test_what_computing_takes_of_the_processors_is_not_taken_for_decoding() -> None:
    """Of four experts one is here: while it is computed, three share one processor of two, and then both."""
    small = Geometry(sized(2, 8, 4, width=60_000), 1)  # one part each
    compute = replace(COMPUTE, layer=small.layers[0], expert_ns=(240_000,))
    costs = replace(ALONE, threads_beside=1)
    total_ns = 240_000 + 240_000 + 3 * 240_000  # they come together, and are computed then
    found = fit_decoding([LayerTime(0, 960_000, 9), LayerTime(3, total_ns, 9)], INFINITE, costs, compute, small)
    assert found.decode_nbytes_per_s == pytest.approx(1e9, rel=0.03)
    both = fit_decoding([LayerTime(0, 960_000, 9), LayerTime(3, total_ns, 9)], INFINITE, ALONE, compute, small)
    assert both.decode_nbytes_per_s < 0.85e9, "as if computing took none"

"""Ids are dense and invertible; a geometry that cannot be is refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry


def layer(experts: int = 4, width: int = 8, **changes: Any) -> LayerGeometry:
    fields = {"num_experts": experts, "top_k": 2, "hidden_size": 16, "intermediate_size": width}
    return LayerGeometry(**(fields | {"num_matrices": 3, "itemsize": 2} | changes))


def test_sizes_follow_from_the_shape() -> None:
    one = layer()
    assert one.neuron_nbytes == 3 * 16 * 2
    assert one.expert_nbytes == 8 * one.neuron_nbytes
    assert one.nbytes == 4 * one.expert_nbytes
    geometry = Geometry((one, one), 4)
    assert geometry.segment_nbytes(0) * 4 == one.expert_nbytes
    assert geometry.blocks_per_segment(1) == 2
    assert geometry.nbytes == 2 * one.nbytes


def test_every_expert_has_one_dense_id() -> None:
    geometry = Geometry((layer(4), layer(7), layer(3, top_k=1)), 2)
    ids = [geometry.expert_id(index, e) for index, one in enumerate(geometry.layers) for e in range(one.num_experts)]
    assert ids == list(range(14)) and geometry.num_experts == 14
    assert [geometry.layer_of_expert(eid) for eid in ids] == [0] * 4 + [1] * 7 + [2] * 3
    assert [geometry.first_expert_id(index) for index in range(3)] == [0, 4, 11]


def test_layers_of_one_segment_size_share_a_class() -> None:
    geometry = Geometry((layer(width=8), layer(width=16), layer(width=8)), 2)
    assert geometry.size_classes == (0, 1, 0)
    assert geometry.num_size_classes == 2


def test_segments_that_do_not_divide_are_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"segments=3: .*8; accepted up to 64: 1, 2, 4, 8"):
        Geometry((layer(),), 3)
    with pytest.raises(ConfigError, match="segments=0"):
        Geometry((layer(),), 0)
    with pytest.raises(ConfigError, match="without MoE layers"):
        Geometry(())


@pytest.mark.parametrize(
    ("field", "value"), [("num_matrices", 4), ("top_k", 5), ("hidden_size", 0), ("itemsize", -1), ("num_experts", 0)]
)
def test_impossible_fields_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        layer(**{field: value})


def test_blocks_are_what_an_expert_can_be_cut_between() -> None:
    of_no_bytes, of_no_format = {"format": "x", "block_size": 4}, {"block_size": 4}
    for fields in (of_no_bytes, of_no_bytes | {"block_nbytes": -8}, of_no_format, {"block_nbytes": 8}):
        with pytest.raises(ConfigError, match="blocks have bytes where there is a format"):
            layer(**fields)
    one = layer(width=24, format="x", block_size=4, block_nbytes=100)
    assert one.num_blocks == 6 and one.expert_nbytes == 600
    assert Geometry((one,), 3).blocks_per_segment(0) == 2
    with pytest.raises(ConfigError, match=r"segments=4: .* 24, in blocks of 4 \(x\); accepted up to 64: 1, 2, 3, 6$"):
        Geometry((one,), 4)

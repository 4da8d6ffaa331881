"""Ids are dense and invertible; a geometry that cannot be is refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry


def layer(experts: int = 4, width: int = 8, **changes: Any) -> LayerGeometry:
    fields = {"num_experts": experts, "top_k": 2, "hidden_size": 16, "intermediate_size": width}
    return LayerGeometry(**(fields | {"num_matrices": 3, "itemsize": 2} | changes))


def test_sizes_and_ids_follow_from_the_shape() -> None:
    shape = layer()
    assert shape.neuron_nbytes == 3 * 16 * 2
    assert shape.nbytes == 4 * shape.expert_nbytes == 4 * 8 * shape.neuron_nbytes
    geometry = Geometry((layer(4), layer(7, width=16), layer(3, top_k=1)), 2)
    assert geometry.unit_nbytes[0] * 2 == shape.expert_nbytes and geometry.blocks_per_segment(1) == 8
    assert geometry.nbytes == sum(each.nbytes for each in geometry.layers)
    ids = [geometry.expert_id(index, e) for index, num in enumerate((4, 7, 3)) for e in range(num)]
    assert ids == list(range(14)) and geometry.num_experts == 14
    assert [geometry.layer_of[eid] for eid in ids] == [0] * 4 + [1] * 7 + [2] * 3
    assert [geometry.first_ids[index] for index in range(3)] == [0, 4, 11]
    assert geometry.size_classes == (0, 1, 0) and geometry.num_size_classes == 2


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
    blocked = layer(width=24, format="x", block_size=4, block_nbytes=100)
    assert blocked.num_blocks == 6 and blocked.expert_nbytes == 600
    assert Geometry((blocked,), 3).blocks_per_segment(0) == 2
    with pytest.raises(ConfigError, match=r"segments=4: .* 24, in blocks of 4 \(x\); accepted up to 64: 1, 2, 3, 6$"):
        Geometry((blocked,), 4)

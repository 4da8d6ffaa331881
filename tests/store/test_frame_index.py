"""Where frames lie: by the rule, and from an index that may say anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import StoreError
from expertly.core.geometry import LayerGeometry
from expertly.store.frames import FrameIndex, frames_per_expert, index_bytes, parse_index
from tests.store.planes import LAYER, encoded, weights


@pytest.mark.parametrize(
    ("hidden", "intermediate", "itemsize", "expected"),
    [
        (2048, 768, 2, 16),  # qwen3_moe: 576 KiB each
        (64, 176, 2, 4),  # 16 would be 4 KiB each
        (4096, 509, 2, 1),  # a prime
        (4096, 14, 2, 14),
        (2048, 1536 * 9, 2, 16),
        (8, 8, 2, 1),  # less than 16 KiB in all
        (64, 176, 4, 8),
    ],
)
def test_as_many_frames_as_are_whole_neurons_and_not_small(
    hidden: int, intermediate: int, itemsize: int, expected: int
) -> None:
    assert frames_per_expert(LayerGeometry(8, 2, hidden, intermediate, 3, itemsize)) == expected


@pytest.fixture
def index(tmp_path: Path) -> FrameIndex:
    return encoded(LAYER, weights("normal", "bfloat16", LAYER.nbytes // 2), tmp_path)[0]


def test_frames_follow_one_another(index: FrameIndex) -> None:
    assert (index.num_experts, index.num_frames, index.frame_nbytes) == (4, 4, LAYER.expert_nbytes // 4)
    end = 0
    for expert in range(4):
        first = end
        for frame in range(4):
            offset, nbytes = index.extent(expert, frame)
            assert offset == end and sum(index.planes_of(expert, frame)[0]) == nbytes
            end += nbytes
        assert index.extent(expert, 0, 4) == (first, end - first)
        assert index.extent(expert, 1, 2)[0] == index.extent(expert, 1)[0]
        assert sum(index.extent(expert, 1, 2)) == index.extent(expert, 3)[0]
    assert index.stored_nbytes == end and index.file_nbytes % 4096 == 0 and 0 <= index.file_nbytes - end < 4096


NUM = LAYER.num_experts * 4
PLANE = LAYER.expert_nbytes // 4 // 2


def raw_index(change: Callable[[np.ndarray], object] = len, num_frames: int = 4, layer: LayerGeometry = LAYER) -> bytes:
    """An index whose lengths have been changed, and are summed up rightly."""
    lengths = np.full((layer.num_experts * num_frames, layer.itemsize), 1000, np.int64)
    change(lengths)
    return index_bytes(layer, num_frames, lengths.astype(np.uint32).tolist(), [7] * len(lengths))


def parse(raw: bytes, layer: LayerGeometry = LAYER) -> FrameIndex:
    return parse_index(Path("/store/experts-00000.frames.safetensors"), raw, Path("/store/experts-00000.planes"), layer)


def test_an_index_survives_its_round_trip(index: FrameIndex) -> None:
    lengths = index.plane_nbytes.tolist()
    again = parse(index_bytes(LAYER, 4, lengths, index.checksum.tolist()))
    for name in ("begin", "plane_nbytes", "checksum"):
        assert np.array_equal(getattr(again, name), getattr(index, name))


def set_to(row: int, plane: int, value: int) -> Callable[[np.ndarray], object]:
    def change(lengths: np.ndarray) -> None:
        lengths[row, plane] = value

    return change


@pytest.mark.parametrize(("row", "plane"), [(0, 0), (NUM - 1, 1)])
@pytest.mark.parametrize("value", [0, PLANE + 1, (1 << 32) - 1])
def test_a_length_that_no_plane_can_have_is_named(row: int, plane: int, value: int) -> None:
    with pytest.raises(StoreError, match=rf"nbytes of frame {row}, plane {plane}: {value}: must be from 1 to {PLANE}"):
        parse(raw_index(set_to(row, plane, value)))
    assert parse(raw_index(set_to(row, plane, PLANE))).stored_nbytes == (2 * NUM - 1) * 1000 + PLANE


@pytest.mark.parametrize(
    ("frame", "by", "what"),
    [(0, 1, "leaves a gap"), (5, -1, "overlaps"), (5, 1, "leaves a gap"), (NUM - 1, -(1 << 40), "leaves a gap")],
)
def test_frames_that_overlap_or_leave_gaps_are_named(frame: int, by: int, what: str) -> None:
    raw = bytearray(raw_index())
    at = len(raw) - NUM * (8 + 8 + 8) + frame * 8
    begin = int.from_bytes(raw[at : at + 8], "little")
    assert begin == frame * 2000
    raw[at : at + 8] = ((begin + by) % (1 << 64)).to_bytes(8, "little")
    with pytest.raises(StoreError, match=rf"begin of frame {frame}: \d+: {what} .*ends at {begin}"):
        parse(bytes(raw))


@pytest.mark.parametrize("num_frames", [3, 22, 176])
def test_a_number_of_frames_that_cannot_be_is_named(num_frames: int) -> None:
    with pytest.raises(
        StoreError, match=rf"begin: shape \[4, {num_frames}\]: must be 4 experts x frames .* divide 176"
    ):
        parse(raw_index(num_frames=num_frames))


@pytest.mark.parametrize("shape", [[4], [4, 1 << 40], [1 << 40, 4], [0, 4], [4, 0], [4, 4, 1], []])
def test_a_shape_that_the_file_does_not_hold_is_refused_before_it_is_read(shape: list[int]) -> None:
    raw = raw_index()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for key in ("begin", "checksum"):
        header[key]["shape"] = shape
    data = json.dumps(header).encode()
    with pytest.raises(StoreError, match="begin"):
        parse(len(data).to_bytes(8, "little") + data + raw[-NUM * 24 :])


def test_an_index_of_other_experts_is_refused() -> None:
    with pytest.raises(StoreError, match=r"'begin': U64 \[4, 4\]; must be U64 \[5, 4\]"):
        parse(raw_index(), replace(LAYER, num_experts=5))
    with pytest.raises(StoreError, match=r"'nbytes': U32 \[4, 4, 2\]; must be U32 \[4, 4, 4\]"):
        parse(raw_index(), replace(LAYER, itemsize=4))
    with pytest.raises(StoreError, match="'nbytes': no such tensor"):
        parse(raw_index().replace(b'"nbytes"', b'"nbites"'))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 100, 4095, 4096, -1])
def test_an_index_that_is_cut_short_is_refused(nbytes: int) -> None:
    with pytest.raises(StoreError, match=r"experts-00000\.frames"):
        parse(raw_index()[:nbytes])


def test_garbage_is_refused() -> None:
    dice = np.random.default_rng(0)
    raw = raw_index()
    for _ in range(300):
        damaged = bytearray(raw)
        for position in dice.integers(0, 500, 4):
            damaged[position] = dice.integers(0, 256)
        try:
            found = parse(bytes(damaged))
        except StoreError:
            continue
        assert found.stored_nbytes == NUM * 2000  # what was hit does not matter: padding, or a name that is not read

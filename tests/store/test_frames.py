"""Frames: the same bits back for every kind of weight, with compiled code and without it, nothing at all from a damaged
frame, and an index that may say anything.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import LayerGeometry
from expertly.store import frames as module
from expertly.store.frames import (
    JOIN_VERSION,
    FrameDecoder,
    FrameEncoder,
    FrameIndex,
    compiled_join,
    frames_per_expert,
    index_bytes,
    numpy_join,
    parse_index,
)
from tests.store.builders import DTYPES, FRAMED, KINDS, encoded, safetensors_bytes, weights

SHAPES = {
    "sixteenths": LayerGeometry(3, 1, 96, 512, 3, 2),
    "not divisible by 16": LayerGeometry(2, 1, 64, 700, 3, 2),
    "a prime": LayerGeometry(2, 1, 64, 509, 2, 2),
    "one expert, one neuron": LayerGeometry(1, 1, 7, 1, 2, 2),
}


needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


def decode(index: FrameIndex, frames: list[bytes]) -> bytes:
    decoder, out = FrameDecoder(), bytearray(index.frame_nbytes)
    whole = b""
    for number, stored in enumerate(frames):
        decoder.decode(index, *divmod(number, index.num_frames), memoryview(stored), memoryview(out))
        whole += out
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_come_back(tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in SHAPES.values() if kind == "normal" else (SHAPES["sixteenths"], SHAPES["one expert, one neuron"]):
        layer = replace(shape, itemsize=DTYPES[dtype])
        raw = weights(kind, dtype, layer.nbytes // layer.itemsize)
        index, frames = encoded(layer, raw, tmp_path)
        assert decode(index, frames) == raw.tobytes()
        with monkeypatch.context() as patch:
            patch.setattr(module, "compiled_join", lambda: None)
            assert decode(index, frames) == raw.tobytes()
        assert sum(map(len, frames)) == index.stored_nbytes <= layer.nbytes  # never more than the weights


@pytest.mark.parametrize("level", [1, 3, -1])
def test_frames_of_any_level_are_read_and_none_makes_exponents_smaller(
    tmp_path: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores that were packed with level 1 are read, too."""
    raw = weights("normal", "bfloat16", FRAMED.nbytes // 2)
    _, frames = encoded(FRAMED, raw, tmp_path)
    parameters = zstandard.ZstdCompressionParameters.from_level(level)
    monkeypatch.setattr(module, "zstd_parameters", lambda: parameters)
    changed, others = encoded(FRAMED, raw, tmp_path)
    assert decode(changed, others) == raw.tobytes()
    assert sum(map(len, frames)) < changed.stored_nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_part_of_a_frame_can_be_had(tmp_path: Path, dtype: str) -> None:
    layer = replace(FRAMED, itemsize=DTYPES[dtype])
    raw = weights("normal", dtype, layer.nbytes // layer.itemsize)
    index, frames = encoded(layer, raw, tmp_path)
    decoder, size = FrameDecoder(), layer.itemsize
    for skip, nbytes in ((0, size), (3 * size, 500 * size), (index.frame_nbytes - size, size), (8 * size, 0)):
        out = bytearray(b"\xaa" * (nbytes + 2 * size))  # at an odd address or not, and no byte beside it
        decoder.decode(index, 1, 2, memoryview(frames[index.num_frames + 2]), memoryview(out)[size:-size], skip)
        start = layer.expert_nbytes + 2 * index.frame_nbytes + skip
        assert out == b"\xaa" * size + raw[start : start + nbytes].tobytes() + b"\xaa" * size


def test_chunks_may_be_cut_anywhere() -> None:
    raw = weights("normal", "bfloat16", FRAMED.nbytes // 2)
    encoder = FrameEncoder(FRAMED.expert_nbytes // 4, 2)
    whole = list(encoder.encode([raw]))
    assert list(encoder.encode(raw[i : i + 10007] for i in range(0, len(raw), 10007))) == whole
    assert len(whole) == 16


def refused(index: FrameIndex, stored: bytes, what: str) -> None:
    """The damage is told of with its place, and not a byte has been written."""
    out = bytearray(b"\xaa" * index.frame_nbytes)
    with pytest.raises(TransferError, match=rf"frames: frame 1 of expert 2: .*{what}.*pack again"):
        FrameDecoder().decode(index, 2, 1, memoryview(stored), memoryview(out))
    assert out == b"\xaa" * index.frame_nbytes


@pytest.fixture
def stored(tmp_path: Path) -> tuple[FrameIndex, bytes]:
    index, frames = encoded(FRAMED, weights("normal", "bfloat16", FRAMED.nbytes // 2), tmp_path)
    return index, frames[2 * index.num_frames + 1]


def test_one_flipped_bit_anywhere_is_refused(stored: tuple[FrameIndex, bytes]) -> None:
    index, frame = stored
    dice = np.random.default_rng(0)
    for bit in [*range(100), *dice.integers(0, len(frame) * 8, 200).tolist(), len(frame) * 8 - 1]:
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        refused(index, bytes(damaged), "checksum")


def test_what_is_cut_short_or_too_long_is_refused(stored: tuple[FrameIndex, bytes]) -> None:
    index, frame = stored
    for damaged in (frame[:-1], frame[:1], b"", frame + b"\0", frame * 2):
        refused(index, damaged, rf"{len(damaged)} bytes, but {len(frame)} are in the index")


def forged(index: FrameIndex, high: bytes, low: bytes) -> tuple[FrameIndex, bytes]:
    """An index that agrees with whatever a frame is."""
    row = 2 * index.num_frames + 1
    lengths, checksums = index.plane_nbytes.copy(), index.checksum.copy()
    lengths[row], checksums[row] = (len(high), len(low)), xxhash.xxh3_64_intdigest(high + low)
    return replace(index, plane_nbytes=lengths, checksum=checksums), high + low


CLAIMS = (0, 1, "less", "more", "more, little window", 1 << 40, (1 << 64) - 2, "unknown", "not zstd", "cut", "junk")


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_frame_that_lies_about_its_size_is_refused_though_its_checksum_is_right(
    stored: tuple[FrameIndex, bytes], claim: int | str
) -> None:
    index, frame = stored
    plane = index.frame_nbytes // 2
    low = frame[-plane:]
    honest = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(bytes(plane))
    if claim == "less":
        high = zstandard.compress(bytes(plane - 1))
    elif claim == "more":
        high = zstandard.compress(bytes(plane + 1))
    elif claim == "more, little window":
        little = zstandard.ZstdCompressionParameters.from_level(1, window_log=10)
        high = zstandard.ZstdCompressor(compression_params=little).compress(bytes(plane + 1))
        assert zstandard.get_frame_parameters(high).window_size < plane
    elif claim == "unknown":
        high = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(plane))
    elif claim == "not zstd":
        high = b"not a zstd frame"
    elif claim == "cut":
        high = honest[:-3]
    elif claim == "junk":
        high = honest[:9] + bytes(byte ^ 0x5A for byte in honest[9:])
    else:  # a header without blocks: magic, single segment with a size of eight bytes
        high = bytes.fromhex("28b52ffd") + b"\xe0" + int(claim).to_bytes(8, "little") + b"\x01\0\0"
    refused(*forged(index, high, low), "")


def test_a_window_larger_than_the_frame_is_refused(stored: tuple[FrameIndex, bytes]) -> None:
    index, frame = stored
    plane = index.frame_nbytes // 2
    low = frame[-plane:]
    # No single segment: a window of 2 GiB, and a content size of four bytes that is right.
    high = bytes.fromhex("28b52ffd") + b"\x80" + bytes([21 << 3]) + plane.to_bytes(4, "little") + b"\x01\0\0"
    assert zstandard.get_frame_parameters(high).window_size == 2 << 30
    refused(*forged(index, high, low), "window 2147483648")


def test_a_decoder_serves_frames_of_all_sizes_after_each_other_and_after_errors(tmp_path: Path) -> None:
    decoder = FrameDecoder()
    for layer in (SHAPES["sixteenths"], SHAPES["a prime"], replace(FRAMED, itemsize=4), SHAPES["sixteenths"]):
        raw = weights("normal", "float32", layer.nbytes // 4)
        index, frames = encoded(layer, raw, tmp_path)
        out = bytearray(index.frame_nbytes)
        with pytest.raises(TransferError):
            decoder.decode(index, 0, 0, memoryview(frames[0][:-1]), memoryview(out))
        decoder.decode(index, 0, 0, memoryview(frames[0]), memoryview(out))
        assert out == raw[: index.frame_nbytes].tobytes()


def compile_into(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "join.c").write_text(text)
    command = ["gcc", "-O3", "-std=gnu11", "-shared", "-fPIC", "-o", folder / "_join.so", folder / "join.c"]
    subprocess.run(command, check=True)
    return folder


SOURCE = Path(module.__file__).with_name("join.c")


@needs_compiler
@pytest.mark.parametrize("num_planes", [2, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 4099])
def test_the_highest_plane_comes_first(num_planes: int, count: int, tmp_path: Path) -> None:
    compiled = compiled_join(compile_into(tmp_path / "library", SOURCE.read_text()))
    assert compiled is not None
    words = np.random.default_rng(count).integers(0, 256, (count, num_planes), np.uint8)
    planes = [np.ascontiguousarray(words[:, byte]) for byte in reversed(range(num_planes))]
    for join in (compiled, numpy_join):
        out = bytearray(b"\xaa" * (count * num_planes + 8))
        join(planes, memoryview(out)[: count * num_planes])
        assert bytes(out) == words.tobytes() + b"\xaa" * 8


@needs_compiler
def test_a_library_of_another_version_or_none_at_all_is_left_alone(tmp_path: Path) -> None:
    text = SOURCE.read_text()
    assert f"return {JOIN_VERSION};" in text
    newer = text.replace(f"return {JOIN_VERSION};", f"return {JOIN_VERSION + 1};")
    assert compiled_join(compile_into(tmp_path / "newer", newer)) is None
    assert compiled_join(compile_into(tmp_path / "lacks", text.replace("join_four", "join_five"))) is None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "_join.so").write_bytes(b"no library")
    assert compiled_join(tmp_path / "damaged") is None
    assert compiled_join(tmp_path / "nowhere") is None


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


NUM = FRAMED.num_experts * 4
PLANE = FRAMED.expert_nbytes // 4 // 2


def raw_index(row: int = 0, plane: int = 0, nbytes: int = 1000, num_frames: int = 4) -> bytes:
    """An index of planes of 1000 bytes, one of which has been changed, that are summed up rightly."""
    lengths = np.full((FRAMED.num_experts * num_frames, FRAMED.itemsize), 1000, np.uint32)
    lengths[row, plane] = nbytes
    return index_bytes(FRAMED, num_frames, lengths.tolist(), [7] * len(lengths))


def parse(raw: bytes, layer: LayerGeometry = FRAMED) -> FrameIndex:
    return parse_index(Path("/store/experts-00000.frames.safetensors"), raw, Path("/store/experts-00000.planes"), layer)


def shifted(frame: int, by: int) -> bytes:
    """An index in which a frame begins elsewhere."""
    raw = bytearray(raw_index())
    at = len(raw) - NUM * (8 + 8 + 8) + frame * 8
    assert int.from_bytes(raw[at : at + 8], "little") == frame * 2000
    raw[at : at + 8] = ((frame * 2000 + by) % (1 << 64)).to_bytes(8, "little")
    return bytes(raw)


def shaped(shape: list[int]) -> bytes:
    """An index that claims another shape than the file holds."""
    raw = raw_index()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for key in ("begin", "checksum"):
        header[key]["shape"] = shape
    return safetensors_bytes(header, raw[-NUM * 24 :])


FORGED: list[tuple[bytes, LayerGeometry, str]] = [
    *(
        (raw_index(row, plane, n), FRAMED, f"nbytes of frame {row}, plane {plane}: {n}: must be from 1 to {PLANE}")
        for row, plane in ((0, 0), (NUM - 1, 1))
        for n in (0, PLANE + 1, (1 << 32) - 1)
    ),
    *(
        (shifted(frame, by), FRAMED, rf"begin of frame {frame}: \d+: {what} .*ends at {frame * 2000}")
        for frame, by, what in ((0, 1, "leaves a gap"), (5, -1, "overlaps"), (NUM - 1, -(1 << 40), "leaves a gap"))
    ),
    *(
        (raw_index(num_frames=n), FRAMED, rf"begin: shape \[4, {n}\]: must be 4 experts x frames .* divide 176")
        for n in (3, 22, 176)
    ),
    *((shaped(one), FRAMED, "begin") for one in ([4], [4, 1 << 40], [1 << 40, 4], [0, 4], [4, 0], [4, 4, 1], [])),
    (raw_index(), replace(FRAMED, num_experts=5), r"'begin': U64 \[4, 4\]; must be U64 \[5, 4\]"),
    (raw_index(), replace(FRAMED, itemsize=4), r"'nbytes': U32 \[4, 4, 2\]; must be U32 \[4, 4, 4\]"),
    (raw_index().replace(b'"nbytes"', b'"nbites"'), FRAMED, "'nbytes': no such tensor"),
    *((raw_index()[:n], FRAMED, r"experts-00000\.frames") for n in (0, 1, 7, 8, 100, 4095, 4096, -1)),
]


@pytest.mark.parametrize(("raw", "layer", "message"), FORGED, ids=range(len(FORGED)))
def test_an_index_that_is_none_of_the_layer_is_refused_by_field(raw: bytes, layer: LayerGeometry, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        parse(raw, layer)


def test_the_longest_planes_are_accepted() -> None:
    assert parse(raw_index(NUM - 1, 1, PLANE)).stored_nbytes == (2 * NUM - 1) * 1000 + PLANE


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

"""A store in planes: every frame where its index says, resumed and verified like any other, and damage seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from expertly.core.errors import StoreError, TransferError
from expertly.store.frames import FrameDecoder
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from expertly.store.writer import StoreWriter, begun_codec, partial_folder
from tests.store.builders import DENSE, files_of, write_store
from tests.store.mounts import tiny_disk
from tests.store.planes import PLAN, expert_weights, fill_planes, write_planes
from tests.store.test_writer import wait_for

SLOW_WRITER = """
import sys, time
from pathlib import Path
from tests.store.planes import write_planes
write_planes(Path(sys.argv[1]), progress=lambda done, total: time.sleep(0.02))
"""


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return write_planes(tmp_path / "store")


def test_every_expert_comes_back_from_where_the_index_says(store: PackedStore) -> None:
    decoder = FrameDecoder()
    for layer, geometry in enumerate(PLAN.layers):
        path, offset = store.layer_extent(layer)
        index = store.frame_index(layer)
        assert index is not None and (index.path, offset) == (path, 0)
        raw = memoryview(path.read_bytes())
        assert len(raw) == index.file_nbytes and len(raw) % 4096 == 0  # an aligned read may cover the last frame
        for expert in range(geometry.num_experts):
            whole = b""
            for frame in range(index.num_frames):
                begin, nbytes = index.extent(expert, frame)
                out = bytearray(index.frame_nbytes)
                decoder.decode(index, expert, frame, raw[begin : begin + nbytes], memoryview(out))
                whole += out
            assert whole == expert_weights(layer, expert).tobytes()


def test_says_how_small_it_is(store: PackedStore, tmp_path: Path) -> None:
    assert store.codec == "planes"
    assert store.experts_nbytes == sum(layer.nbytes for layer in PLAN.layers)
    assert store.experts_stored_nbytes == sum(index.stored_nbytes for index in store.frames)
    assert 0.6 < store.ratio < 0.8
    plain = write_store(tmp_path / "plain")
    assert (plain.codec, plain.ratio, plain.frame_index(0)) == ("none", 1.0, None)
    assert plain.experts_stored_nbytes == plain.experts_nbytes


def test_the_library_reads_the_index(store: PackedStore) -> None:
    with safe_open(store.folder / "experts-00001.frames.safetensors", "np") as file:
        assert file.get_slice("nbytes").get_shape() == [2, 5, 2]
        lengths, begin = file.get_tensor("nbytes"), file.get_tensor("begin")
    assert np.array_equal(np.diff(begin.ravel()), lengths.sum(axis=2).ravel()[:-1])


def test_progress_counts_weights(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_planes(tmp_path / "store", lambda done, total: seen.append((done, total)))
    total = sum(layer.nbytes for layer in PLAN.layers) + sum(spec.nbytes for spec in DENSE)
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(seen)


def test_a_store_without_a_codec_in_its_manifest_is_one_of_before(tmp_path: Path) -> None:
    plain = write_store(tmp_path / "plain")
    path = plain.folder / "manifest.json"
    raw = json.loads(path.read_text())
    del raw["codec"]
    path.write_text(json.dumps(raw))
    assert PackedStore.open(plain.folder).codec == "none"


@pytest.mark.parametrize("stop_at", ["experts-00000.planes", "experts-00001.planes", "dense.safetensors"])
def test_a_killed_writer_is_resumed_to_the_same_bytes(tmp_path: Path, stop_at: str) -> None:
    folder = tmp_path / "store"
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]
    command = [sys.executable, "-c", SLOW_WRITER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(partial_folder(folder) / stop_at, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert begun_codec(folder) == "planes"
    finished = json.loads((partial_folder(folder) / "progress.json").read_text())["files"]
    assert ("experts-00000.planes" in finished) == ("experts-00000.frames.safetensors" in finished)
    first: list[int] = []
    write_planes(folder, lambda done, total: first.append(done)).verify(full=True)
    assert first[0] == sum(
        (layer.nbytes for i, layer in enumerate(PLAN.layers) if f"experts-{i:05d}.planes" in finished),
        sum(spec.nbytes for spec in DENSE) if "dense.safetensors" in finished else 0,
    )
    assert files_of(folder) == files_of(write_planes(tmp_path / "uninterrupted").folder)


@pytest.mark.parametrize("name", ["experts-00000.planes", "experts-00000.frames.safetensors"])
def test_frames_without_their_index_are_written_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    with StoreWriter(folder, PLAN, DENSE, None) as writer:
        writer.write_layer(0, (expert_weights(0, expert) for expert in range(4)))
        assert writer.is_layer_done(0)
    (partial_folder(folder) / name).unlink()
    with StoreWriter(folder, PLAN, DENSE, None) as writer:
        assert not writer.is_layer_done(0)
        fill_planes(writer).verify(full=True)
    assert files_of(folder) == files_of(write_planes(tmp_path / "whole").folder)


def test_room_is_asked_for_as_far_as_is_known(tmp_path: Path) -> None:
    with tiny_disk(tmp_path) as disk:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        total = sum(layer.nbytes for layer in PLAN.layers)
        for ratio in (4 * free / total, free / total / 4):
            if ratio > free / total:
                with pytest.raises(StoreError, match="the disk is full"):
                    StoreWriter(disk / "store", PLAN, DENSE, None, ratio)
            else:
                StoreWriter(disk / "store", PLAN, DENSE, None, ratio).close()


FILES = ("experts-00000.planes", "experts-00001.planes", "experts-00000.frames.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_truncated_file_is_named(store: PackedStore, name: str) -> None:
    path = store.folder / name
    content = path.read_bytes()
    for damaged, what in ((content[:-1], "truncated"), (content + b"x", "changed")):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"{name}: {what}"):
            PackedStore.open(store.folder)
    path.unlink()
    with pytest.raises(StoreError, match=name):
        PackedStore.open(store.folder)


def test_one_flipped_bit_in_an_index_is_found_at_opening(store: PackedStore) -> None:
    path = store.folder / "experts-00001.frames.safetensors"
    content = path.read_bytes()
    dice = np.random.default_rng(0)
    for bit in dice.integers(0, 8 * len(content), 100).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"experts-00001\.frames.*: checksum .* pack again"):
            PackedStore.open(store.folder)


@pytest.mark.parametrize("position", [0, 20_000, -5000])
def test_one_flipped_bit_in_frames_is_found_by_a_full_verify(store: PackedStore, position: int) -> None:
    path = store.folder / "experts-00001.planes"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    store.verify()
    with pytest.raises(StoreError, match=r"experts-00001\.planes: frame \d+ of expert \d+: checksum"):
        store.verify(full=True)


def test_one_flipped_bit_after_the_frames_is_found_by_a_full_verify(store: PackedStore) -> None:
    index = store.frames[0]
    assert index.stored_nbytes < index.file_nbytes
    content = bytearray(index.path.read_bytes())
    content[-1] ^= 1
    index.path.write_bytes(content)
    with pytest.raises(StoreError, match=r"experts-00000\.planes: checksum"):
        store.verify(full=True)


def test_a_whole_store_verifies_with_progress(store: PackedStore) -> None:
    seen: list[tuple[int, int]] = []
    store.verify(full=True, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (store.nbytes, store.nbytes)


def rewrite_index(store: PackedStore, raw: bytes) -> None:
    """A forger's: the manifest agrees with it."""
    name = "experts-00000.frames.safetensors"
    (store.folder / name).write_bytes(raw)
    manifest = json.loads((store.folder / "manifest.json").read_text())
    manifest["files"][name] = {"nbytes": len(raw), "checksum": zlib.crc32(raw)}
    (store.folder / "manifest.json").write_text(json.dumps(manifest))


def test_an_index_of_other_frames_is_refused(store: PackedStore) -> None:
    other = (store.folder / "experts-00001.frames.safetensors").read_bytes()
    rewrite_index(store, other)
    with pytest.raises(StoreError, match=r"experts-00000\.frames.*begin: shape \[2, 5\]: .* pack again"):
        PackedStore.open(store.folder)


def test_an_index_that_reaches_beyond_its_frames_is_refused(store: PackedStore) -> None:
    content = bytearray((store.folder / "experts-00000.frames.safetensors").read_bytes())
    index = store.frames[0]
    last = len(content) - 8 * len(index.checksum) - 4  # the last length
    length = int.from_bytes(content[last : last + 4], "little")
    assert length == index.plane_nbytes[-1][-1] == index.frame_nbytes // 2
    content[last : last + 4] = (length - 4096).to_bytes(4, "little")
    rewrite_index(store, bytes(content))
    with pytest.raises(StoreError, match=rf"describes {index.file_nbytes - 4096} bytes, but experts-00000\.planes has"):
        PackedStore.open(store.folder)


def test_an_index_too_long_to_be_one_is_not_read(store: PackedStore) -> None:
    path = store.folder / "experts-00000.frames.safetensors"
    os.truncate(path, 300 << 20)
    manifest = json.loads((store.folder / "manifest.json").read_text())
    manifest["files"][path.name]["nbytes"] = 300 << 20
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=f"{300 << 20} bytes, more than the {256 << 20} accepted"):
        PackedStore.open(store.folder)


def test_a_read_that_finds_other_bytes_is_refused(store: PackedStore) -> None:
    """As the engine reads: a whole page before and after, straight from disk."""
    index = store.frames[0]
    offset, nbytes = index.extent(3, 2)
    file = ExpertFile(index.path)
    try:
        start = offset // 4096 * 4096
        cover = memoryview(bytearray(-(-(offset + nbytes - start) // 4096) * 4096))
        file.read_into(start, [cover])
        out = bytearray(index.frame_nbytes)
        decoder = FrameDecoder()
        decoder.decode(index, 3, 2, cover[offset - start :][:nbytes], memoryview(out))
        assert out == expert_weights(0, 3).tobytes()[2 * index.frame_nbytes : 3 * index.frame_nbytes]
        with pytest.raises(TransferError, match="frame 1 of expert 3"):
            decoder.decode(index, 3, 1, cover[offset - start :][:nbytes], memoryview(out))
    finally:
        file.close()

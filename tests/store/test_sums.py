"""Sums of experts: what is compared, and when, however spans lie to blocks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import LayerGeometry
from expertly.core.messages import Span
from expertly.engine.transfer import Readers
from expertly.store.manifest import FileEntry
from expertly.store.packed import PackedStore
from expertly.store.sums import blocks_per_expert
from tests.store.builders import PLAN, write_store

LAYER = LayerGeometry(3, 2, hidden_size=64, intermediate_size=192, num_matrices=3, itemsize=2)  # 4 blocks of 18 KiB
PLAN_OF_BLOCKS = replace(PLAN, layers=(LAYER,), sites=("a.x",))
BLOCK = LAYER.expert_nbytes // 4


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return write_store(tmp_path / "store", PLAN_OF_BLOCKS)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


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
def test_as_many_blocks_as_are_whole_neurons_and_not_small(
    hidden: int, intermediate: int, itemsize: int, expected: int
) -> None:
    assert blocks_per_expert(LayerGeometry(8, 2, hidden, intermediate, 3, itemsize)) == expected


@pytest.mark.parametrize(
    ("segments", "num_read_again", "named"),  # blocks: those that segments cut are read again, once
    [(1, 0, "0 "), (2, 0, "1"), (4, 0, "3"), (8, 4, "6 to 7"), (3, 2, "2"), (64, 4, "48 to 63")],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_each_block_is_compared_when_it_is_first_read(
    store: PackedStore, segments: int, num_read_again: int, named: str, is_damaged: bool
) -> None:
    path, begin = store.extents[0]
    nbytes = LAYER.expert_nbytes // segments
    if is_damaged:
        flip(path, begin + 2 * LAYER.expert_nbytes - 1)
    slot = bytearray(nbytes)
    with closing(Readers(store.layer_file, store.geometry(segments), lambda _: memoryview(slot))) as readers:
        for is_again in (False, True):
            for segment in range(segments):
                readers.submit([Span(0, 1, segment, 1, 0)])
                if is_damaged and (segment + 1) * nbytes > 3 * BLOCK:
                    message = rf"{path.name}: layer 0, expert 1, segments? {named.strip()}: .*pack"
                    with pytest.raises(TransferError, match=message):  # the next time, too
                        readers.wait()
                else:
                    assert readers.wait().segment == segment
            if not is_damaged:
                asked = (1 + is_again) * LAYER.expert_nbytes
                assert readers.stats()["disk_nbytes"] == asked + num_read_again * BLOCK, "each once"


def test_a_file_of_sums_is_read_as_hostile_input(store: PackedStore) -> None:
    path = store.folder / "experts-00000.sums.safetensors"

    def list_as(nbytes: int, checksum: int) -> None:
        replace(store.manifest, files={**store.manifest.files, path.name: FileEntry(nbytes, checksum)}).write(
            store.folder
        )

    forged = path.read_bytes().replace(b'"shape":[3,4]', b'"shape":[4,3]')
    path.write_bytes(forged)
    list_as(len(forged), xxhash.xxh3_64_intdigest(forged))
    with pytest.raises(StoreError, match=r"no tensor 'checksum' of U64 \[3, 4\]"):
        PackedStore.open(store.folder)
    flip(path, -1)
    with pytest.raises(StoreError, match=f"{path.name}: its checksum is not that of manifest.json"):
        PackedStore.open(store.folder)
    with path.open("ab") as file:
        file.write(b"more")
    list_as(len(forged) + 4, 0)
    with pytest.raises(StoreError, match="4196 bytes; accepted: 4192"):
        PackedStore.open(store.folder)

"""Sums of experts that are stored as they are: what is compared, and when, however spans lie to blocks."""

from __future__ import annotations

import json
import random
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from expertly.core.errors import StoreError, TransferError
from expertly.core.geometry import LayerGeometry
from expertly.engine.reading import BlockChecks
from expertly.store.packed import PackedStore
from expertly.store.reader import ExpertFile
from tests.store.builders import PLAN, expert_bytes, write_store

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
    ("segments", "num_read_again", "told"),  # blocks: those that segments cut are read again, once
    [(1, 0, "0"), (2, 0, "1"), (4, 0, "3"), (8, 4, "6 to 7"), (3, 2, "2"), (64, 4, "48 to 63")],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_each_block_is_compared_when_it_is_first_read(
    store: PackedStore, segments: int, num_read_again: int, told: str, is_damaged: bool
) -> None:
    path, begin = store.extents[0]
    expert = 1
    nbytes = LAYER.expert_nbytes // segments
    if is_damaged:
        flip(path, begin + (expert + 1) * LAYER.expert_nbytes - 1)
    sums = store.layer_file(0).sums
    assert sums is not None
    with closing(ExpertFile(path)) as file:
        checks = BlockChecks(0, file, begin, LAYER.expert_nbytes, nbytes, sums)
        raw, again_nbytes = path.read_bytes()[begin + expert * LAYER.expert_nbytes :], 0
        for number in range(segments):
            first, view = number * nbytes, memoryview(raw)[number * nbytes : (number + 1) * nbytes]
            is_due = checks.is_due(expert, first, nbytes)
            if is_damaged and first + nbytes > 3 * BLOCK and is_due:
                with pytest.raises(
                    TransferError, match=rf"{path.name}: layer 0, expert {expert}, segments? {told}: .*pack"
                ):
                    checks.check(expert, first, view)
                assert checks.is_due(expert, first, nbytes)  # the next time, too
            elif is_due:
                again_nbytes += checks.check(expert, first, view)
                assert not checks.is_due(expert, first, nbytes)
        if not is_damaged:
            assert again_nbytes == num_read_again * BLOCK
        assert checks.is_due(0, 0, 1)


@pytest.mark.parametrize("every", [1, 2, 64])
@pytest.mark.parametrize("segments", [1, 3, 4, 64])
def test_a_block_that_changes_is_found_within_so_many_reads_of_it(
    store: PackedStore, segments: int, every: int
) -> None:
    """Whenever it changes, and whichever of its parts are read."""
    (path, begin), sums, nbytes = store.extents[0], store.sums[0], LAYER.expert_nbytes // segments
    dice = random.Random(segments)
    with closing(ExpertFile(path)) as file:
        checks = BlockChecks(0, file, begin, LAYER.expert_nbytes, nbytes, sums, every)
        raw, longest, num_checks = path.read_bytes()[begin:], 0, 0
        for _ in range(30):
            since = dict.fromkeys(range(4), 0)
            for _ in range(dice.randrange(200)):
                first = dice.randrange(segments) * nbytes
                blocks = range(first // BLOCK, -(-(first + nbytes) // BLOCK))
                for block in blocks:
                    since[block] += 1
                if checks.is_due(2, first, nbytes):
                    before = bytes(checks._left)
                    view = memoryview(raw)[2 * LAYER.expert_nbytes + first :][:nbytes]
                    checks.check(2, first, view)
                    num_checks += 1
                    compared = [block for block in blocks if checks._left[8 + block] != before[8 + block] or every == 1]
                    for block in compared:
                        longest = max(longest, since[block])
                        since[block] = 0
                assert max(since.values()) < every or every == 1
        assert longest <= every
        assert num_checks


def test_a_store_of_before_there_were_sums_opens_and_verifying_adds_them(store: PackedStore) -> None:
    sums, manifest = store.sums, store.folder / "manifest.json"
    written = json.loads(manifest.read_text())
    old = dict(written, files={name: entry for name, entry in written["files"].items() if ".sums." not in name})
    for entry in old["files"].values():
        entry.pop("xxh3", None)
    manifest.write_text(json.dumps(old))
    (store.folder / "experts-00000.sums.safetensors").unlink()
    opened = PackedStore.open(store.folder)
    opened.check_dense()
    assert opened.sums == () and opened.layer_file(0).sums is None
    opened.verify(full=True)
    again = PackedStore.open(store.folder)
    assert again.sums == sums
    again.verify(full=True)
    expert = expert_bytes(0, 2, PLAN_OF_BLOCKS)
    with closing(ExpertFile(again.extents[0][0])) as file:
        BlockChecks(0, file, again.extents[0][1], len(expert), len(expert), sums[0]).check(2, 0, expert.data)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "dense.safetensors"])
def test_a_flipped_byte_beside_the_experts_is_named(store: PackedStore, name: str, is_old: bool) -> None:
    if is_old:  # of a store whose large files have a CRC-32 alone
        files = {name: replace(entry, xxh3=None) for name, entry in store.manifest.files.items()}
        store = replace(store, manifest=replace(store.manifest, files=files))
    store.check_dense()
    flip(store.folder / name, -2)
    with pytest.raises(StoreError, match=rf"{name}: checksum .* written with .*pack again"):
        store.check_dense()


def test_a_file_of_sums_is_read_as_hostile_input(store: PackedStore) -> None:
    path, manifest_path = store.folder / "experts-00000.sums.safetensors", store.folder / "manifest.json"
    whole, manifest = path.read_bytes(), json.loads(manifest_path.read_text())
    forged = whole.replace(b'"shape":[3,4]', b'"shape":[4,3]')
    path.write_bytes(forged)
    manifest["files"][path.name]["checksum"] = zlib.crc32(forged)
    manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"no tensor 'checksum' of U64 \[3, 4\]"):
        PackedStore.open(store.folder)
    flip(path, -1)
    with pytest.raises(StoreError, match=f"{path.name}: checksum"):
        PackedStore.open(store.folder)
    with path.open("ab") as file:
        file.write(b"more")
    manifest["files"][path.name]["nbytes"] += 4
    manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="bytes, more than the 4192 accepted"):
        PackedStore.open(store.folder)

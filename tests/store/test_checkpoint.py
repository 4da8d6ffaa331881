"""Opening a checkpoint folder: what is missing, damaged or dangerous is named."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from expertly.core.errors import CheckpointError
from expertly.store.checkpoint import Checkpoint, has_weights
from tests.store.builders import entry, safetensors_bytes, write_checkpoint

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"


def test_reads_rows_and_chunks(tmp_path: Path) -> None:
    values = np.arange(5 * 4 * 3, dtype=np.float32).reshape(5, 4, 3)
    save_file({"x": values, "scalar": np.array(7.0), "none": np.empty((0, 2))}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    assert np.array_equal(checkpoint.read("x", 3).view(np.float32).reshape(4, 3), values[3])
    assert b"".join(bytes(chunk) for chunk in checkpoint.read_chunks("x", 7)) == values.tobytes()
    assert checkpoint.read("scalar").view(np.float64).tolist() == [7.0]
    assert checkpoint.read("none").size == 0 and list(checkpoint.read_chunks("none")) == []


def set_index(folder: Path, **weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


BAD_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), f"{SHARD}: missing shard: {INDEX} names it for 1 tensors"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-2]), f"{SHARD}: tensor 't1'.*truncated"),
    "lacks its tensor": (lambda path: set_index(path.parent, t0=SHARD, t1=SHARD), "tensor 't0' is not in it"),
    "has another's tensor": (
        lambda path: path.write_bytes(safetensors_bytes({"t0": entry("U8", (4,), (0, 4))}, b"abcd")),
        "tensor 't1' is not in it",
    ),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_a_bad_shard_is_named(tmp_path: Path, case: str) -> None:
    change, message = BAD_SHARDS[case]
    path = write_checkpoint(tmp_path) / SHARD
    opened = Checkpoint.open(tmp_path)
    change(path)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
    if case in ("missing", "truncated"):
        with pytest.raises(CheckpointError, match=f"{SHARD}: (no such file|truncated inside tensor 't1')"):
            opened.read("t1")


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    outside = ("../escape.safetensors", "/etc/passwd", "..", "", "a\\b", "sub/../../x.safetensors", "sub//x", 3, None)
    for name in outside:
        set_index(tmp_path, t0=name)
        with pytest.raises(CheckpointError, match=r"weight_map\['t0'\]=.*same folder"):
            Checkpoint.open(tmp_path)


GARBLED = {
    INDEX: (b"", b"{", b"[]", b"NaN", b'{"weight_map": []}', b'{"weight_map": {}}', b"{}"),
    "config.json": (b"", b"[]", b"\xff", b"{" * 100_000),
}


@pytest.mark.parametrize("name", GARBLED)
def test_a_garbled_file_is_named(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path) / name
    for content in GARBLED[name]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            Checkpoint.open(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: there are tensors for 256"),
        ({"text_config": {"n_routed_experts": 10**9}}, "text_config.n_routed_experts=1000000000"),
        ({"moe_num_experts": [64, 10**5]}, "moe_num_experts=100000"),
        ({"num_layers": 1e18}, "num_layers=1e"),
        ({"num_hidden_layers": 61, "num_experts": 512, "shared_expert_intermediate_size": 10**6}, None),
    ],
)
def test_a_config_that_claims_more_than_there_is_is_refused(
    tmp_path: Path, claim: dict[str, Any], said: str | None
) -> None:
    """Of 512 experts, stacked in one tensor, and few of everything else."""
    write_checkpoint(tmp_path, config={"model_type": "toy", **claim})
    (tmp_path / INDEX).unlink()
    stacked = {"model.layers.0.mlp.experts.down_proj": entry("U8", (512, 1, 1), (0, 512))}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stacked, bytes(512)))
    if said is None:
        Checkpoint.open(tmp_path)
        return
    with pytest.raises(CheckpointError, match=re.escape(said.replace("256", "512"))):
        Checkpoint.open(tmp_path)


def file_of(*names: str, value: int = 9) -> bytes:
    """Of tensors as `write_checkpoint` makes them, all of `value`."""
    header = {name: entry("U8", (4,), (4 * at, 4 * at + 4)) for at, name in enumerate(names)}
    return safetensors_bytes(header, bytes([value] * 4 * len(names)))


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def moved(*, has_index: bool) -> Callable[[Path], None]:
    """Shards in a folder of their own, and an index above it that does not say so, or none."""

    def change(folder: Path) -> None:
        (folder / "sub").mkdir()
        for path in sorted(folder.glob("*.safetensors")):
            path.rename(folder / "sub" / path.name)
        if not has_index:
            without_index(folder)

    return change


def overlaid(folder: Path) -> None:
    """A shard that was written later has t0, too."""
    overlay = folder / "overlay.safetensors"
    overlay.write_bytes(file_of("t0", value=0))
    (folder / SHARD.replace("2-of", "1-of")).unlink()
    (folder / SHARD).write_bytes(safetensors_bytes(BOTH, bytes([9] * 4 + [1] * 4)))
    set_index(folder, t0=overlay.name, t1=SHARD)


def adapted(folder: Path) -> None:
    without_index(folder)
    (folder / "adapter_model.safetensors").write_bytes(file_of("t0"))


def from_a_mac(folder: Path) -> None:
    """Its archives have a file `._NAME` beside each."""
    without_index(folder)
    for path in [*folder.glob("*.safetensors")]:
        path.with_name(f"._{path.name}").write_bytes(bytes([0, 5, 22, 7]))


BOTH = {"t0": entry("U8", (4,), (0, 4)), "t1": entry("U8", (4,), (4, 8))}


def merged(folder: Path) -> None:
    """The index is of shards that were there before."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(BOTH, b"\0" * 4 + b"\1" * 4))


def beside(name: str, *names: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(file_of(*names)) and None


LAYOUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "shards without an index": (without_index, ""),
    "an adapter beside them": (adapted, ""),
    "an archive of a Mac": (from_a_mac, ""),
    "in a folder that it does not name": (moved(has_index=True), ""),
    "in a folder without one": (moved(has_index=False), ""),
    "an overlay": (overlaid, f"{INDEX}: names other files for 1 tensors that are in several; not read: t0 in 'model-"),
    "a stray model.safetensors": (beside("model.safetensors", "t0", "t1"), "safetensors: not read: model.safetensors."),
    "an index of what was there before": (merged, f"{INDEX}: not used: none of the files that it names is there"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_decides_or_else_the_headers_do(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, line = LAYOUTS[layout]
    change(write_checkpoint(tmp_path))
    assert has_weights(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: checkpoint.read(name).tolist() for name in checkpoint.tensors} == {"t0": [0] * 4, "t1": [1] * 4}
    assert len(checkpoint.identity) == len(checkpoint.stamp) == 64
    assert len(caplog.messages) == bool(line) and line in "".join(caplog.messages)


def in_two_folders(folder: Path) -> None:
    moved(has_index=False)(folder)
    shutil.copytree(folder / "sub", folder / "other")


def without_first(folder: Path) -> None:
    without_index(folder)
    (folder / SHARD.replace("2-of", "1-of")).unlink()


def overlaid_without_index(folder: Path) -> None:
    overlaid(folder)
    without_index(folder)
    (folder / SHARD).rename(folder / "model.x.safetensors")


NO_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard less": (without_first, "model-00001-of-00002.safetensors: missing shard: the weights are split into 2"),
    "a tensor in two files": (overlaid_without_index, f"'t0' is also in model.x.safetensors: {INDEX} must say which"),
    "weights in two folders": (in_two_folders, "weights are in several folders in it: other, sub; give one"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_nothing_decides_is_refused(case: str, tmp_path: Path) -> None:
    change, said = NO_MODELS[case]
    change(write_checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tmp_path)


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()  # as GGUF files come from the hub: beside them lies no config
    with pytest.raises(CheckpointError, match=r"found model\.gguf, a file to give itself"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.gguf").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no model"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin, which cannot be packed"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../blobs/absent")  # an unfinished download
    with pytest.raises(CheckpointError, match="broken link"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(tmp_path / "absent")


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    first = Checkpoint.open(write_checkpoint(tmp_path / "a")).identity
    assert Checkpoint.open(write_checkpoint(tmp_path / "b")).identity == first  # folder and times do not enter
    changed = write_checkpoint(tmp_path / "d")
    (changed / SHARD).write_bytes((changed / SHARD).read_bytes()[:-4] + b"diff")  # same header, other weights
    config = write_checkpoint(tmp_path / "c", config={"model_type": "other"})
    large = [write_checkpoint(tmp_path / f"large-{value}", shards=1) for value in range(2)]  # those are sampled
    for value, folder in enumerate(large):
        (folder / INDEX).unlink()
        save_file({"t0": np.full(6 << 20, value, np.uint8)}, folder / "model.safetensors")
    folders = [changed, config, write_checkpoint(tmp_path / "e", shards=3), *large]
    assert len({first, *(Checkpoint.open(folder).identity for folder in folders)}) == 6


@pytest.mark.parametrize("nbytes", [40 << 20, 80 << 20])
def test_a_change_that_the_sample_misses_gives_another_stamp(tmp_path: Path, nbytes: int) -> None:
    """In place, or by another file; a copy of a large file has the same one where it keeps the time."""
    header = safetensors_bytes({"x": entry("U8", (nbytes,), (0, nbytes))})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    path, copy = tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + nbytes)
    shutil.copy2(path, copy)
    before = Checkpoint.open(path.parent)
    assert Checkpoint.open(copy.parent).stamp == before.stamp
    with path.open("r+b") as file:
        file.seek(nbytes // 2)
        file.write(b"x")
    changed = Checkpoint.open(path.parent)
    assert changed.identity == before.identity and changed.stamp != before.stamp
    copy.replace(path)
    assert Checkpoint.open(path.parent).stamp == before.stamp


def test_the_stamp_of_a_file_in_the_hubs_cache_is_its_hash_until_it_is_written_to(tmp_path: Path) -> None:
    blob, path = tmp_path / "blobs" / ("ab" * 32), tmp_path / "snapshots" / "model.safetensors"
    for folder in (blob.parent, path.parent):
        folder.mkdir()
    (path.parent / "config.json").write_text("{}")
    blob.write_bytes(safetensors_bytes({"x": entry("U8", (4,), (0, 4))}, b"abcd"))
    path.symlink_to(Path("..") / "blobs" / blob.name)
    before = Checkpoint.open(path.parent).stamp
    os.utime(blob, (1, 1))  # as another download of the same file
    assert Checkpoint.open(path.parent).stamp == before
    path.write_bytes(blob.read_bytes()[:-1] + b"x")
    os.utime(blob, ns=(0, path.lstat().st_mtime_ns + 1))
    assert Checkpoint.open(path.parent).stamp != before

"""`expertly pack --stream` and `doctor` of a hub id, against a hub on this machine that counts what it is asked for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants, file_download, hf_hub_download, snapshot_download

from expertly.cli.main import main
from expertly.core.errors import CheckpointError
from expertly.model.hub import HubModel, arrived, download
from expertly.model.needs import needs_of
from expertly.model.packing import pack
from expertly.store.packed import PackedStore
from tests.families import make_checkpoint
from tests.model.checkpoints import change, make_int4_checkpoint
from tests.model.hub import NAME, FakeHub, served
from tests.store.builders import safetensors_bytes

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    return make_checkpoint("qwen3_moe", folder, max_shard_size="20KB", tokenizer=True)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """What the hub's client talks to: its own settings are read when it is imported."""
    with served(FakeHub(checkpoint, tmp_path)) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "".join(template[1:]))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))  # before it tries again
        monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
        yield found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Its exit code, and what --json printed."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def same_weights(store: PackedStore, whole: PackedStore) -> bool:
    names = [name for name in whole.manifest.files if not name.endswith(".json")]
    return bool(names) and all(store.manifest.files[name] == whole.manifest.files[name] for name in names)


def test_a_streamed_store_is_the_packed_one_and_few_shards_lie_beside_it(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    names = shards(checkpoint)
    assert len(names) > 5
    code, told = command("pack", NAME, "--stream")
    assert code == 0, told
    assert sorted(one for one in hub.downloads if one.endswith(".safetensors")) == names, "each once"
    assert hub.most_shards <= 3, "an expert layer of this model lies in at most three"
    store = PackedStore.open(Path(told["store"]))
    assert told["source"].startswith(f"{NAME}@")
    assert same_weights(store, pack(checkpoint, tmp_path / "whole", codec="none"))
    assert (store.folder / "tokenizer.json").is_file()
    assert [path.name for path in store.folder.parent.iterdir()] == [store.folder.name], "nothing is left over"
    hub.downloads.clear()
    code, again = command("pack", NAME)
    assert code == 0 and again["store"] == told["store"] and not hub.downloads, "it is found by its name"


def test_an_interrupted_one_goes_on_and_what_is_half_written_is_not_used(
    hub: FakeHub, checkpoint: Path, command: Command
) -> None:
    names = shards(checkpoint)
    hub.fails_at = names[-2]
    code, told = command("pack", NAME, "--stream")
    assert code == 2, told
    folder = hub.watched / "cache" / "stores"
    assert not any((one / "manifest.json").exists() for one in folder.iterdir())
    first = set(hub.downloads) - {hub.fails_at}
    hub.downloads.clear()
    hub.fails_at = None
    code, told = command("pack", NAME, "--stream")
    assert code == 0, told
    again = first.intersection(hub.downloads).intersection(names)
    assert len(again) <= 2 < len(first), "shards of which something was still to be packed"
    PackedStore.open(Path(told["store"])).verify(full=True)


def test_what_an_earlier_commit_left_is_not_mixed_with_a_later_ones(
    hub: FakeHub, checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    """Of the same names, shapes and sizes."""
    hub.fails_at = shards(checkpoint)[-2]
    assert command("pack", NAME, "--stream", "--out", str(tmp_path / "out"))[0] == 2
    hub.fails_at, hub.commit = None, "decade" + "1" * 34
    hub.folder = make_checkpoint("qwen3_moe", tmp_path / "later", seed=1, max_shard_size="20KB", tokenizer=True)
    code, told = command("pack", NAME, "--stream", "--out", str(tmp_path / "out"))
    assert code == 0, told
    assert same_weights(PackedStore.open(tmp_path / "out"), pack(hub.folder, tmp_path / "whole", codec="none"))


def test_what_the_hubs_cache_has_is_used_and_stays(hub: FakeHub, checkpoint: Path, command: Command) -> None:
    cached = hf_hub_download(NAME, shards(checkpoint)[1])
    hub.downloads.clear()
    code, told = command("pack", NAME, "--stream")
    assert code == 0, told
    assert shards(checkpoint)[1] not in hub.downloads and Path(cached).is_file()


def test_what_cannot_be_streamed(hub: FakeHub, checkpoint: Path, tmp_path: Path, command: Command) -> None:
    out = str(tmp_path / "out")
    assert command("pack", NAME, "--stream", "--out", out)[0] == 0
    for arguments, why in (
        (["maker/nothing"], "the hub has no such model"),
        ([str(checkpoint)], "is here already"),
        ([NAME, "--out", out, "--dtype", "bfloat16"], "holds float32"),
        ([NAME, "--out", out, "--codec", "planes"], "is in none"),
    ):
        code, told = command("pack", "--stream", *arguments)
        assert code == 2 and why in told["error"]["message"]


def test_room_is_looked_at_before_anything_is_downloaded(
    hub: FakeHub, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, sizes = needs_of(NAME), {path.name: path.stat().st_size for path in hub.folder.iterdir()}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for flags, says in (([], "pack --stream"), (["--stream"], "for shards while they are packed")):
        code, told = command("pack", NAME, *flags)
        assert code == 2 and says in told["error"]["message"] and "1000 are free" in told["error"]["message"]
    shards_nbytes = [nbytes for name, nbytes in sizes.items() if name.endswith(".safetensors")]
    found = re.search(r"(\d+) more bytes are needed, of which (\d+) for shards", told["error"]["message"])
    assert found is not None
    needed, most = map(int, found.groups())
    assert max(shards_nbytes) < most < 4 * max(shards_nbytes) < sum(shards_nbytes)
    whole = needs.experts_nbytes + 2 * needs.dense_nbytes + most
    assert whole - sum(sizes.values()) + sum(shards_nbytes) <= needed < whole, "small files are there by now"
    assert not any(one.endswith(".safetensors") for one in hub.downloads)


def test_a_download_needs_room_for_the_store_as_well(
    hub: FakeHub, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = needs_of(NAME)  # after which the hub's cache has the index
    files = HubModel.find(NAME).files
    download_nbytes = sum(files.values()) - files["model.safetensors.index.json"]
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    for flags, experts_nbytes in (
        (["--out", str(hub.watched / "out")], needs.experts_nbytes),
        (["--dtype", "bfloat16"], needs.experts_nbytes // 2),
    ):
        store_nbytes = experts_nbytes + needs.dense_nbytes
        free = download_nbytes + store_nbytes - 1
        code, told = command("pack", NAME, *flags)
        said = f"{download_nbytes} bytes are to be downloaded, {store_nbytes} more are packed from them, and {free} are"
        assert code == 2 and said in told["error"]["message"] and "pack --stream" in told["error"]["message"]
        assert not any(one.endswith(".safetensors") for one in hub.downloads)
    free += 1
    code, told = command("pack", NAME, *flags)
    assert code == 0, told


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_damaged_model_leaves_nothing_of_its_store(
    hub: FakeHub, tmp_path: Path, command: Command, flags: list[str]
) -> None:
    hub.folder = make_int4_checkpoint(tmp_path / "damaged")
    name = "model.layers.2.mlp.experts.3.up_proj.weight_scale"
    change(hub.folder, lambda one, tensor: tensor * torch.nan if one == name else tensor)
    code, told = command("pack", NAME, *flags)
    assert code == 2 and "a scale of nan" in told["error"]["message"], told
    assert not list((tmp_path / "cache" / "stores").glob("*"))


def test_doctor_downloads_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    needs = needs_of(NAME)
    assert not any(one.endswith(".safetensors") for one in hub.downloads), "ranges of their beginnings alone"
    whole = pack(hub.folder, tmp_path / "whole", codec="none")
    assert (needs.experts_nbytes, needs.dense_nbytes) == (whole.experts_nbytes, whole.dense_nbytes)
    assert needs.stored is not None and not needs.stored.is_here
    assert needs.stored.largest_file_nbytes == max((hub.folder / name).stat().st_size for name in shards(hub.folder))
    assert needs.stored.nbytes == needs.experts_nbytes + needs.dense_nbytes


def test_a_file_of_another_size_than_was_said_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    told = HubModel.find(NAME)
    told.files["config.json"] += 1
    with pytest.raises(CheckpointError, match=r"config\.json: \d+ bytes, but the hub says"):
        told.fetch("config.json", tmp_path)


def with_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another header of the first tensor of the first shard."""
    path = folder / shards(folder)[0]
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header[next(one for one in header if one != "__metadata__")])
    path.write_bytes(safetensors_bytes(header, raw[end:]))


def with_json(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))


def lead_elsewhere(index: dict[str, Any]) -> None:
    index["weight_map"] = {name: f"sub/{file}" for name, file in index["weight_map"].items()}


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "dtype": (lambda at: with_header(at, lambda one: one.update(dtype="F99")), "dtype='F99': unknown"),
    "shape": (lambda at: with_header(at, lambda one: one.update(shape="wide")), "shape='wide': must be"),
    "size": (lambda at: with_header(at, lambda one: one.update(shape=[1 << 40])), "data_offsets=.*hold"),
    "offsets": (lambda at: with_header(at, lambda one: one.update(data_offsets=[8, 0])), "data_offsets=.*hold"),
    "one offset": (lambda at: with_header(at, lambda one: one.update(data_offsets=[5])), NAME),
    "no config": (lambda at: (at / "config.json").write_text("[" * 100_000), r"config\.json: not JSON"),
    "claims": (
        lambda at: with_json(at, "config.json", lambda one: one.update(num_hidden_layers=10**9)),
        "num_hidden_layers=1000000000: there are tensors for",
    ),
    "names": (lambda at: with_json(at, "model.safetensors.index.json", lead_elsewhere), "names 'sub/.*not there"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SPOILED)
def test_what_a_hub_says_is_read_as_hostile_input(hub: FakeHub, tmp_path: Path, what: str) -> None:
    spoil, told = SPOILED[what]
    hub.folder = Path(shutil.copytree(hub.folder, tmp_path / "spoiled"))
    spoil(hub.folder)
    with pytest.raises(CheckpointError, match=told):
        needs_of(NAME)


def test_a_shard_that_is_not_what_its_headers_said_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    found = HubModel.find(NAME)
    found.fetch_small_files(tmp_path)
    checkpoint = found.checkpoint(tmp_path)
    path = tmp_path / shards(hub.folder)[0]
    shutil.copy(hub.folder / path.name, path)
    arrived(checkpoint, path)
    with_header(tmp_path, lambda one: one.update(shape=[1, *one["shape"]]))
    with pytest.raises(CheckpointError, match="is not what the hub's headers say"):
        arrived(checkpoint, path)


def test_what_the_cache_has_needs_no_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot_download(NAME)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert download(NAME) == Path(folder)

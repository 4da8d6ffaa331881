"""A model of the hub: looked at, downloaded, packed, and found again; against a hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from expertly.cli.main import main
from expertly.core.errors import CheckpointError
from expertly.model import hub as hub_module
from expertly.model.hub import HubModel, download
from expertly.model.needs import needs_of
from expertly.model.packing import pack, pack_cached
from expertly.store.checkpoint import INDEX_NAME
from tests.families import make_checkpoint
from tests.model.hub import NAME, FakeHub, asked
from tests.store.builders import safetensors_bytes

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    return make_checkpoint("qwen3_moe", folder, max_shard_size="20KB", tokenizer=True)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with asked(FakeHub(checkpoint), tmp_path) as found:
        yield found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Its exit code, and what --json printed."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def weights_in(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors")]


def test_a_model_is_packed_once_and_its_download_may_go(hub: FakeHub, tmp_path: Path, command: Command) -> None:
    code, told = command("pack", NAME)
    assert code == 0, told
    assert len(weights_in(hub.downloads)) > 5
    assert told["expert_bytes"] == pack(hub.folder, tmp_path / "whole").experts_nbytes
    assert (Path(told["store"]) / "tokenizer.json").is_file()
    shutil.rmtree(tmp_path / "hf")
    hub.downloads.clear()
    assert command("pack", NAME)[1]["store"] == told["store"] and not hub.downloads, "it is found by its name"


def test_room_is_looked_at_before_anything_is_downloaded(
    hub: FakeHub, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = HubModel.find(NAME).files
    download_nbytes = sum(files.values())
    store_nbytes = sum(files[name] for name in weights_in([*files]))
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    for flags, needed in (
        (["--out", str(hub.folder.parent / "out")], download_nbytes + store_nbytes),
        ([], download_nbytes + store_nbytes),
        (["--dtype", "bfloat16"], download_nbytes),
    ):
        free = needed - 1
        code, told = command("pack", NAME, *flags)
        assert code == 2 and f"{needed} more bytes are needed to download" in told["error"]["message"]
        assert f"{free} are free" in told["error"]["message"] and not weights_in(hub.downloads)
    free = download_nbytes + store_nbytes
    code, told = command("pack", NAME)
    assert code == 0, told


def test_what_the_cache_has_needs_no_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot_download(NAME)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert download(NAME) == Path(folder)


def test_doctor_downloads_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    needs = needs_of(f"hf.co/{NAME}")
    assert not weights_in(hub.downloads), "ranges of their beginnings alone"
    whole = pack(hub.folder, tmp_path / "whole")
    assert (needs.experts_nbytes, needs.dense_nbytes) == (whole.experts_nbytes, whole.dense_nbytes)
    assert needs.stored is not None and not needs.stored.is_here
    assert needs.stored.nbytes == needs.experts_nbytes + needs.dense_nbytes
    with pytest.raises(CheckpointError, match="the hub has no such model"):
        needs_of("maker/nothing")


def without_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()


def with_stray_file(folder: Path) -> None:
    """Beside an index, which decides."""
    shutil.copy(min(folder.glob("*.safetensors")), folder / "model.safetensors")


@pytest.mark.parametrize("change", [without_index, with_stray_file])
@pytest.mark.parametrize("head_nbytes", [16, 1 << 20])
def test_what_doctor_reads_is_what_is_packed(
    hub: FakeHub, change: Callable[[Path], None], head_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the headers are."""
    monkeypatch.setattr(hub_module, "_SHORT_HEAD_NBYTES", head_nbytes)
    hub.folder = Path(shutil.copytree(hub.folder, tmp_path / "other"))
    change(hub.folder)
    there, here = needs_of(NAME), needs_of(str(hub.folder))
    assert not weights_in(hub.downloads) and there.name == NAME
    assert replace(there, name=here.name, stored=here.stored, config=here.config) == here
    assert pack_cached(NAME).experts_nbytes == here.experts_nbytes


def test_an_adapter_is_named(hub: FakeHub, tmp_path: Path) -> None:
    hub.folder = tmp_path / "adapter"
    hub.folder.mkdir()
    (hub.folder / "adapter_config.json").write_text('{"base_model_name_or_path": "maker/base"}')
    (hub.folder / "adapter_model.safetensors").write_bytes(b"x")
    for use in (needs_of, pack_cached):
        with pytest.raises(CheckpointError, match=r"an adapter \(LoRA\) of 'maker/base' without its model; merge it"):
            use(NAME)


def with_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another header of the first tensor of the first shard."""
    path = min(folder.glob("*.safetensors"))
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header[next(one for one in header if one != "__metadata__")])
    path.write_bytes(safetensors_bytes(header, raw[end:]))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "dtype": (lambda at: with_header(at, lambda one: one.update(dtype="F99")), "dtype='F99': unknown"),
    "no config": (lambda at: (at / "config.json").write_text("[" * 100_000), r"config\.json: not JSON"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SPOILED)
def test_what_a_hub_says_is_read_as_hostile_input(hub: FakeHub, tmp_path: Path, what: str) -> None:
    spoil, told = SPOILED[what]
    hub.folder = Path(shutil.copytree(hub.folder, tmp_path / "spoiled"))
    spoil(hub.folder)
    with pytest.raises(CheckpointError, match=told):
        needs_of(NAME)

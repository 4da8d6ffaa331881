"""`expertly pack --stream` and `doctor` of a hub id, against a hub on this machine that counts what it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.model.packing import pack
from expertly.store.packed import PackedStore
from tests.families import make_checkpoint
from tests.model.hub import NAME, FakeHub, served


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "model"
    return make_checkpoint("qwen3_moe", folder, max_shard_size="20KB", tokenizer=True)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with served(FakeHub(checkpoint, tmp_path)) as found:
        yield found


def command(hub: FakeHub, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what --json printed."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(expertly.__file__).parents[1]),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(hub.watched / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "EXPERTLY_CACHE": str(hub.watched / "cache"),
    }
    line = [sys.executable, "-m", "expertly", *arguments, "--json"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
    return result.returncode, json.loads(result.stdout or '{"stderr": ' + json.dumps(result.stderr) + "}")


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_a_streamed_store_is_the_packed_one_and_few_shards_lie_beside_it(
    hub: FakeHub, checkpoint: Path, tmp_path: Path
) -> None:
    names = shards(checkpoint)
    assert len(names) > 5
    code, told = command(hub, "pack", NAME, "--stream")
    assert code == 0, told
    assert sorted(one for one in hub.downloads if one.endswith(".safetensors")) == names, "each once"
    assert hub.most_shards <= 3, "an expert layer of this model lies in at most three"
    store, whole = PackedStore.open(Path(told["store"])), pack(checkpoint, tmp_path / "whole", codec="none")
    assert told["source"].startswith(f"{NAME}@")
    same = [name for name in whole.manifest.files if not name.endswith(".json")]
    assert same and all(store.manifest.files[name] == whole.manifest.files[name] for name in same)
    assert (store.folder / "tokenizer.json").is_file()
    assert [path.name for path in store.folder.parent.iterdir()] == [store.folder.name], "nothing is left over"
    hub.downloads.clear()
    code, again = command(hub, "pack", NAME)
    assert code == 0 and again["store"] == told["store"] and not hub.downloads, "it is found by its name"


def test_an_interrupted_one_goes_on_and_what_is_half_written_is_not_used(hub: FakeHub, checkpoint: Path) -> None:
    names = shards(checkpoint)
    hub.fails_at = names[-2]
    code, told = command(hub, "pack", NAME, "--stream")
    assert code == 2, told
    folder = hub.watched / "cache" / "stores"
    assert not any((one / "manifest.json").exists() for one in folder.iterdir())
    first = set(hub.downloads) - {hub.fails_at}
    hub.downloads.clear()
    hub.fails_at = None
    code, told = command(hub, "pack", NAME, "--stream")
    assert code == 0, told
    again = first.intersection(hub.downloads).intersection(names)
    assert len(again) <= 2 < len(first), "shards of which something was still to be packed"
    PackedStore.open(Path(told["store"])).verify(full=True)


def test_what_the_hubs_cache_has_is_used_and_stays(hub: FakeHub, checkpoint: Path) -> None:
    script = "import sys; from huggingface_hub import hf_hub_download; print(hf_hub_download(*sys.argv[1:]))"
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(hub.watched / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    line = [sys.executable, "-c", script, NAME, shards(checkpoint)[1]]
    cached = subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout.split()[-1]
    hub.downloads.clear()
    code, told = command(hub, "pack", NAME, "--stream")
    assert code == 0, told
    assert shards(checkpoint)[1] not in hub.downloads and Path(cached).is_file()


def test_what_cannot_be_streamed(hub: FakeHub, checkpoint: Path) -> None:
    code, told = command(hub, "pack", "maker/nothing", "--stream")
    assert code == 2 and "the hub has no such model" in told["error"]["message"]
    code, told = command(hub, "pack", str(checkpoint), "--stream")
    assert code == 2 and "is here already" in told["error"]["message"]


def test_room_is_looked_at_before_anything_is_downloaded(hub: FakeHub) -> None:
    script = (
        "import shutil, sys; from types import SimpleNamespace as Space\n"
        "shutil.disk_usage = lambda path: Space(free=1000)\n"
        "from expertly.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub.watched / "hf"), "HF_HUB_OFFLINE": "0"}
    environment |= {"PYTHONPATH": str(Path(expertly.__file__).parents[1]), "EXPERTLY_CACHE": str(hub.watched / "cache")}
    for flags, says in (([], "pack --stream"), (["--stream"], "for shards while they are packed")):
        line = [sys.executable, "-c", script, "pack", NAME, *flags]
        result = subprocess.run(line, capture_output=True, text=True, env=environment)
        assert result.returncode == 2 and says in result.stderr and "1000 are free" in result.stderr, result.stderr
    assert not any(one.endswith(".safetensors") for one in hub.downloads)


def test_doctor_downloads_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    script = (
        "import sys; from dataclasses import asdict; from expertly.model.needs import needs_of; import json;"
        "n = needs_of(sys.argv[1]); print(json.dumps([n.experts_nbytes, n.dense_nbytes, asdict(n.stored)]))"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    environment["PYTHONPATH"] = str(Path(expertly.__file__).parents[1])
    line = [sys.executable, "-c", script, NAME]
    result = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    experts, dense, stored = json.loads(result.stdout.splitlines()[-1])
    assert not any(one.endswith(".safetensors") for one in hub.downloads), "ranges of their beginnings alone"
    whole = pack(hub.folder, tmp_path / "whole", codec="none")
    assert (experts, dense) == (whole.experts_nbytes, whole.dense_nbytes)
    assert stored["nbytes"] == experts + dense and not stored["is_here"]

"""What `expertly` learns outlives the model that learned it: read when one is loaded, written while it runs and when it
goes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertly
from expertly.api import handle
from expertly.cli.main import main
from expertly.core.errors import ConfigError, StoreError
from expertly.engine.learned import reuse_models
from expertly.policies.eviction.reuse import ReuseModel
from expertly.policies.learned import ModelShape, read_learned, save_learned
from expertly.scheduler.decisions import replay_file
from expertly.store.cache import list_entries, remove_entry
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, reader_threads
from tests.families import generate
from tests.scheduler.drive import geometry
from tests.store.mounts import tiny_disk

pytestmark = pytest.mark.timeout(120)

NUM_TOKENS = (14 + 11) + 2 * 11
"""Of a case's two prompts and their answers of twelve tokens, the last of which the model does not see."""


def of_reuse(model: Any) -> dict[str, Any]:
    found = expertly.stats(model).as_dict()["reuse"]
    assert isinstance(found, dict)
    return found


def learn(store: Path, case: Case, **kwargs: Any) -> int:
    """Load, generate, unload; the tokens from which it had learned at the start."""
    with loaded(store, **({"system": "expertly", "maps": "auto"} | kwargs)) as model:
        assert generate(model, case.prompts) == case.tokens
        return int(of_reuse(model)["tokens_read"])


def test_auto_is_beside_the_store_and_is_found_again(own: tuple[Case, Path]) -> None:
    case, store = own
    path = store.with_name("store.reuse")
    with loaded(store, system="expertly", maps="auto") as model:
        facts = of_reuse(model)
        assert (facts["history"], facts["tokens"], facts["says"]) == (
            *("cold", 0),
            f"began with nothing learned: there was no {path}",
        )
        generate(model, case.prompts)
        (live,) = reuse_models(handle(model).engine.executor)
        state = live.state()
    assert state is not None
    with loaded(store, system="expertly", maps="auto") as model:
        assert of_reuse(model) == {
            "history": "warm",
            "says": f"began with what {NUM_TOKENS} tokens had taught: {path}",
            "tokens": NUM_TOKENS,
            "tokens_read": NUM_TOKENS,
            "file": str(path),
            "failed_writes": 0,
            "problem": None,
        }
        (live,) = reuse_models(handle(model).engine.executor)
        again = live.state()
        identity = handle(model).store.manifest.identity
        shape = ModelShape.of(handle(model).engine.executor.geometry)
    assert again is not None
    for name, array in state.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)
    file = read_learned(path, ReuseModel, identity=identity, shape=shape)
    assert file.learned.num_tokens == NUM_TOKENS and str(file.header.about["source"]) == str(case.folder)
    generation = path.stat().st_mtime_ns
    with loaded(store, system="expertly", maps="auto"):
        pass
    assert path.stat().st_mtime_ns == generation, "nothing was learned: nothing is written"
    assert learn(store, case) == NUM_TOKENS and learn(store, case) == 2 * NUM_TOKENS


@pytest.mark.parametrize("maps", [None, "off"])
def test_off_writes_nothing(maps: str | None, own: tuple[Case, Path]) -> None:
    case, store = own
    with loaded(store, system="expertly", maps=maps) as model:
        assert generate(model, case.prompts) == case.tokens
        facts = of_reuse(model)
        assert (facts["says"], facts["file"]) == ("began with nothing learned: maps=off", None)
        assert facts["tokens"] == NUM_TOKENS, "it learned all the same"
    assert os.listdir(store.parent) == ["store"]


def test_a_file_that_is_named(own: tuple[Case, Path], tmp_path: Path) -> None:
    case, store = own
    path = tmp_path / "my.reuse"
    assert learn(store, case, maps=path) == 0
    assert learn(store, case, maps=str(path), segments=2, memory="40%") == NUM_TOKENS, "of any P, in any memory"
    assert not store.with_name("store.reuse").exists()


@pytest.mark.parametrize("damage", ["truncated", "altered", "another model's", "another shape", "no file of ours"])
def test_a_damaged_file(damage: str, own: tuple[Case, Path], cases: Cases) -> None:
    """Named, it is an error; else the model begins with nothing, says so, and replaces the file."""
    case, store = own
    path = store.with_name("store.reuse")
    if damage == "another model's":
        with loaded(cases["gpt_oss"].store, system="expertly", maps=path) as other:
            generate(other, cases["gpt_oss"].prompts)
    else:
        learn(store, case)
        raw, file = bytearray(path.read_bytes()), read_learned(path, ReuseModel)
        raw[len(raw) // 2] ^= 1
        path.write_bytes({"truncated": raw[:-5], "altered": raw}.get(damage, b"hello"))
    if damage == "another shape":  # that says that it is of this model
        shape = geometry(layers=3, experts=5)
        save_learned(path, ReuseModel(shape), file.header.identity)
    with pytest.raises(StoreError, match=r"store\.reuse"):
        learn(store, case, maps=path)
    assert not reader_threads()
    with (
        pytest.warns(UserWarning, match=r"starting without tokens, the file will be replaced: .*store\.reuse"),
        loaded(store, system="expertly", maps="auto") as model,
    ):
        facts = of_reuse(model)
        assert facts["history"] == "cold" and "store.reuse" in facts["problem"]
        assert facts["says"] == f"began with nothing learned: {facts['problem']}"
        assert generate(model, case.prompts) == case.tokens
    assert learn(store, case) == NUM_TOKENS, "it was replaced"


def test_what_may_be_named_for_which_system(own: tuple[Case, Path], tmp_path: Path) -> None:
    case, store = own
    path = tmp_path / "my.reuse"
    with pytest.raises(ConfigError, match=r"my\.reuse.*system 'lru' has no maps; accepted: auto, off"):
        expertly.load(str(store), system="lru", maps=path, device="cpu")
    with pytest.raises(ConfigError, match=r"my\.reuse': 2 devices learn apart; accepted: auto, off"):
        expertly.load(str(store), system="expertly", maps=path, memory="50%", devices="cpu:0,cpu:1")
    with pytest.raises(ConfigError, match=r"my\.reuse': decisions are written down.*; accepted: auto, off"):
        expertly.load(str(store), system="expertly", maps=path, decisions=tmp_path / "journal", device="cpu")
    with pytest.raises(ConfigError, match="must be a file, in a folder that exists"):
        expertly.load(str(store), system="expertly", maps=tmp_path / "nowhere" / "my.reuse", device="cpu")
    assert os.listdir(tmp_path) == ["store"]
    learn(store, case)
    with pytest.raises(StoreError, match="format='expertly-reuse'"):
        expertly.load(str(store), system="fmoe", maps=store.with_name("store.reuse"), device="cpu")


def test_a_system_that_learns_both(own: tuple[Case, Path], tmp_path: Path) -> None:
    """Each has a file of its own beside the store; one that is named is that of the maps."""
    case, store = own
    system = "expertly:prediction=fmoe:distance=1"
    assert learn(store, case, system=system) == 0
    assert sorted(os.listdir(tmp_path)) == ["store", "store.maps", "store.reuse"]
    assert learn(store, case, system=system) > 0
    path = tmp_path / "my.maps"
    with loaded(store, system=system, maps=path) as model:
        assert of_reuse(model)["says"] == f"began with nothing learned: {path} is of what it predicts by"


@pytest.mark.parametrize("system", ["expertly", "expertly:prediction=fmoe:distance=1"])
def test_several_devices_keep_nothing(system: str, own: tuple[Case, Path]) -> None:
    case, store = own
    learn(store, case)
    before = store.with_name("store.reuse").read_bytes()
    with loaded(store, system=system, maps="auto", devices="cpu:0,cpu:1", memory="40%") as model:
        assert generate(model, case.prompts) == case.tokens
        assert of_reuse(model)["says"] == "began with nothing learned: 2 devices learn apart"
    assert store.with_name("store.reuse").read_bytes() == before


@pytest.mark.parametrize("system", ["expertly", "expertly:prediction=fmoe:distance=1"])
def test_what_is_to_be_replayed_begins_with_nothing_learned(
    system: str, own: tuple[Case, Path], tmp_path: Path
) -> None:
    case, store = own
    learn(store, case)
    before, journal = store.with_name("store.reuse").read_bytes(), tmp_path / "decisions.jsonl"
    with loaded(store, system=system, maps="auto", decisions=journal) as model:
        assert generate(model, case.prompts) == case.tokens
        facts = of_reuse(model)
        assert facts["tokens_read"] == 0 and "a replay begins with nothing learned" in facts["says"]
        assert facts["tokens"] == NUM_TOKENS
    summary, result = replay_file(journal)
    assert result.difference is None, summary
    assert store.with_name("store.reuse").read_bytes() == before


def test_a_folder_that_is_not_writable(own: tuple[Case, Path], tmp_path: Path) -> None:
    """Named: an error before anything runs. Else what is there is taken up, and a warning says that it stays so."""
    case, store = own
    with tiny_disk(tmp_path, nbytes=64 << 20) as disk:
        there = Path(shutil.copytree(store, disk / "store"))
        learn(there, case)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ConfigError, match=r"my\.reuse.*its folder is not writable"):
            expertly.load(str(there), system="expertly", maps=disk / "my.reuse", device="cpu")
        with pytest.warns(UserWarning, match=r"was not saved|not saved: .*writing store\.reuse failed"):
            assert learn(there, case) == NUM_TOKENS
        assert read_learned(disk / "store.reuse", ReuseModel).learned.num_tokens == NUM_TOKENS


def test_a_cached_store_and_what_was_learned(cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert learn(case.folder, case) == 0
        assert learn(case.folder, case) == NUM_TOKENS
    (entry,) = list_entries()
    assert sorted(os.listdir(tmp_path / "stores")) == [entry.name, f"{entry.name}.reuse"]
    remove_entry(entry.name)
    assert not os.listdir(tmp_path / "stores"), "it goes with it"


TEXTS = (
    "The old man looked at the sea and said that he would go out again in the morning, with the boy, as before.",
    "Question: what is 12 + 30? Answer: 42. The function returns a list of all the files in the folder, sorted.",
    "Once upon a time there was a small village at the foot of a mountain.",
    "def fibonacci(n):",
)


def test_the_demo_model_loads_less_when_it_begins_with_what_it_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of it: the same tokens from fewer bytes, what people are told, and what is in the file."""
    path = tmp_path / "my.reuse"

    def run(texts: Sequence[str], num_new: int, maps: Path | str) -> tuple[list[list[list[int]]], dict[str, Any]]:
        model, tokenizer = expertly.load(system="expertly", memory="25%", maps=maps, device="cpu")
        try:
            told = [generate(model, [tokenizer(text)["input_ids"]], num_new) for text in texts]
            return told, expertly.stats(model).as_dict()
        finally:
            expertly.unload(model)

    run(TEXTS, 40, path)
    num_learned = read_learned(path, ReuseModel).learned.num_tokens
    cold_tokens, cold = run(TEXTS, 20, "off")
    warm_tokens, warm = run(TEXTS, 20, path)
    assert warm_tokens == cold_tokens
    assert (cold["reuse"]["history"], warm["reuse"]["history"]) == ("cold", "warm")
    assert warm["reuse"]["tokens_read"] == num_learned > 200
    before, after = (one["phases"]["decode"] for one in (cold, warm))
    assert after["bytes_loaded"] < 0.9 * before["bytes_loaded"]
    assert after["hit_rate"] > before["hit_rate"]
    assert main(["maps", "info", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == warm["reuse"]["tokens"] and facts["num_layers"] == len(warm["layers"])

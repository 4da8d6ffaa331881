"""`expertly pack`: packs, lists, verifies and removes stores."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from expertly.cli.main import main
from tests.cli.asking import Captured, answer, refusal, told
from tests.commands import RunningCommand


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_packs_lists_verifies_and_removes(capsys: Captured, model: Path, cache: Path) -> None:
    packed = answer(capsys, "pack", model)
    facts = {"model_type": "qwen3_moe", "dtype": "float32", "layers": 3, "experts": 24}
    assert packed.items() >= facts.items() and packed["expert_bytes"] == 24 * 16 * 3 * 32 * 4
    store = Path(packed["store"])
    assert store.parent == cache / "stores"
    (listed,) = answer(capsys, "pack", "--list")["stores"]
    assert (listed["name"], listed["source"], listed["problem"]) == (store.name, str(model), None)
    assert "float32" in told(capsys, "pack", "--list")
    for named in (str(store), store.name):  # as --list names it
        assert answer(capsys, "pack", "--verify", named)["verified"] is True
    assert answer(capsys, "pack", "--remove", store.name)["removed"]["name"] == store.name
    assert answer(capsys, "pack", "--list")["stores"] == [] and not store.exists()


def test_says_the_same_to_people_and_refuses_a_damaged_store(capsys: Captured, model: Path, tmp_path: Path) -> None:
    assert main(["pack", str(model), "--out", str(tmp_path / "store")]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'store'}\n"  # for scripts
    assert "qwen3_moe, 24 experts in 3 layers, 144 KiB in float32" in captured.err
    for words, said in ((["--verify", str(tmp_path / "store")], "is whole"), (["--list"], "no store in")):
        assert main(["pack", *words]) == 0
        assert said in capsys.readouterr().err
    path = tmp_path / "store" / "experts-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "experts-00001.safetensors: checksum" in refusal(capsys, "pack", "--verify", tmp_path / "store")
    path.write_bytes(content[:-1])
    assert "truncated" in refusal(capsys, "pack", model, "--out", tmp_path / "store")


def test_an_interrupted_process_leaves_nothing_half_written(
    capsys: Captured, model: Path, cache: Path, start: Callable[..., RunningCommand]
) -> None:
    """Wherever the interrupt lands, the next run ends well."""
    running = start("pack", model)
    running.wait_until(lambda: bool(list(cache.glob("stores/*"))))
    running.send_signal(signal.SIGINT)
    assert running.exit_code(120) in (0, 130) and "Traceback" not in running.err
    assert main(["pack", str(model)]) == 0
    store = capsys.readouterr().out.strip()
    assert main(["pack", "--verify", store]) == 0
    assert [path.name for path in (cache / "stores").iterdir()] == [Path(store).name]

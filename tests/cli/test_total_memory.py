"""--total-memory: whatever loads a model gives its experts what `expertly.load` gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly import api
from expertly.cli.commands import REFUSED
from expertly.engine import memory as engine_memory
from expertly.hardware import machine
from expertly.lab import forecast
from expertly.lab.compare.comparison import Comparison, share_out
from expertly.lab.compare.settings import ComparisonSettings
from expertly.sim.hardware import Hardware
from tests.cli.asking import Captured, answer, refusal
from tests.command_lines import command_of, flags_of
from tests.families import make_checkpoint
from tests.hardware.test_profile import PROFILE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tune` finds of it is of no use to others."""
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny", seed=17, tokenizer=True)


@pytest.fixture
def total(model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that leave room for a good half of the experts; the process takes the same at all times."""
    for module in (engine_memory, forecast):
        monkeypatch.setattr(module, "rss_nbytes", lambda: 100 << 20)
    loaded, _ = expertly.load(str(model), memory="60%", device="cpu")
    beside = api.handle(loaded).division.beside
    experts = expertly.stats(loaded).as_dict()["expert_bytes"]
    expertly.unload(loaded)
    return int((100 << 20) + beside.dense_nbytes + beside.fixed_nbytes + beside.of_tokens(0, 4096) + 0.6 * experts)


@pytest.fixture
def left(model: Path, total: int) -> int:
    loaded, _ = expertly.load(str(model), total_memory=total, system="lru", device="cpu")
    nbytes = api.handle(loaded).engine.scheduler.budget.memory_nbytes
    expertly.unload(loaded)
    return nbytes


def test_configure(model: Path, total: int, left: int, capsys: Captured) -> None:
    words = ("--total-memory", total, "--tokens", 8, "--seconds", 0, "--device", "cpu")
    found = answer(capsys, "lab", "configure", model, *words)
    (result,) = found["results"]
    assert result["memory"] == str(left) and 0 < result["memory_bytes"] <= left
    assert found["times"] == f"measured here, on cpu, with total memory {total}"
    assert f"--memory {left} " in result["command"], "a run with the plan takes no other memory"


def test_tune(model: Path, total: int, left: int, tmp_path: Path, capsys: Captured) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n{"prompt": "2 + 2 ="}\n')
    words = ("--prompts", prompts, "--time-limit", "2s", "--max-new-tokens", 4, "--codec", "none", "--device", "cpu")
    found = answer(capsys, "tune", model, "--total-memory", total, *words)
    assert found["memory_bytes"] == left and f"total memory {total}" in found["memory_reason"]


def test_doctor(model: Path, total: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "examine", lambda *_: (replace(PROFILE, devices=()), []))
    monkeypatch.setattr(forecast, "measured_hardware", lambda *_: Hardware.read("laptop-nvme"))
    found = answer(capsys, "doctor", model, "--total-memory", total, "--out", tmp_path / "machine.json")
    assert found["memory_nbytes"] == total
    assert found["fitting_share"] == pytest.approx(0.6, abs=0.02)
    assert found["command"] == f"expertly run {model} --total-memory {total}"


@pytest.mark.parametrize("name", ["simulate", "reproduce"])
def test_a_trace_has_nothing_but_experts(name: str, capsys: Captured) -> None:
    for words in (("--total-memory", "8GiB"), ("--total-memory=8GiB",)):
        said = refusal(capsys, "lab", name, "TRACE", *words)
        assert said.startswith("--total-memory: a trace knows only experts") and "accepted: --memory" in said


def test_every_command_that_takes_memory_takes_all_of_it_or_says_why_not() -> None:
    def leaves(command: Any, path: str) -> Iterator[tuple[str, set[str]]]:
        for name, below in getattr(command, "commands", {}).items():
            yield from leaves(below, f"{path} {name}".strip())
        yield path, flags_of(command)

    found = {path: flags for path, flags in leaves(command_of([])[0], "") if "--memory" in flags}
    assert len(found) > 8
    refused = {path for path, flags in found.items() if "--total-memory" not in flags}
    assert {f"{path} --total-memory" for path in refused} <= REFUSED.keys()


def test_compare_and_bench() -> None:
    """Each total becomes what it leaves for experts: whole KiB, or all of them."""
    experts = 90 << 20

    class Worker:
        def ask(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
            assert method == "load" and arguments["memory"] == "auto"
            left = {"1GiB": 20_000_000, "1000MiB": 19_999_999, "8GiB": experts}[arguments["total_memory"]]
            return {"memory_bytes": left, "expert_bytes": experts}

    totals = ("1GiB", "1000MiB", "8GiB")
    comparison = Comparison(ComparisonSettings(("lru",), totals, total_memories=totals), "", {})
    worker: Any = Worker()
    assert share_out(comparison, worker, {"plan": None, "predictor": "auto"}).memories == ("19531KiB", "100%")
    assert comparison.notes[0] == "total memory 1GiB leaves 19531KiB for experts"

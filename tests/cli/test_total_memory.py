"""--total-memory: whatever loads a model gives its experts what `expertly.load` gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import expertly
from expertly import api
from expertly.engine import fitting
from expertly.engine import memory as engine_memory
from expertly.hardware import forecast, machine
from expertly.hardware.forecast import Speed
from tests.cli.asking import Captured, answer
from tests.command_lines import commands_of, flags_of
from tests.hardware.test_profile import PROFILE


@pytest.fixture
def total(model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that leave room for a good half of the experts; the process takes the same at all times."""
    for module in (engine_memory, fitting):
        monkeypatch.setattr(module, "rss_nbytes", lambda: 100 << 20)
    loaded, _ = expertly.load(str(model), memory="60%", device="cpu")
    beside = api.handle(loaded).division.beside
    experts = expertly.stats(loaded).as_dict()["expert_bytes"]
    expertly.unload(loaded)
    return int((100 << 20) + beside.dense_nbytes + beside.fixed_nbytes + beside.of_tokens(0, 4096) + 0.6 * experts)


def test_bench(model: Path, total: int, capsys: Captured) -> None:
    loaded, _ = expertly.load(str(model), total_memory=total, system="lru", device="cpu")
    left = api.handle(loaded).engine.scheduler.budget.memory_nbytes
    expertly.unload(loaded)
    words = ("--total-memory", total, "--requests", 1, "--tokens", 2, "--rounds", 1, "--device", "cpu", "--raw")
    result = answer(capsys, "bench", model, *words)
    assert {(row["memory"], row["memory_bytes"]) for row in result["rows"]} == {(str(total), left)}


def test_doctor(model: Path, total: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "examine", lambda *_: (replace(PROFILE, devices=()), []))
    monkeypatch.setattr(forecast, "measured_speed", lambda *_: Speed(3e10, 3e10, 0, 3e9, 0, None, None))
    result = answer(capsys, "doctor", model, "--total-memory", total, "--out", tmp_path / "machine.json")
    assert result["memory_nbytes"] == total
    assert result["fitting_share"] == pytest.approx(0.6, abs=0.02)
    assert result["command"] == f"expertly run {model} --total-memory {total}"


def test_every_command_that_takes_memory_that_loads_a_model_takes_all_of_it() -> None:
    result = {name: flags for name, command in commands_of() if "--memory" in (flags := flags_of(command))}
    assert {"run", "serve", "bench"} <= result.keys()
    of_experts = {"lab simulate", "lab reproduce", "lab compare"}  # which compare budgets of experts alone
    assert {name for name, flags in result.items() if "--total-memory" not in flags} <= of_experts

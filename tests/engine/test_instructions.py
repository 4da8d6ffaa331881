"""A processor that names instructions and traps them must not end a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertly.engine import process as instructions
from expertly.engine.process import VARIABLE, WITHOUT_AMX, keep_off_trapped_instructions


@pytest.fixture
def with_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n")
    return path


def trap() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def test_what_traps_is_switched_off(with_amx: Path) -> None:
    assert keep_off_trapped_instructions(with_amx, trap)
    assert os.environ.pop(VARIABLE) == WITHOUT_AMX


@pytest.mark.parametrize("multiply", [lambda: None, lambda: 1 / 0], ids=["works", "fails otherwise"])
def test_what_works_stays_on(with_amx: Path, multiply) -> None:
    assert not keep_off_trapped_instructions(with_amx, multiply)
    assert VARIABLE not in os.environ


def test_what_does_not_end_is_switched_off(with_amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "_PATIENCE_S", 0.2)
    assert keep_off_trapped_instructions(with_amx, lambda: time.sleep(60))
    assert os.environ.pop(VARIABLE) == WITHOUT_AMX


def test_the_users_choice_stands(with_amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "AVX2")
    assert not keep_off_trapped_instructions(with_amx, trap)
    assert os.environ[VARIABLE] == "AVX2"


def test_a_process_tries_once(with_amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[object] = []
    monkeypatch.setattr(instructions, "_survives", lambda multiply: children.append(multiply) is None)
    instructions._works_here.cache_clear()
    assert not any(keep_off_trapped_instructions(with_amx) for _ in range(3))
    assert len(children) == 1
    instructions._works_here.cache_clear()


@pytest.mark.parametrize("text", ["flags : fpu avx2\n", "", None])
def test_processors_without_it_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert not keep_off_trapped_instructions(path, trap)


def test_bfloat16_products_run_on_this_machine() -> None:
    code = (
        "from expertly.engine.process import keep_off_trapped_instructions as keep; keep()\n"
        "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16)\n"
        "print(torch.nn.functional.linear(a, a)[0, 0].item())"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() == "64.0", done.stderr

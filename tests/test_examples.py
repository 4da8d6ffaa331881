"""The scripts of examples/, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str, folder: Path) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_load_and_generate(tmp_path: Path) -> None:
    text, measure = run("load_and_generate.py", folder=tmp_path).rsplit("\n", 2)[:2]
    assert text.startswith("The old man looked at the sea and said")
    assert "% of the experts were in memory" in measure and not measure.startswith("0%")


@pytest.mark.slow
def test_openai_client(tmp_path: Path, start: Callable[..., Any]) -> None:
    running = start("serve", "--port", "0", "--json", "--memory", "25%", "--context", "128")
    running.wait_until(lambda: "\n" in running.out)
    told = json.loads(running.out.splitlines()[0])
    answer = run("openai_client.py", f"{told['url']}/v1", folder=tmp_path)
    assert answer.startswith("demo:\n") and len(answer.strip()) > len("demo:") + 20


@pytest.mark.slow
def test_own_policy(tmp_path: Path) -> None:
    lru, first, own, second = run("own_policy.py", folder=tmp_path).strip().split("\n")
    assert lru.startswith("lru: ") and own.startswith("lru:eviction=own_policy.LeastUsed: ")
    assert lru.split()[-2] != own.split()[-2]  # it decided otherwise,
    assert first == second  # and no token changed


def test_own_trace_and_what_is_simulated_of_it(tmp_path: Path) -> None:
    told = run("own_trace.py", str(tmp_path / "trace"), "Once upon a time", "The sea", folder=tmp_path)
    assert told.startswith("2 requests, ") and told.count("\nlayer ") == 12
    rates = run("simulate_and_plot.py", str(tmp_path / "trace"), str(tmp_path / "plot.png"), folder=tmp_path)
    assert [line.split(":")[0].strip() for line in rates.strip().split("\n")] == [
        "lru",
        "lfu",
        "belady-global",
        "oracle",
    ]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_several_devices(tmp_path: Path) -> None:
    *_, text, verdict = run("several_devices.py", folder=tmp_path).strip().split("\n")
    assert text.startswith("Once upon a time") and verdict == "the same on one device"

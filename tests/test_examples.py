"""The scripts of examples/, run as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import RunningCommand

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

Run = Callable[..., str]


@pytest.fixture
def run(start: Callable[..., RunningCommand], tmp_path: Path) -> Run:
    """Runs an example in an empty folder; what it prints."""

    def printed(name: str, *arguments: object) -> str:
        running = start(EXAMPLES / name, *arguments, folder=tmp_path)
        assert running.exit_code(200) == 0, running.err
        return running.out

    return printed


def test_load_and_generate(run: Run) -> None:
    text, measure = run("load_and_generate.py").rsplit("\n", 2)[:2]
    assert text.startswith("The old man looked at the sea and said")
    assert "% of the experts were in memory" in measure and not measure.startswith("0%")


def test_openai_client(start: Callable[..., RunningCommand], run: Run) -> None:
    running = start("serve", "--port", "0", "--json", "--memory", "25%", "--context", "128")
    running.wait_until(lambda: "\n" in running.out)
    message = json.loads(running.out.splitlines()[0])
    answer = run("openai_client.py", f"{message['url']}/v1")
    assert answer.startswith("demo:\n") and len(answer.strip()) > len("demo:") + 20


def test_own_policy(run: Run) -> None:
    lru, first, mine, second = run("own_policy.py").strip().split("\n")
    assert lru.startswith("lru: ") and mine.startswith("lru:eviction=own_policy.LeastUsed: ")
    assert lru.split()[-2] != mine.split()[-2]  # it decided otherwise,
    assert first == second  # and no token changed

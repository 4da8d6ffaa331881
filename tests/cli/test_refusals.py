"""What a command cannot do is said in one line that names it: exit code 2, nothing on stdout, no file left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.asking import Captured, assert_refused

ONE_MEMORY = "accepted: one of the two"

REFUSED = {
    "": [
        ("nonsense", "No such command 'nonsense'"),
        ("systems --nonsense", "No such option: --nonsense"),
        ("run demo x --top-p 2", "'2': must be above 0 and at most 1"),
    ],
    "run MODEL Hi": [
        ("--system nonsense", "system='nonsense': unknown; accepted: auto, on-demand, lru"),
        ("--device nonsense", "device='nonsense': unknown; accepted: cpu"),
        ("--dtype int3", "dtype='int3'"),
        ("--memory lots", "memory='lots': accepted are a share"),
        ("--memory 100", "the least that works is"),
        ("--memory 50% --system lru:segments=0", "segments=0: must be at least 1"),
        ("--max-new-tokens 0", "'--max-new-tokens': '0': must be a whole number from 1"),
        ("--verify fast", "accepted: sampled, always, never"),
        ("--device cuda:0,cuda:1", "accepted: cpu, cuda, cuda:N; the option workers shares the experts"),
        ("--devices cuda:0,cuda:1", "No such option: --devices"),
        ("--speculate medusa", "'--speculate': 'medusa': must be off or prompt-lookup"),
    ],
    "run MODEL": [("''", "prompt")],
    "pack": [
        ("", "nothing to pack; accepted: MODEL"),
        ("./absent", "no such folder"),
        ("someone/absent", "the hub cannot be reached"),
        ("--list x", "not accepted with --list"),
        ("--remove x --dtype float16", "not accepted with --remove"),
        ("--list --remove x", "--list and --remove: accepted: one"),
        ("--verify /absent", "no such folder"),
        ("--verify /", "not a packed store"),
        ("x --dtype NaN", "dtype='NaN'"),
    ],
    "doctor": [("--total-memory 1GiB", "only with a MODEL"), ("--dir nowhere", "dir='nowhere': not a folder")],
    "bench": [
        ("--system lru,", "system='lru,': must be one or more"),
        ("--memory lots", "memory='lots': accepted are"),
        ("--memory 1%", "below the staging slots"),
        ("--prompts nowhere", "prompts nowhere: cannot be read"),
        ("--memory 25% --total-memory 1GiB", "memory='25%' and total_memory='1GiB'"),
        ("--total-memory lots", "total_memory='lots'"),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [(command, *row) for command, rows in REFUSED.items() for row in rows],
    ids=[f"{command} {words}" for command, rows in REFUSED.items() for words, _ in rows],
)
def test_refused(
    command: str, words: str, said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, f"{command} {words}", said, tmp_path, MODEL=model)

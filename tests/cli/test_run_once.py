"""`expertly run` with a prompt, from the command line to the text, on a tiny random model without a chat template."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from expertly.cli import run
from expertly.cli.main import main
from tests.cli.asking import Captured, answer
from tests.commands import RunningCommand
from tests.families import make_tokenizer, reference_generate

PROMPT = "Once upon a time"
KEYS = {
    "text", "tokens", "ttft_s", "tpot_s", "hit_rate", "stall_s", "bytes_loaded", "expert_bytes", "memory_bytes",
    "peak_rss_bytes", "system", "segments",
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What the unmodified model writes."""
    tokenizer = make_tokenizer()
    tokens = reference_generate(model, [tokenizer(PROMPT)["input_ids"]], max_new_tokens=20)[0]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def words(model: Path, *arguments: str) -> tuple[str, ...]:
    return "run", str(model), PROMPT, "--raw", "--max-new-tokens", "20", *arguments


@pytest.mark.parametrize("system", ["lfu", "lru:segments=4", "on-demand"])
def test_json_is_one_object_with_the_same_text(model: Path, expected: str, system: str, capsys: Captured):
    result = answer(capsys, *words(model, "--memory", "50%", "--system", system))
    assert result.keys() >= KEYS
    assert result["text"] == expected
    assert result["tokens"] == 20
    assert 0 < result["memory_bytes"] <= result["expert_bytes"] / 2
    assert result["ttft_s"] > 0 and result["tpot_s"] > 0
    assert 0 <= result["hit_rate"] <= 1
    assert result["peak_rss_bytes"] > 50 << 20
    assert "layers" not in result


def test_sampling_repeats_with_the_seed(model: Path, expected: str, capsys: Captured):
    hot = ("--memory", "50%", "--temperature", "2", "--seed")
    texts = [answer(capsys, *words(model, *hot, seed))["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1]
    assert len({*texts, expected}) == 3


@pytest.mark.slow
def test_a_prompt_from_stdin(model: Path, expected: str, start: Callable[..., RunningCommand], tmp_path: Path):
    (tmp_path / "prompt").write_text(PROMPT)
    typed = ("run", model, "-", "--memory", "50%", "--max-new-tokens", "20", "--raw")
    running = start(*typed, stdin=tmp_path / "prompt")
    assert running.exit_code(60) == 0
    assert running.out == f"{expected}\n"
    line, budget = running.err.splitlines()  # progress and advice are for terminals
    assert "20 tokens" in line and "50.0% of" in budget


def test_what_a_pipe_or_a_file_brings_follows_the_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
):
    """Also what a pipe brings after a while."""
    monkeypatch.setattr(run, "PIPE_S", 0.1)
    reading, writing = os.pipe()
    (tmp_path / "notes").write_text("\nThe sea.\n")
    threading.Timer(0.5, lambda: (os.write(writing, b"The sea.\n"), os.close(writing))).start()
    for file, brought in (reading, "\n\nThe sea."), (tmp_path / "notes", "\n\nThe sea."), (os.devnull, ""):
        with open(file) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            prompt = answer(capsys, "run", model, "Summarise:", "--raw", "--max-new-tokens", "1")["prompt"]
        assert prompt == f"Summarise:{brought}"


@pytest.mark.slow
def test_text_comes_as_it_is_made_and_interrupting_ends_at_once_without_a_traceback(
    model: Path, start: Callable[..., RunningCommand]
):
    running = start("run", model, PROMPT, "--raw", "--memory", "50%", "--max-new-tokens", "480")
    running.wait_until(lambda: bool(running.out))
    running.send_signal(signal.SIGINT)
    assert running.exit_code(30) == 130
    assert "Traceback" not in running.err


def test_stats_adds_tables_by_layer_and_of_predictions(model: Path, expected: str, capsys: Captured):
    """Beside the answer, which is alone on stdout."""
    arguments = ("--system", "fmoe:distance=2", "--memory", "60%", "--stats")
    assert main([*words(model, *arguments)]) == 0
    text, out = capsys.readouterr()
    assert text == f"{expected}\n" and "tokens/s" in out
    lines = out.splitlines()
    (line,) = [line for line in lines if "of experts in memory" in line]
    for word in ("prefetch accuracy", "coverage", "system fmoe:distance=2"):
        assert word in line
    rows = [line.split()[:2] for line in lines if line.split()[1:2] == ["decode"]]
    assert rows == [["0", "decode"], ["1", "decode"], ["2", "decode"], ["all", "decode"]]
    (head,) = [line.split() for line in lines if line.startswith("phase ")]
    assert {"predicted", "prefetched", "coverage", "recall", "goodpred"} <= set(head)
    result = answer(capsys, *words(model, *arguments))
    assert result["text"] == expected
    assert [layer["layer"] for layer in result["layers"]] == [0, 1, 2]
    assert sum(layer["decode"]["misses"] for layer in result["layers"]) == result["phases"]["decode"]["misses"]
    assert result["prediction"]["predictor"]["maps"] > 0

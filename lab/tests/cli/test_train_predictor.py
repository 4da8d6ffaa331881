"""`expertly lab train`: what it makes, what it says, what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from expertly.cli.main import main
from expertly.policies.learned import read_learned
from expertly.policies.promoe import LearnedWeights
from lab.tests.planted import planted_trace
from tests.cli.asking import Captured, answer, refusal, told

QUICK = ("--distances", "2,1", "--hidden", "16", "--epochs", "30")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "trace"
    planted_trace(folder)
    return folder


@pytest.fixture(scope="module")
def trained(trace: Path) -> Path:
    out = trace.with_name("weights")
    assert main(["lab", "train", str(trace), "--out", str(out), *QUICK]) == 0
    return out


def test_it_says_what_it_made_and_how_good_that_is(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "weights"
    printed = told(capsys, "lab", "train", trace, "--out", out, *QUICK)
    head, learned, _, title, header, _, *rows = printed.splitlines()
    assert head.startswith("[planted | 5 networks of") and head.endswith(f"| {out}]")
    assert "split 7:3 with seed 0: learned from 960 tokens of 16 requests, stopped by 1 others;" in learned
    assert " on cpu" in learned
    assert "350 tokens of the 7 requests kept back" in title
    assert header.split()[:4] == ["layers", "ahead", "learned", "lookahead"]
    assert [row.split()[0] for row in rows] == ["1", "2"] and all(row.count("%") == 3 for row in rows)


def test_json_is_one_object_and_the_file_says_the_same(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    out, seed = tmp_path / "weights", 2**62 + 3
    result = answer(capsys, "lab", "train", trace, "--out", out, *QUICK, "--seed", seed)
    assert result["distances"] == [1, 2] and result["networks"] == 5 and result["identity"] == "trace:planted"
    assert (result["split"], result["seed"], result["hidden"], result["device"]) == ("7:3", seed, 16, "cpu")
    assert result["bytes"] == out.stat().st_size
    assert result["seconds"] > 0 and result["mean"]["1"]["learned"] > result["mean"]["1"]["token_id"] + 0.05
    about = read_learned(out, LearnedWeights).about
    assert about["mean"] == result["mean"] and about["split"] == "7:3" and about["seed"] == seed
    assert [[row["distance"], row["layer"]] for row in result["accuracy"]] == [
        [1, 1],
        [1, 2],
        [1, 3],
        [2, 1],
        [2, 2],
        [2, 3],
    ]
    assert "--json" not in about["source"] and about["source"].startswith("960 tokens of 16 requests")


def test_a_trace_that_is_not_full_names_field_and_command(tmp_path: Path, capsys: Captured) -> None:
    planted_trace(tmp_path / "trace", 3, 12, fields=("probs",))
    error = refusal(capsys, "lab", "train", tmp_path / "trace", "--out", tmp_path / "weights")
    assert "field 'router_inputs'" in error and "`expertly lab trace record --full` records it" in error
    assert not (tmp_path / "weights").exists()


def test_an_interrupt_leaves_no_file(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """In the twentieth step of training."""
    step, calls = torch.optim.AdamW.step, []

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupting)
    assert main(["lab", "train", str(trace), "--out", str(tmp_path / "weights"), "--seed", "1"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_simulate_takes_the_file_and_says_what_it_saw(trace: Path, trained: Path, capsys: Captured) -> None:
    learned, weights = "lru:prediction=learned:distance=1", ("--predictor", trained)
    common = ("lab", "simulate", trace, "--memory", "50%", "--system")
    rows = answer(capsys, *common, f"{learned},lru", "--split", "7:3")["results"]
    assert "--predictor FILE, which `expertly lab train` makes" in rows[0]["skipped"]
    assert rows[1]["skipped"] is None

    result = answer(capsys, *common, learned, "--split", "7:3", *weights)
    assert result["predictor"] == str(trained) and result["results"][0]["skipped"] is None
    expected = read_learned(trained, LearnedWeights).about["mean"]["1"]["learned"]
    assert result["results"][0]["prediction_accuracy"] == pytest.approx(expected, abs=0.05), "by demands, not layers"
    message = [note for note in result["notes"] if note.startswith("predictor:")]
    assert message == [f"predictor: planted, learned from 960 tokens of 16 requests of {trace}"]

    notes = answer(capsys, *common, learned, "--requests", 4, *weights)["notes"]
    assert any("some of the requests that are simulated" in note and "--split 7:3 --seed 0" in note for note in notes)
    assert "no system of lru takes trained weights" in refusal(capsys, *common, "lru", *weights)
    error = refusal(capsys, *common, f"{learned[:-1]}3", *weights)
    assert "distance=3: its weights are not of that; accepted with them: 1, 2" in error

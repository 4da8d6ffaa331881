"""What `expertly lab compare` has measured is there whatever happens next, and what happened is said plainly."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from expertly.core.errors import ConfigError
from expertly.lab.compare import comparison
from expertly.lab.compare.engine import Worker
from expertly.sim.study import Study
from tests.lab.compare.html import read
from tests.sim.drive import make_trace, random_passes, sized

LAYERS = sized(2, 8, 2)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests of a prompt of 4 tokens and 10 steps, sizes known."""
    passes = random_passes(0, LAYERS, 10, prompt=4, num_requests=2)
    return make_trace(tmp_path / "given", passes, LAYERS, num_requests=2, is_full=True).folder


def failing_at(patch: pytest.MonkeyPatch, memory: str, error: BaseException) -> None:
    """The simulator raises, once it comes to this budget."""
    simulate = Study.simulate

    def raising(self: Study, system: Any, budget: Any, label: str = "", *more: Any) -> Any:
        if label.startswith(memory):
            raise error
        return simulate(self, system, budget, label, *more)

    patch.setattr(Study, "simulate", raising)


def results_in(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def memories_of(results: dict[str, Any]) -> set[str]:
    return {row["memory"] for row in results["rows"]}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_process_that_dies_in_the_second_round(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had done by then is in the tables, it is not called the best, and nobody thinks that all went well. Were
    the whole comparison killed, the round that ended would be in its folder.
    """
    out, asked, ask = tmp_path / "out", [], Worker.ask

    def killing(self: Worker, method: str, *arguments: Any) -> Any:
        if (self.name, method) == ("lfu", "play"):
            asked.append(method)
            if len(asked) == 4:  # the second request of the second round
                kept = results_in(out)
                assert kept["is_interrupted"] and kept["rows"][0]["engine"]["num_played"] >= 2
                assert "was interrupted" in read((out / "report.html").read_text()).text
                self._process.kill()
        return ask(self, method, *arguments)

    monkeypatch.setattr(Worker, "ask", killing)
    arguments = ["--system", "lru,lfu", "--memory", "50%", "--requests", "2", "--tokens", "4", "--rounds", "2"]
    assert main(["lab", "compare", str(model), *arguments, "--out", str(out)]) == 2
    printed, said = capsys.readouterr()
    results = results_in(out)
    (failure,) = results["failures"]
    assert (failure["where"], failure["memory"], failure["system"]) == ("engine", "50%", "lfu")
    assert "its process ended (SIGKILL" in failure["cause"] and failure["measured"] == 3
    rows = {row["system"]: row for row in results["rows"]}
    assert rows["lfu"]["has_failed"] and rows["lfu"]["engine"]["num_played"] == 3
    assert not rows["lru"]["has_failed"] and rows["lru"]["engine"]["num_played"] == 4
    assert rows["lfu"]["simulated"] is not None, "what does not need the process is done"
    (sentence,) = results["headline"]
    assert "lru is fastest on the engine" in sentence and "lfu did not come through." in sentence
    for text in (read((out / "report.html").read_text()).text, printed):
        assert "its process ended (SIGKILL" in text and "3 of 4 requests were measured" in text
    assert said.splitlines()[-1].startswith("expertly: error: did not come through: lfu (engine, 50%)")


def test_an_interrupt_leaves_the_budgets_that_were_simulated(
    trace: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(monkeypatch, "70%", KeyboardInterrupt())
    out = tmp_path / "out"
    assert main(["lab", "compare", str(trace), "--system", "lru,lfu", "--memory", "40%,70%", "--out", str(out)]) == 130
    printed, said = capsys.readouterr()
    results = results_in(out)
    assert results["is_interrupted"] and memories_of(results) == {"40%"} and len(results["headline"]) == 1
    assert results["headline"][0] in printed and "what was done by then is in the report" in said


@pytest.mark.parametrize("error", [ConfigError("torn: in two"), ValueError("a bug")])
def test_an_error_leaves_the_budgets_that_were_simulated(
    trace: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Of a user's making, it is one more thing that failed; a bug, of ours or of a system that was installed, is raised
    as it is, and what was done is written all the same.
    """
    failing_at(monkeypatch, "70%", error)
    out = tmp_path / "out"
    command = ["lab", "compare", str(trace), "--system", "lru,lfu", "--memory", "40%,70%", "--out", str(out)]
    if isinstance(error, ConfigError):
        assert main(command) == 2
    else:
        with pytest.raises(ValueError, match="a bug"):
            main(command)
    said = capsys.readouterr().err
    results = results_in(out)
    assert memories_of(results) == {"40%"} and str(out / "report.html") in said
    page = read((out / "report.html").read_text()).text
    if isinstance(error, ConfigError):
        assert [(one["memory"], one["system"]) for one in results["failures"]] == [("70%", "lru"), ("70%", "lfu")]
        assert "lfu (simulator, 70%): torn: in two" in page
    else:
        assert results["is_interrupted"] and "ended early: ValueError: a bug" in page


def test_what_ends_a_comparison_is_in_its_report(
    trace: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no system's."""
    simulate = comparison.simulate

    def failing(*arguments: Any) -> None:
        simulate(*arguments)
        raise ConfigError("torn: behind the last one")

    monkeypatch.setattr(comparison, "simulate", failing)
    out = tmp_path / "out"
    command = ["lab", "compare", str(trace), "--system", "lru", "--memory", "40%", "--out", str(out), "--json"]
    assert main(command) == 2
    printed, said = capsys.readouterr()
    results = json.loads(printed)
    assert results == results_in(out) and memories_of(results) == {"40%"}
    assert results["problem"] == "torn: behind the last one"
    assert said.splitlines()[-1] == "expertly: error: torn: behind the last one"
    assert "ended early: torn: behind the last one" in read((out / "report.html").read_text()).text


def test_what_cannot_be_written_is_printed(
    trace: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = comparison.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.name == "results.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(comparison, "write_atomic", full)
    out = tmp_path / "out"
    assert main(["lab", "compare", str(trace), "--system", "lru", "--memory", "40%", "--out", str(out)]) == 2
    printed, said = capsys.readouterr()
    assert "lru is fastest in the simulator" in printed and "belady-global" in printed
    assert "the disk is full" in said.splitlines()[-1] and "report written" not in said


def test_where_nothing_was_done_there_is_no_report(trace: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert main(["lab", "compare", str(trace), "--system", "lru", "--memory", "1%", "--out", str(out)]) == 2
    assert "memory='1%': below the staging slots" in capsys.readouterr().err
    assert not (out / "results.json").exists()

"""`expertly lab compare` with a model: engine and simulator side by side, and a report that says what the results
say.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertly.bench import Bench, BenchBudget
from expertly.cli.main import main
from expertly.core.errors import ConfigError
from expertly.core.units import format_nbytes, format_ratio, format_seconds, format_share
from expertly_lab.compare import comparison
from expertly_lab.trace.reader import Trace
from lab.tests.compare.html import Found, read
from tests.serve.browser import browser, find_browser

BOUNDS = ["belady", "belady-global", "oracle", "resident"]
SYSTEMS = ["lru", "moepic"]
MEMORIES = ["25%", "60%"]
ARGUMENTS = ["--system", ",".join(SYSTEMS), "--memory", ",".join(MEMORIES)]
ARGUMENTS += ["--requests", "2", "--tokens", "4", "--rounds", "1", "--hardware", "laptop-nvme"]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Done:
    """A comparison of two systems on the demo model."""

    out: Path
    printed: str
    results: dict[str, Any]
    page: Found

    def row(self, memory: str, system: str) -> dict[str, Any]:
        return next(row for row in self.results["rows"] if (row["memory"], row["system"]) == (memory, system))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out, printed = tmp_path_factory.mktemp("compare") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["expertly", "lab", "compare", *ARGUMENTS])
        assert main(["lab", "compare", *ARGUMENTS, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    return Done(out, printed.getvalue(), results, read((out / "report.html").read_text()))


def test_everything_is_in_the_folder(done: Done) -> None:
    assert {path.name for path in done.out.iterdir()} == {"report.html", "results.json", "command.txt", "trace"}
    command = (done.out / "command.txt").read_text()
    assert "compare --system lru,moepic --memory" in command and command.strip() == done.results["command"]
    trace = Trace.open(done.out / "trace")
    assert trace.is_complete and trace.has("lookahead") and len(trace.requests) == 2
    assert done.results["source"]["tokens"] == trace.num_rows


def test_engine_and_simulator_ran_the_same_requests(done: Done) -> None:
    assert done.results["failures"] == []
    ran = {(result["memory"], result["system"]) for result in done.results["engine"]}
    assert ran == {(memory, system) for memory in MEMORIES for system in SYSTEMS}
    for memory in MEMORIES:
        lru = done.row(memory, "lru")
        assert lru["engine"]["hit_rate"] == lru["simulated"]["hit_rate"], "LRU decides the same whatever the times"
        assert lru["engine"]["bytes_loaded"] == lru["simulated"]["bytes_loaded"]
        assert done.row(memory, "moepic")["simulated"]["coverage"] > 0, "it loaded ahead"


def test_tables_show_what_the_results_say(done: Done) -> None:
    for memory, table in zip(MEMORIES, done.page.tables, strict=False):
        assert table[1][:6] == ["system", "TPOT", "to lru", "hit rate", "TTFT", "loaded"]
        lines = {line[0].partition(" (P = ")[0]: line for line in table[2:]}
        assert lines.keys() == {*SYSTEMS, *BOUNDS}
        for name, line in lines.items():
            engine, simulated = (done.row(memory, name)[place] for place in ("engine", "simulated"))
            assert line[6] == format_seconds(simulated["tpot_s"]) and line[8] == format_share(simulated["hit_rate"])
            if engine is None:
                assert set(line[1:6]) == {"-"} and line[11] == "-"
            else:
                assert line[5] == format_nbytes(engine["bytes_loaded"])
                assert line[11] == format_ratio(simulated["tpot_s"] / engine["tpot_s"])
                assert format_seconds(engine["tpot_s"]) in done.printed


def test_pictures_are_of_engine_and_simulator(done: Done) -> None:
    names = ("hit rate (%)", "TPOT, time a token (ms)", "TTFT (ms)", "loaded a token (MiB)")
    assert done.page.pictures == [f"{name}: engine, measured and simulator" for name in names]


def test_the_headline_is_in_the_report_and_on_the_terminal(done: Done) -> None:
    assert len(done.results["headline"]) == 2
    for sentence in done.results["headline"]:
        assert sentence in done.page.text and sentence in done.printed
        assert "oracle" in sentence and "belady-global" in sentence


def test_the_report_needs_nothing_else(done: Done) -> None:
    assert all(link.startswith("data:") for link in done.page.links), "no icon is asked for either"
    assert "script" not in done.page.names
    source = (done.out / "report.html").read_text()
    assert re.findall(r"https?:|//[a-z]|@import|url\(", source) == []


def compare(model: Path, out: Path, memory: str = "50%,70%") -> int:
    words = ["--system", "lru,lfu", "--memory", memory, "--requests", "2", "--tokens", "4", "--rounds", "1"]
    return main(["lab", "compare", str(model), *words, "--hardware", "rtx3090", "--out", str(out)])


def test_a_system_that_fails_on_the_engine(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not called the best, and nobody thinks that all went well; what does not need the engine is done."""
    out, turn = tmp_path / "out", Bench._turn

    def failing(self: Bench, name: str, *arguments: Any) -> Any:
        if name == "lfu":
            raise ConfigError("torn: in two")
        return turn(self, name, *arguments)

    monkeypatch.setattr(Bench, "_turn", failing)
    assert compare(model, out, "50%") == 2
    printed, said = capsys.readouterr()
    results = json.loads((out / "results.json").read_text())
    (failure,) = results["failures"]
    assert (failure["where"], failure["memory"], failure["system"]) == ("engine", "50%", "lfu")
    rows = {row["system"]: row for row in results["rows"]}
    assert rows["lfu"]["has_failed"] and rows["lfu"]["simulated"] is not None and not rows["lru"]["has_failed"]
    (sentence,) = results["headline"]
    assert "lru is fastest on the engine" in sentence and "lfu did not come through." in sentence
    for text in (read((out / "report.html").read_text()).text, printed):
        assert "torn: in two" in text
    assert said.splitlines()[-1].startswith("expertly: error: did not come through: lfu (engine, 50%)")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "was interrupted"),
        (SystemError("a bug"), None, "ended early: SystemError: a bug"),
        (ConfigError("torn: in two"), 2, "ended early: torn: in two"),
    ],
)
def test_what_ends_early_leaves_the_budgets_that_were_run(
    error: BaseException,
    code: int | None,
    says: str,
    model: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug, of ours or of a system that was installed, is raised as it is; what was done is written all the same."""
    run = Bench.run

    def raising(self: Bench, budget: BenchBudget, *more: Any) -> Any:
        if budget.memory == "70%":
            raise error
        return run(self, budget, *more)

    monkeypatch.setattr(Bench, "run", raising)
    out = tmp_path / "out"
    with contextlib.nullcontext() if code else pytest.raises(SystemError, match="a bug"):
        assert compare(model, out) == code
    printed, said = capsys.readouterr()
    results = json.loads((out / "results.json").read_text())
    assert {row["memory"] for row in results["rows"]} == {"50%"} and str(out) in said
    assert says in read((out / "report.html").read_text()).text and results["is_interrupted"]
    if code == 130:
        (sentence,) = results["headline"]
        assert sentence in printed and "what was done by then is in the report" in said


def test_what_cannot_be_written_is_printed(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = comparison.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.name == "results.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(comparison, "write_atomic", full)
    assert compare(model, tmp_path / "out", "50%") == 2
    printed, said = capsys.readouterr()
    assert "on the engine" in printed and "belady-global" in printed
    assert "the disk is full" in said.splitlines()[-1] and "report written" not in said


@pytest.mark.skipif(find_browser() is None, reason="no chromium on this machine")
def test_the_report_opens_offline_on_a_phone(done: Done) -> None:
    path = find_browser()
    assert path is not None
    with browser(path) as tab:
        for width in (390, 1280):
            tab.open((done.out / "report.html").as_uri(), width=width)
            assert tab.run("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
            assert tab.run("[...document.images].filter(one => one.naturalWidth > 0).length") == len(done.page.pictures)
        assert tab.problems == []
        assert {url.partition(":")[0] for url in tab.asked} <= {"file", "data"}

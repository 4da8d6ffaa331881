"""`expertly lab compare` with a trace, what is printed, and what is left where something fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.compare_output import summary
from expertly.cli.main import main
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry
from expertly.lab.compare import comparison
from expertly.lab.compare.engine import Worker
from expertly.lab.compare.settings import USUAL_SYSTEMS
from expertly.policies.allocation.moepic import LayerSplit, SplitPlan, save_plan
from expertly.scheduler.presets import BOUNDS
from expertly.sim.study import Study
from tests.cli.asking import Captured, answer, told
from tests.lab.compare.html import read
from tests.sim.drive import make_trace, random_passes, sized

LAYERS = sized(2, 8, 2)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four requests of a prompt of 4 tokens and 10 steps, sizes known."""
    passes = random_passes(0, LAYERS, 10, prompt=4, num_requests=4)
    return make_trace(tmp_path / "given", passes, LAYERS, num_requests=4, is_full=True).folder


def compare(capsys: Captured, *words: object, code: int = 0) -> dict[str, Any]:
    return answer(capsys, "lab", "compare", *words, code=code)


def test_systems_beside_the_bounds(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    found = compare(capsys, trace, "--system", "lru,lfu,adapmoe", "--memory", "40%,70%", "--out", out)
    assert found == json.loads((out / "results.json").read_text())
    assert found["hardware_from"] == "profile rtx3090" and found["engine"] is None
    assert [(row["memory"], row["system"]) for row in found["rows"]] == [
        (memory, system) for memory in ("40%", "70%") for system in ("lru", "lfu", "adapmoe", *BOUNDS)
    ]
    for memory in ("40%", "70%"):
        loaded = {row["system"]: row["simulated"]["bytes_loaded"] for row in found["rows"] if row["memory"] == memory}
        assert loaded.pop("resident") == 0
        assert min(loaded.values()) == loaded["belady-global"] < loaded["lru"]
    for row in found["rows"]:
        assert row["engine"] is None and len(row["simulated"]["latencies_s"]) == 4
    assert {one["system"] for one in found["timelines"]} == {"lru", "lfu", "adapmoe", "oracle"}
    page = read((out / "report.html").read_text())
    assert page.tables[0][0][1:] == ["simulator"] and "Loading ahead" in page.headings
    assert not (out / "trace").exists(), "the trace is where it was"


def test_rates_alone_where_sizes_are_unknown(bare: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    printed = told(capsys, "lab", "compare", str(bare), "--system", "lru,lfu", "--memory", "40%", "--out", str(out))
    assert "has the most hits" in printed and "rates only" in printed
    found = json.loads((out / "results.json").read_text())
    assert all(row["simulated"]["tpot_s"] is None for row in found["rows"]) and found["timelines"] == []
    page = read((out / "report.html").read_text())
    assert "hit rate, simulator" in page.tooltips and "One token in time" not in page.headings


def test_a_system_that_the_trace_cannot_serve_is_named(bare: Path, tmp_path: Path, capsys: Captured) -> None:
    found = compare(capsys, bare, "--system", "lru,adapmoe", "--memory", "40%", "--out", tmp_path / "out")
    (failure,) = found["failures"]
    assert failure["system"] == "adapmoe" and "needs lookahead, which this trace lacks" in failure["cause"]
    assert failure["is_skipped"], "it is no fault of the comparison: the exit code is 0"
    assert "lru" in {row["system"] for row in found["rows"]}
    compare(capsys, bare, "--system", "adapmoe", "--memory", "40%", "--out", tmp_path / "alone", code=2)


def test_a_system_that_cannot_be_simulated_so_is_named(trace: Path, tmp_path: Path, capsys: Captured) -> None:
    """A plan of other experts stops moepic alone."""
    plan = SplitPlan(Geometry(sized(3, 8, 2), 4), (LayerSplit(1, 4, 4),) * 3)
    save_plan(tmp_path / "plan.json", plan, {})
    arguments = ("--system", "lru,moepic,lfu", "--plan", tmp_path / "plan.json", "--memory", "60%")
    found = compare(capsys, trace, *arguments, "--out", tmp_path / "out", code=2)
    assert [row["system"] for row in found["rows"]] == ["lru", "lfu", *BOUNDS]
    (failure,) = found["failures"]
    assert failure["system"] == "moepic" and "plan" in failure["cause"]


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


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "was interrupted"),
        (ConfigError("torn: in two"), 2, "lfu (simulator, 70%): torn: in two"),
        (ValueError("a bug"), None, "ended early: ValueError: a bug"),
    ],
)
def test_what_ends_early_leaves_the_budgets_that_were_simulated(
    error: BaseException,
    code: int | None,
    says: str,
    trace: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of a user's making is one more thing that failed; a bug, of ours or of a system that was installed, is
    raised as it is, and what was done is written all the same.
    """
    failing_at(monkeypatch, "70%", error)
    out = tmp_path / "out"
    command = ["lab", "compare", str(trace), "--system", "lru,lfu", "--memory", "40%,70%", "--out", str(out)]
    with contextlib.nullcontext() if code else pytest.raises(ValueError, match="a bug"):
        assert main(command) == code
    printed, said = capsys.readouterr()
    results = results_in(out)
    assert memories_of(results) == {"40%"} and str(out / "report.html") in said
    assert says in read((out / "report.html").read_text()).text
    assert results["is_interrupted"] == (code != 2)
    if code == 2:
        assert [(one["memory"], one["system"]) for one in results["failures"]] == [("70%", "lru"), ("70%", "lfu")]
    if code == 130:
        (sentence,) = results["headline"]
        assert sentence in printed and "what was done by then is in the report" in said


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


USUAL = USUAL_SYSTEMS.split(",")


def figures(number: int, has_spread: bool) -> dict[str, Any]:
    """Each another value, as wide as they come."""

    def value(scale: float) -> Any:
        middle = scale * (1 + number / 100)
        return {"median": middle, "q1": middle, "q3": middle} if has_spread else middle

    rates = {"hit_rate": 0.5 + number / 100, "stall_s": 0.1 + number / 1000, "bytes_loaded": (100.0 + number) * 2**20}
    return rates | {"ttft_s": value(0.7), "tpot_s": value(0.3), "tpot_to_baseline": value(10.0)}


def made_results(systems: list[str], has_engine: bool = True) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for memory in ("10%", "25%", "1.25GiB"):
        for name in (*systems, *BOUNDS):
            is_bound = name in BOUNDS
            engine = figures(len(rows), True) if has_engine and not is_bound else None
            row = {"memory": memory, "system": name, "is_bound": is_bound, "has_failed": name == "lfu"}
            rows.append(row | {"engine": engine, "simulated": figures(50 + len(rows), False)})
    source = {"name": "demo", "layers": 12, "experts": 32, "top_k": 4, "expert_bytes": 1 << 25}
    return {
        "rows": rows,
        "source": source | {"requests": 5, "tokens": 420},
        "settings": {"rounds": 2, "baseline": "lru"},
        "engine": {} if has_engine else None,
        "hardware_from": "this machine, as measured beside the engine's runs (25% of the experts)",
        "headline": ["With 25% of the experts (9.00 MiB): " + "one thing is to be said of this, too. " * 5],
        "failures": [{"where": "engine", "memory": "25%", "system": "lfu", "cause": "torn " * 30, "measured": 3}],
        "notes": ["caches start empty, and nothing has been learned"],
    }


def words_of(text: str) -> set[str]:
    """Numbers and names, whatever stands around them."""
    return set(text.replace(",", " ").split())


@pytest.mark.parametrize("has_engine", [True, False])
@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal_and_no_number_is_lost(width: int, has_engine: bool) -> None:
    results = made_results(USUAL, has_engine)
    printed, whole = summary(results, width), summary(results, 1000)
    assert max(map(len, printed.splitlines())) <= width
    parts = {word for word in words_of(whole) - words_of(printed) if not set(word) <= {"-", "─"}}
    assert parts <= set(USUAL) | set(BOUNDS) | {"failed"}, "names take several lines where there is no room"


def test_without_a_terminal_tables_are_narrow_and_sentences_whole() -> None:
    """As they are searched, and put into mails."""
    results = made_results(USUAL)
    printed = summary(results, None)
    table = [line for line in printed.splitlines() if line.endswith("MiB") or "----" in line]
    assert len(table) > 30 and max(map(len, table)) <= 80
    assert results["headline"][0] in printed.splitlines() and "-" * 90 not in printed


def test_long_names_take_several_lines() -> None:
    name = "lcp:segments=4:prediction=lookahead:distance=2"
    results = made_results(["lru", name])
    results["settings"]["baseline"] = name
    lines = summary(results, 80).splitlines()
    assert max(map(len, lines)) <= 80 and name in "".join(line[8:24].strip() for line in lines)
    assert sum("to baseline" in line for line in lines) >= 3, "two heads, explained once"


def test_what_failed_is_marked_and_explained() -> None:
    printed = summary(made_results(["lru", "lfu"]), 200)
    assert "lfu, failed" in printed and "3 of 10 requests were measured before" in " ".join(printed.split())

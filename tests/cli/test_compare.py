"""`expertly lab compare` with a model: engine and simulator side by side, and a report that says what the results
say.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.main import main
from expertly.core.units import format_nbytes, format_range, format_ratio, format_seconds, format_share
from expertly.trace.reader import Trace
from tests.lab.compare.html import Found, read
from tests.serve.browser import browser, find_browser

BOUNDS = ["belady", "belady-global", "oracle", "resident"]
SYSTEMS = ["lru", "moepic"]
MEMORIES = ["25%", "60%"]
ARGUMENTS = ["--system", ",".join(SYSTEMS), "--memory", ",".join(MEMORIES)]
ARGUMENTS += ["--requests", "2", "--tokens", "4", "--rounds", "2"]

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
def done(tmp_path_factory: pytest.TempPathFactory, forked: None) -> Done:
    out, printed = tmp_path_factory.mktemp("compare") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.delenv("COLUMNS", raising=False)  # sentences stay whole
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
    assert done.results["failures"] == [] and done.results["engine"]["together"] == dict.fromkeys(MEMORIES, True)
    ran = {(one["memory"], one["system"]): one["rounds"] for one in done.results["engine"]["runs"]}
    assert ran.keys() == {(memory, system) for memory in MEMORIES for system in SYSTEMS}
    for rounds in ran.values():
        assert [[one["request"] for one in requests] for requests in rounds] == [[0, 1], [0, 1]]
    for memory in MEMORIES:
        lru = done.row(memory, "lru")
        assert lru["engine"]["hit_rate"] == lru["simulated"]["hit_rate"], "LRU decides the same whatever the times"
        assert lru["engine"]["bytes_loaded"] == lru["simulated"]["bytes_loaded"]
        assert done.row(memory, "moepic")["engine"]["coverage"] > 0, "it loaded ahead"


def test_tables_show_what_the_results_say(done: Done) -> None:
    for memory, table in zip(MEMORIES, done.page.tables, strict=False):
        assert table[1][:7] == ["system", "TPOT", "to lru", "hit rate", "TTFT", "stall", "loaded"]
        lines = {line[0].removesuffix(" (P = 4)"): line for line in table[2:]}
        assert lines.keys() == {*SYSTEMS, *BOUNDS}
        for name, line in lines.items():
            row = done.row(memory, name)
            assert line[1:] == expected_cells(row), name
            if row["engine"] is not None:
                assert format_seconds(row["engine"]["tpot_s"]["median"]) in done.printed


def expected_cells(row: dict[str, Any]) -> list[str]:
    """What a row of the table says, from the results."""
    cells = []
    for where in ("engine", "simulated"):
        figures = row[where]
        for key, write in (
            ("tpot_s", format_seconds),
            ("tpot_to_baseline", format_ratio),
            ("hit_rate", format_share),
            ("ttft_s", format_seconds),
            ("stall_s", format_seconds),
            ("bytes_loaded", format_nbytes),
        ):
            value = None if figures is None else figures.get(key)
            text = "-" if value is None else write(value["median"] if isinstance(value, dict) else value)
            if isinstance(value, dict) and value["q1"] < value["q3"]:
                text += f" {format_range(write, value['q1'], value['q3'])}"
            cells.append(text)
    engine = row["engine"]
    measured = None if engine is None else row["simulated"]["tpot_s"] / engine["tpot_s"]["median"]
    return [*cells, format_ratio(measured)]


def test_plots_show_every_system_under_every_budget(done: Done) -> None:
    for memory in MEMORIES:
        hits = done.row(memory, "moepic")["engine"]["hit_rate"]
        assert f"moepic, {memory}: {format_share(hits)}" in done.page.tooltips
        latencies = done.row(memory, "lru")["engine"]["latencies_s"]
        said = f"half within {format_seconds(latencies[0])}, all within {format_seconds(latencies[-1])}"
        assert f"lru, {memory}: {said}" in done.page.tooltips
    for name in ("hit rate", "TTFT", "TPOT, time a token", "stall a token", "loaded a token", "coverage", "timeliness"):
        for where in ("engine", "simulator"):
            assert f"{name}, {where}" in done.page.tooltips


def test_one_token_shows_the_segments_that_were_loaded(done: Done) -> None:
    timelines = {one["system"]: one for one in done.results["timelines"]}
    assert list(timelines) == [*SYSTEMS, "oracle"] and {one["memory"] for one in timelines.values()} == {"60%"}
    for name, one in timelines.items():
        kinds = [event["kind"] for event in one["events"] if event["lane"] == "device"]
        assert kinds.count("dense") == 12 and kinds.count("head") == 1, "every layer, and the head"
        assert kinds.count("expert") >= 12 * 4 and one["length_ns"] > 0, name
        assert all(event["end_ns"] >= 0 and event["begin_ns"] <= one["length_ns"] for event in one["events"])
        assert f"{name}: {format_seconds(one['length_ns'] / 1e9)}" in done.page.headings
    loads = [event for event in timelines["moepic"]["events"] if event["kind"] == "load"]
    assert loads and all(event["lane"] == "link" for event in loads)
    for event in loads:
        place = f"load layer {event['layer']}, expert {event['expert']}, segment"
        assert any(tooltip.startswith(place) for tooltip in done.page.tooltips)


def test_the_headline_is_in_the_report_and_on_the_terminal(done: Done) -> None:
    assert len(done.results["headline"]) == 2
    for sentence in done.results["headline"]:
        assert sentence in done.page.text and sentence in done.printed
        assert "oracle" in sentence and "belady-global" in sentence


def test_the_report_needs_nothing_else(done: Done) -> None:
    assert done.page.links == ["data:,"], "no icon is asked for either"
    assert "script" not in done.page.names
    source = (done.out / "report.html").read_text()
    assert re.findall(r"https?:|//[a-z]|@import|url\(", source) == []


@pytest.mark.skipif(find_browser() is None, reason="no chromium on this machine")
def test_the_report_opens_offline_on_a_phone(done: Done) -> None:
    path = find_browser()
    assert path is not None
    with browser(path) as tab:
        for width, theme in ((390, "light"), (390, "dark"), (1280, "light")):
            tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            tab.open((done.out / "report.html").as_uri(), width=width)
            assert tab.run("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
            assert tab.run("document.querySelectorAll('svg[role=img]').length") > 10
            paper = tab.run("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(20, 23, 26)" if theme == "dark" else "rgb(255, 255, 255)")
            heights = "[...document.querySelectorAll('figure svg text')].map(e => e.getBoundingClientRect().height)"
            assert tab.run(f"Math.min(...{heights})") > 8, "text of plots can be read"
        assert tab.problems == []
        assert {url.partition(":")[0] for url in tab.asked} == {"file"}

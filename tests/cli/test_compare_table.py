"""What `expertly lab compare` prints fits the terminal that it is printed on, with all of its numbers."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from expertly.cli.compare_output import summary
from expertly.lab.compare.settings import USUAL_SYSTEMS
from expertly.scheduler.presets import BOUNDS
from tests.sim.drive import make_trace, random_passes, sized

SYSTEMS = USUAL_SYSTEMS.split(",")


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


def words(text: str) -> set[str]:
    """Numbers and names, whatever stands around them."""
    return set(text.replace(",", " ").split())


@pytest.mark.parametrize("has_engine", [True, False])
@pytest.mark.parametrize("width", [60, 72, 80, 100, 132, 200])
def test_no_line_is_longer_than_the_terminal_and_no_number_is_lost(width: int, has_engine: bool) -> None:
    results = made_results(SYSTEMS, has_engine)
    printed, whole = summary(results, width), summary(results, 1000)
    assert max(map(len, printed.splitlines())) <= width
    missing = words(whole) - words(printed) - {word for word in words(whole) if set(word) <= {"-", "─"}}
    assert missing <= {"memory", "system"}, "headings of columns that became lines"


def test_without_a_terminal_tables_are_narrow_and_sentences_whole() -> None:
    """As they are searched, and put into mails."""
    results = made_results(SYSTEMS)
    printed = summary(results, None)
    table = [line for line in printed.splitlines() if "MiB  " in line or "----" in line]
    assert len(table) > 30 and max(map(len, table)) <= 80
    assert results["headline"][0] in printed.splitlines() and "-" * 90 not in printed


def test_long_names_have_a_line_of_their_own() -> None:
    name = "lcp:segments=4:prediction=lookahead:distance=2"
    lines = summary(made_results(["lru", name]), 80).splitlines()
    at = lines.index(f"25%, {name}")
    assert lines[at + 1].startswith("  ") and lines[at + 1].split()[0].endswith("%")
    assert max(map(len, lines)) <= 80
    results = made_results([name])
    results["settings"]["baseline"] = name
    lines = summary(results, 60).splitlines()
    assert max(map(len, lines)) <= 60 and sum("to baseline" in line for line in lines) == 3, "two heads, explained once"


def test_what_failed_is_marked_and_explained() -> None:
    printed = summary(made_results(["lru", "lfu"]), 200)
    assert "lfu, failed" in printed and "3 of 10 requests were measured before" in " ".join(printed.split())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    layers = sized(2, 8, 2)
    passes = random_passes(0, layers, 6, prompt=3, num_requests=2)
    return make_trace(tmp_path / "given", passes, layers, num_requests=2, is_full=True).folder


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
def test_on_a_terminal(trace: Path, tmp_path: Path, columns: int) -> None:
    """A real one, by its own size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "expertly", "lab", "compare", trace.name, "--memory", "40%,70%", "--out", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, env=env) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                printed += os.read(ours, 65536)
            except OSError:  # so a terminal says that nobody writes any more
                break
    os.close(ours)
    lines = printed.decode().splitlines()
    assert process.returncode == 0 and max(map(len, lines)) <= columns
    for name in (*SYSTEMS, *BOUNDS):
        assert any(name in line for line in lines)

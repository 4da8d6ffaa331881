"""What `expertly lab compare` prints fits the terminal that it is printed on, with all of its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from expertly.cli.compare_output import summary
from expertly.lab.compare.settings import USUAL_SYSTEMS
from expertly.scheduler.presets import BOUNDS

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
@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal_and_no_number_is_lost(width: int, has_engine: bool) -> None:
    results = made_results(SYSTEMS, has_engine)
    printed, whole = summary(results, width), summary(results, 1000)
    assert max(map(len, printed.splitlines())) <= width
    parts = {word for word in words(whole) - words(printed) if not set(word) <= {"-", "─"}}
    assert parts <= set(SYSTEMS) | set(BOUNDS) | {"failed"}, "names take several lines where there is no room"


def test_without_a_terminal_tables_are_narrow_and_sentences_whole() -> None:
    """As they are searched, and put into mails."""
    results = made_results(SYSTEMS)
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

"""The timeline of a run: valid, without overlaps, and all of the time."""

from __future__ import annotations

import json
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import DenseShape
from expertly.scheduler.systems import SYSTEMS
from expertly_lab.chrome import chrome_trace
from expertly_lab.sim.study import Memory
from lab.tests.sim.drive import make_study, make_trace, random_passes, sized, toy

LAYERS = sized(2, 8, 2)


MACHINES = {"link": toy(), "misses": toy(miss_ns=13)}


def timeline(folder: Path, machine: str, system: str, segments: int) -> tuple[list[dict[str, Any]], Any]:
    """(events, the simulator)"""
    passes = random_passes(1, LAYERS, 25, prompt=5, num_requests=2)
    trace = make_trace(folder / "trace", passes, LAYERS, num_requests=2, dense=DenseShape(30, 50))
    with chrome_trace(folder / "out.json") as chrome:
        study = make_study(trace, MACHINES[machine], segments=segments, chrome=chrome)
        simulator = study.simulate(SYSTEMS[system], Memory("40%").budget(study.geometry), "40%")
        assert not (folder / "out.json").exists(), "there when it is whole"
    return json.loads((folder / "out.json").read_text()), simulator


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("system", ["lru", "oracle", "modelled-lookahead", "fmoe"])
def test_a_timeline_shows_all_of_the_time(system: str, machine: str, tmp_path: Path) -> None:
    events, simulator = timeline(tmp_path, machine, system, segments=2)
    names = {
        (event["pid"], event.get("tid")): event["args"] for event in events if event["ph"] == "M" and "tid" in event
    }
    threads = {1: "device", 2: "link"}
    assert names == {(1, number): {"name": name} for number, name in threads.items()}
    assert {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{system}, 40%"}} in events
    spans: dict[int, list[tuple[int, int, str]]] = {1: [], 2: []}
    for event in events:
        if event["ph"] == "X":
            assert event.keys() == {"ph", "pid", "tid", "name", "cat", "ts", "dur"}
            begin, duration = round(1000 * event["ts"]), round(1000 * event["dur"])
            assert begin >= 0 and duration >= 0
            spans[event["tid"]].append((begin, begin + duration, event["cat"]))
    for of_thread in spans.values():
        assert of_thread == sorted(of_thread), "in order"
        assert all(each[1] <= other[0] for each, other in pairwise(of_thread)), "no overlap"
    device, metrics = spans[1], simulator.metrics
    busy = sum(end - begin for begin, end, _ in device)
    assert device[0][0] == 0 and device[-1][2] == "head"
    assert device[-1][1] == metrics.busy_ns, "requests follow each other at once"
    assert busy + metrics.stall_ns == metrics.busy_ns, "what is no gap is busy, what is a gap is a stall"
    assert sum(text == "head" for *_, text in device) == 52
    assert sum(text == "dense" for *_, text in device) == 52 * 2
    assert any(text == "take" for *_, text in device) == (machine == "misses")
    assert spans[2]


def test_every_run_is_a_process(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "trace", random_passes(0, LAYERS, 5), LAYERS)
    with chrome_trace(tmp_path / "out.json") as chrome:
        study = make_study(trace, chrome=chrome)
        list(study.results(["lru"], [Memory("40%"), Memory("60%")]))
    events = json.loads((tmp_path / "out.json").read_text())
    result = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert result == [
        *(f"{name}, 40%" for name in ("lru", "belady", "belady-global", "oracle")), "resident",
        *(f"{name}, 60%" for name in ("lru", "belady", "belady-global", "oracle")),
    ]  # fmt: skip


def test_what_fails_leaves_no_file_and_the_old_one_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), chrome_trace(path) as chrome:
        chrome.begin_run("some")
        raise ZeroDivisionError
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"] and path.read_text() == "old"


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    expected = pytest.raises(ConfigError, match=r"chrome_trace=.*cannot be written \(File too large")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with expected, chrome_trace(tmp_path / "out.json") as chrome:
            for number in range(10_000):
                chrome.begin_run(str(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())

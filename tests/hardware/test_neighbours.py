"""Whether a measurement was disturbed, of what the system says before and meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from expertly.hardware.neighbours import QuietWatch, Reading, read_system
from tests.hardware.readings import QUIET, after, iterate

FOUR_CPUS = 4
UNKNOWN = replace(QUIET, busy_s=None, stolen_s=None, pressure_s=None)

DISTURBED: dict[str, tuple[Reading, Reading, str | None]] = {
    # what the moment before measuring says, and the measurement
    "nobody else": (after(QUIET, 1), after(QUIET, 20, busy_s=40, own_s=40), None),
    "its own threads wait for each other": (
        after(QUIET, 1),
        after(QUIET, 20, busy_s=40, own_s=40, pressure_s=18, load=8.0),
        None,
    ),
    "a load of 15": (after(QUIET, 1, load=15.0), after(QUIET, 20), "before measuring 15.0 processes were running on 4"),
    "others before": (after(QUIET, 1, busy_s=2.0), after(QUIET, 20), "before measuring other processes took 50%"),
    "others meanwhile": (
        after(QUIET, 1),
        after(QUIET, 20, busy_s=60, own_s=20),
        "while measuring other processes took 5",
    ),
    "stolen before": (after(QUIET, 1, stolen_s=1.0), after(QUIET, 20), "before measuring the hypervisor took 25%"),
    "stolen meanwhile": (after(QUIET, 1), after(QUIET, 21, stolen_s=8.0), "while measuring the hypervisor took 10%"),
    "processes that wait": (
        after(QUIET, 1, pressure_s=0.5),
        after(QUIET, 20),
        "before measuring processes waited for a processor 50%",
    ),
    "nothing is said": (replace(UNKNOWN, time_s=1.0), replace(UNKNOWN, time_s=20.0), None),
    "only the load": (replace(UNKNOWN, time_s=1.0, load=9.0), replace(UNKNOWN, time_s=20.0), "9.0 processes"),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_others_on_the_machine_are_seen_before_and_meanwhile(name: str) -> None:
    before, meanwhile, said = DISTURBED[name]
    begin = UNKNOWN if before.busy_s is None else QUIET
    readings = iterate(begin, begin, before, meanwhile)
    watch = QuietWatch(lambda: next(readings), lambda seconds: None, FOUR_CPUS)
    watch.wait(0.0)
    disturbance = watch.disturbance()
    assert disturbance is None if said is None else disturbance is not None and said in disturbance
    assert watch.can_tell == (before.busy_s is not None)


def test_a_quiet_moment_is_waited_for_and_not_for_ever() -> None:
    busy = [after(QUIET, second, busy_s=4.0 * second) for second in range(8)]
    quiet = after(busy[-1], 1)
    readings, slept = iterate(QUIET, *busy, quiet), list[float]()
    watch = QuietWatch(lambda: next(readings), slept.append, FOUR_CPUS)
    watch.wait(60.0)
    assert watch.disturbance() is None and len(slept) == len(busy)

    readings = iterate(QUIET, *busy)
    watch = QuietWatch(lambda: next(readings), slept.append, FOUR_CPUS)
    watch.wait(3.0)
    assert "before measuring other processes took 100%" in str(watch.disturbance())


def test_the_system_is_read_where_it_says_something(tmp_path: Path) -> None:
    reading = read_system()
    assert reading.load >= 0 and reading.own_s > 0
    assert reading.busy_s is None or reading.busy_s >= reading.own_s * 0.5
    for content in (None, "", "cpu0 x\n", "cpu0 1 2\n"):
        if content is not None:
            (tmp_path / "stat").write_text(content)
        assert read_system(tmp_path).busy_s is None

"""Whether a measurement was disturbed, of what the system says before and afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from expertly.hardware.neighbours import Reading, disturbance, read_system
from tests.hardware.readings import QUIET, after

UNKNOWN = replace(QUIET, busy_s=None, stolen_s=None)

DISTURBED: dict[str, tuple[Reading, Reading, str | None]] = {
    # what the system says before and after measuring, on four processors
    "nobody else": (QUIET, after(QUIET, 20, busy_s=40, own_s=40), None),
    "its own threads": (QUIET, after(QUIET, 20, busy_s=40, own_s=40, load=8.0), None),
    "a load of 15": (replace(QUIET, load=15.0), after(QUIET, 20), "15.0 processes were running on 4"),
    "processes that wait": (replace(QUIET, pressure=0.6), after(QUIET, 20), "waited for a processor 60%"),
    "others": (QUIET, after(QUIET, 20, busy_s=60, own_s=20), "other processes took 50%"),
    "stolen": (QUIET, after(QUIET, 20, stolen_s=8.0), "the hypervisor took 10%"),
    "nothing is said": (UNKNOWN, replace(UNKNOWN, time_s=20.0), None),
    "only the load": (replace(UNKNOWN, load=9.0), replace(UNKNOWN, time_s=20.0), "9.0 processes"),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_others_on_the_machine_are_seen(name: str) -> None:
    before, afterwards, said = DISTURBED[name]
    text = disturbance(before, afterwards, num_cpus=4)
    assert text is None if said is None else text is not None and said in text


def test_the_system_is_read_where_it_says_something(tmp_path: Path) -> None:
    reading = read_system()
    assert reading.load >= 0 and reading.own_s > 0
    assert reading.busy_s is None or reading.busy_s >= reading.own_s * 0.5
    for content in (None, "", "cpu0 x\n", "cpu0 1 2\n"):
        if content is not None:
            (tmp_path / "stat").write_text(content)
        assert read_system(tmp_path).busy_s is None
    (tmp_path / "pressure").mkdir()
    for content, share in (("", None), ("some avg10=60.24 avg60=74.29 avg300=57.48 total=2880638588\n", 0.6024)):
        (tmp_path / "pressure" / "cpu").write_text(content)
        assert read_system(tmp_path).pressure == pytest.approx(share)

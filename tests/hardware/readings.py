"""What the system says of its load, made up."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat

import pytest

from expertly.hardware import neighbours
from expertly.hardware.neighbours import Reading

QUIET = Reading(time_s=0.0, load=0.2, own_s=0.0, busy_s=0.0, stolen_s=0.0)


def say(monkeypatch: pytest.MonkeyPatch, *readings: Reading) -> None:
    """From now on each moment is the next of these, the last of them again and again."""
    left = chain(readings, repeat(readings[-1]))
    monkeypatch.setattr(neighbours, "read_system", lambda: next(left))


def after(reading: Reading, seconds: float, **taken: float) -> Reading:
    """A later reading, in which that was added to each named field; `load` is what it is then."""
    load = taken.pop("load", reading.load)
    values = {name: getattr(reading, name) + value for name, value in taken.items()}
    return replace(reading, time_s=reading.time_s + seconds, load=load, **values)

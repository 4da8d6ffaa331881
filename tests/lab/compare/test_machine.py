"""What is simulated where this machine can be measured, and where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from expertly.core.costs import Link
from expertly.lab.compare.engine import MachineWorker, WorkerError

ARGUMENTS = {"model": "m", "segments": 4, "predictor": "auto", "plan": None}


class Scripted:
    """A worker that refuses what it is told to refuse."""

    def __init__(self, *refusing: tuple[str, Any]) -> None:
        self.refusing = list(refusing)
        self.asked: list[tuple[str, Any]] = []

    def ask(self, method: str, *arguments: Any) -> Any:
        what = arguments[0]["memory"] if method == "load" else arguments[0] if arguments else None
        self.asked.append((method, what))
        if method == "load":
            assert arguments[0]["segments"] is None, "whole experts"
        if (method, what) in self.refusing:
            raise WorkerError(f"no {method}")
        return (Link(5e8, 7, 3), None, None) if method == "profile" else None


def machine(*refusing: tuple[str, Any]) -> tuple[MachineWorker, Scripted]:
    made = MachineWorker()
    worker = made.worker = Scripted(*refusing)  # type: ignore[assignment]
    return made, worker


def test_the_first_budget_that_can_be_measured_is() -> None:
    made, worker = machine(("load", "1%"))
    made.measure(ARGUMENTS, ("1%", "50%", "70%"))
    made.measure_again()
    assert worker.asked == [("load", "1%"), ("load", "50%"), ("measure", True), ("profile", None), ("measure", False)]
    hardware = made.hardware("cuda:0")
    assert hardware is not None and hardware.link == Link(5e8, 7, 3) and hardware.name == "cuda:0"
    assert made.memory == "50%" and made.problem is None


@pytest.mark.parametrize("refusing", [("measure", True), ("profile", None)])
def test_where_it_cannot_be_measured_there_is_nothing_to_simulate(refusing: tuple[str, Any]) -> None:
    made, _ = machine(refusing)
    made.measure(ARGUMENTS, ("50%",))
    made.measure_again()
    assert made.hardware("cpu") is None
    assert made.problem == f"no {refusing[0]}"


@pytest.mark.parametrize("refusing", [("measure", False), ("profile", None)])
def test_what_was_measured_before_it_failed_is_simulated(refusing: tuple[str, Any]) -> None:
    """It is the machine all the same; who reads of it is told."""
    made, worker = machine()
    made.measure(ARGUMENTS, ("50%",))
    worker.refusing.append(refusing)
    made.measure_again()
    hardware = made.hardware("cpu")
    assert hardware is not None and hardware.link == Link(5e8, 7, 3)
    assert made.problem == f"no {refusing[0]}"

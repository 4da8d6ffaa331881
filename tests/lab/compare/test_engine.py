"""Who runs when, what happens when one fails, and what is simulated where this machine cannot be measured."""

from __future__ import annotations

import errno
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertly.core.costs import Link
from expertly.lab.compare import engine
from expertly.lab.compare.engine import EngineRuns, MachineWorker, Worker, WorkerError, can_be_together
from expertly.lab.compare.settings import ComparisonSettings
from expertly.lab.playing import RecordedRequest
from expertly.sim.hardware import Hardware
from tests.families import make_checkpoint

REQUESTS = [RecordedRequest((1, 2, 3), 2, number) for number in range(2)]


class Stage:
    """Stands for all workers: notes what they are asked, in order, and how many hold a model at once."""

    def __init__(self, failing: dict[tuple[str, str], str]) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.failing = failing
        self.holding: set[str] = set()
        self.most_held = 0

    def worker(self, name: str, loading: Any = None) -> Any:
        return _Actor(name, self)


class _Actor:
    def __init__(self, name: str, stage: Stage) -> None:
        self.name, self.stage = name, stage

    def start(self) -> None: ...

    def hang_up(self) -> None: ...

    def end(self) -> None:
        self.stage.holding.discard(self.name)

    def ask(self, method: str, *arguments: Any) -> Any:
        stage = self.stage
        what = arguments[0].number if method == "play" else arguments[0]["memory"] if method == "load" else ""
        stage.asked.append((self.name, method, str(what)))
        if (self.name, method) in stage.failing:
            raise WorkerError(stage.failing[self.name, method])
        if method == "load":
            stage.holding.add(self.name)
            stage.most_held = max(stage.most_held, len(stage.holding))
        if method == "unload":
            stage.holding.discard(self.name)
        return {"request": what} if method == "play" else {}


def run(
    monkeypatch: pytest.MonkeyPatch, together: bool, failing: dict[tuple[str, str], str] | None = None
) -> tuple[Stage, engine.ComparedRuns]:
    stage = Stage(failing or {})
    monkeypatch.setattr(engine, "Worker", stage.worker)
    settings = ComparisonSettings(("lru", "lfu", "lcp"), ("25%", "50%"), rounds=2)
    runner = EngineRuns(settings, {"predictor": "auto", "plan": None}, REQUESTS, None, lambda: None)
    runner.run(lambda _: together)
    return stage, runner.runs


def plays(stage: Stage) -> list[tuple[str, str]]:
    return [(name, what) for name, method, what in stage.asked if method == "play"]


def test_systems_take_turns_request_by_request_in_another_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, runs = run(monkeypatch, together=True)
    first_round = [("lru", "0"), ("lfu", "0"), ("lcp", "0"), ("lfu", "1"), ("lcp", "1"), ("lru", "1")]
    assert plays(stage)[:6] == first_round
    assert plays(stage)[6:12] == [("lfu", "0"), ("lcp", "0"), ("lru", "0"), ("lcp", "1"), ("lru", "1"), ("lfu", "1")]
    assert stage.most_held == 3 and not stage.holding
    assert len([one for one in stage.asked if one[1] == "load"]) == 12, "every round begins with empty caches"
    assert all([len(one) for one in rounds] == [2, 2] for rounds in runs.played.values()) and not runs.failures
    assert runs.together == {"25%": True, "50%": True}


def test_one_after_the_other_where_memory_does_not_allow_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, runs = run(monkeypatch, together=False)
    assert plays(stage)[:4] == [("lru", "0"), ("lru", "1"), ("lfu", "0"), ("lfu", "1")]
    assert stage.most_held == 1 and runs.together == {"25%": False, "50%": False}
    assert {key: [len(one) for one in rounds] for key, rounds in runs.played.items()} == {
        (memory, name): [2, 2] for memory in ("25%", "50%") for name in ("lru", "lfu", "lcp")
    }


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("method", ["load", "play"])
def test_a_system_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, together: bool, method: str
) -> None:
    stage, runs = run(monkeypatch, together, {("lfu", method): "out of places"})
    assert [(one.memory, one.system, one.cause) for one in runs.failures] == [
        ("25%", "lfu", "out of places"),
        ("50%", "lfu", "out of places"),
    ]
    assert sum(name == "lfu" and asked == method for name, asked, _ in stage.asked) == 2, "once for each budget"
    for name in ("lru", "lcp"):
        assert [len(one) for one in runs.played["50%", name]] == [2, 2]


def test_a_process_that_cannot_be_started_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other failure of its system; nothing of it is left."""
    context, ends = multiprocessing.get_context("spawn"), []

    def refusing(*_: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def pipe() -> Any:
        ends.extend(context.Pipe())
        return ends[-2:]

    class Refusing(context.Process):  # type: ignore[name-defined,misc]
        _Popen = staticmethod(refusing)

    made = SimpleNamespace(Pipe=pipe, Process=Refusing)
    monkeypatch.setattr(engine, "multiprocessing", SimpleNamespace(get_context=lambda _: made))
    one = Worker("tried")
    for _ in range(2):
        with pytest.raises(WorkerError, match="its process could not be started: Resource temporarily unavailable"):
            one.ask("peak_nbytes")
    assert len(ends) == 4 and all(end.closed for end in ends) and not one.is_alive
    settings = ComparisonSettings(("lru",), ("25%",))
    runner = EngineRuns(settings, {"predictor": "auto", "plan": None}, REQUESTS, None, lambda: None)
    runner.run(lambda _: True)
    (failure,) = runner.runs.failures
    assert failure.system == "lru" and "could not be started" in failure.cause


def test_an_interrupt_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage({})
    monkeypatch.setattr(engine, "Worker", stage.worker)

    def interrupted() -> None:
        raise KeyboardInterrupt

    runner = EngineRuns(
        ComparisonSettings(("lru",), ("25%",)), {"predictor": "auto", "plan": None}, REQUESTS, None, between=interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run(lambda _: True)
    assert [len(one) for one in runner.runs.played["25%", "lru"]] == [2] and not stage.holding


def test_models_are_held_together_where_memory_allows_it() -> None:
    assert can_be_together([30, 50], 100, "cpu")
    assert not can_be_together([30, 50], 100, "cuda:0")
    assert not can_be_together([30, 51], 100, "cpu"), "a fifth stays free"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_worker_says_what_failed_and_how_it_died() -> None:
    worker = Worker("tried")
    try:
        with pytest.raises(WorkerError, match="model='/nowhere'"):
            worker.ask("load", {"model": "/nowhere"})
        assert worker.ask("peak_nbytes") > 1 << 20, "it lives on"
        worker._process.kill()
        with pytest.raises(WorkerError, match=r"its process ended \(SIGKILL; .*memory\) when asked to unload"):
            worker.ask("unload")
        assert not worker.is_alive
    finally:
        worker.end()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_what_a_worker_packs_and_loads_is_told_while_it_does(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "tiny", seed=23)
    told: list[tuple[str, int, int]] = []
    worker = Worker("tried", lambda *one: told.append(one))
    try:
        facts = worker.ask("load", {"model": str(folder), "system": "resident"})
    finally:
        worker.end()
    assert [what for what, done, total in told if done == total] == ["packing", "loading"]
    assert told[-1] == ("loading", facts["expert_bytes"], facts["expert_bytes"])


# -- the machine -----------------------------------------------------------------------------------------------------


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
        return replace(Hardware.read("infinite"), link=Link(5e8, 7, 3)) if method == "profile" else None


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

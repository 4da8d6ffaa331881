"""One of several devices fails: cause and device are told, nothing hangs, the next request works or says it cannot."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import EngineClosedError, TransferError
from expertly.engine import group as groups
from expertly.engine.group import Workers
from expertly.store.packed import experts_name
from expertly.store.reader import ExpertFile
from tests.engine import predictors
from tests.engine.conftest import Cases
from tests.engine.failing import FailOnce, interrupt_at_lines, interrupt_twice
from tests.engine.observe import loaded, reader_threads
from tests.engine.predictors import Everything, Failing
from tests.families import generate

pytestmark = pytest.mark.timeout(60)

TWO = "cpu:0,cpu:1"


def check_nothing_moves(model: Any) -> None:
    for device in handle(model).engine.executor.shards:
        device.scheduler.check()
        assert not any(device.scheduler.slots.in_flight)
        assert device.device.poll() is None


def files_of(model: Any, number: int) -> set[int]:
    """The open files of one device, by their identity."""
    return {id(file) for file in handle(model).engine.executor.shards[number].device._readers._source._files}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("system", ["lru", "fmoe"])
def test_a_read_error_on_one_device_names_it_and_the_next_request_works(
    system: str, number: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, original = cases["qwen3_moe"], ExpertFile.read_into
    with loaded(case.store, devices=TWO, system=system, memory="60%", segments=4) as model:
        assert generate(model, case.prompts) == case.tokens
        files, fails = files_of(model, number), [True]

        def failing(file: ExpertFile, *args: Any) -> bool:
            if fails[0] and id(file) in files:
                raise TransferError(f"{file.path}: reading failed (Input/output error)")
            return original(file, *args)

        monkeypatch.setattr(ExpertFile, "read_into", failing)
        for _ in range(3):
            with pytest.raises(TransferError, match=rf"^cpu:{number}: .*experts-\d+\.safetensors.*Input/output error"):
                generate(model, case.prompts)
            check_nothing_moves(model)
        fails[0] = False
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        check_nothing_moves(model)


@pytest.mark.parametrize("at", [1, 7, 30])
def test_one_read_error_of_any_device(at: int, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, fail = cases["qwen3_moe"], FailOnce(at)
    system = predictors.put(monkeypatch, Everything)
    with loaded(case.store, devices=TWO, system=system, memory="60%", segments=4) as model:
        monkeypatch.setattr(ExpertFile, "read_into", lambda *args: fail(*args))
        with pytest.raises(TransferError, match=r"^cpu:[01]: "):
            for _ in range(20):
                generate(model, case.prompts)
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


def test_both_devices_fail_and_the_first_cause_is_told(cases: Cases, tmp_path: Path) -> None:
    case = cases["qwen3_moe"]
    store = Path(shutil.copytree(case.store, tmp_path / "store"))
    path = store / experts_name(1)
    whole = path.read_bytes()
    with loaded(store, devices=TWO, memory="60%") as model:
        os.truncate(path, 4096)
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"^cpu:[01]: .*{path.name}: ends at offset \d+.*truncated"):
                generate(model, case.prompts)
            check_nothing_moves(model)
        path.write_bytes(whole)
        assert generate(model, case.prompts) == case.tokens


def test_a_kernel_that_raises_on_one_device(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, mm = cases["qwen3_moe"], torch.mm

    def failing(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "expertly-device-1":
            raise RuntimeError("kernel")
        return mm(*args, **kwargs)

    with loaded(case.store, devices=TWO, memory="60%", segments=4) as model:
        monkeypatch.setattr(torch, "mm", failing)
        with pytest.raises(RuntimeError, match="kernel"):
            generate(model, case.prompts)
        monkeypatch.undo()
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize("matcher", ["thread", "inline"])
def test_a_predictor_that_fails_fails_one_pass(matcher: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, lambda geometry: Failing(geometry, after=4))
    with loaded(case.store, devices=TWO, system=system, matcher=matcher, memory="60%") as model:
        with pytest.raises(ValueError, match="the predictor gave up"):
            for _ in range(5):
                generate(model, case.prompts)
        check_nothing_moves(model)
        if matcher == "thread":
            assert generate(model, case.prompts) == case.tokens, "it goes on without predictions"


def test_a_read_error_while_preloading_leaves_nothing(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = FailOnce(9)
    monkeypatch.setattr(ExpertFile, "read_into", lambda *args: fail(*args))
    with pytest.raises(TransferError, match=r"cpu:[01]: .*Input/output error"):
        expertly.load(str(cases["qwen3_moe"].store), system="resident", devices=TWO)
    assert not reader_threads()


# -- threads that end ------------------------------------------------------------------------------------------------


def end_readers(model: Any, number: int, how_many: int) -> None:
    """End transfer threads of a device, as nothing of ours does."""
    readers = handle(model).engine.executor.shards[number].device._readers
    for _ in range(how_many):
        readers._jobs.put(None)
    deadline = time.monotonic() + 10
    while sum(not thread.is_alive() for thread in readers._threads) < how_many:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("devices", ["cpu", TWO])
def test_transfer_threads_that_have_ended_fail_the_request_and_are_replaced(devices: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, devices=devices, memory="30%" if devices == "cpu" else "60%") as model:
        assert generate(model, case.prompts) == case.tokens
        last = len(handle(model).engine.executor.shards) - 1
        for _ in range(2):
            end_readers(model, last, 4)
            start = time.monotonic()
            named = "^a thread" if devices == "cpu" else "^cpu:1: a thread"
            with pytest.raises(TransferError, match=f"{named} that reads experts has ended"):
                generate(model, case.prompts)
            assert time.monotonic() - start < 10
            check_nothing_moves(model)
            assert generate(model, case.prompts) == case.tokens
        end_readers(model, last, 3)
        assert generate(model, case.prompts) == case.tokens, "the last one does the work of four"
    assert not reader_threads()


def test_a_transfer_thread_that_breaks_tells_why(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, devices=TWO, memory="60%") as model:
        readers = handle(model).engine.executor.shards[1].device._readers

        def broken(job: Any) -> None:
            raise RuntimeError("a bug of ours")

        readers._run_one = broken
        with pytest.raises(TransferError, match=r"^cpu:1: a thread .* has ended: RuntimeError: a bug of ours"):
            generate(model, case.prompts)
        del readers._run_one
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


def test_unloading_where_transfer_threads_have_ended(cases: Cases) -> None:
    with loaded(cases["qwen3_moe"].store, devices=TWO, memory="60%") as model:
        end_readers(model, 0, 4)
    assert not reader_threads()


def test_a_device_whose_thread_has_ended_says_so_and_can_be_unloaded(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_LOOK_EVERY_S", 0.05)
    case = cases["qwen3_moe"]
    model, _ = expertly.load(str(case.store), devices=TWO, memory="60%")
    assert generate(model, case.prompts) == case.tokens
    group: Any = handle(model).engine.executor
    group._workers._queues[1].put(None)
    for _ in range(2):
        with pytest.raises(EngineClosedError, match=r"expertly-device-1 has ended.*call expertly\.load again"):
            generate(model, case.prompts)
    expertly.unload(model)
    assert not reader_threads()


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["lru", "fmoe"])
def test_two_interrupts_while_a_disk_is_slow(system: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    interrupt_twice(case, monkeypatch, check_nothing_moves, system=system, devices=TWO, memory="60%")


@pytest.mark.parametrize("system", ["lru", "fmoe"])
def test_an_interrupt_at_any_line_leaves_a_model_that_works_or_says_that_it_cannot(system: str, cases: Cases) -> None:
    settings = {"system": system, "memory": "60%", "devices": TWO, "device": None, "maps": "off"}
    interrupt_at_lines(cases["qwen3_moe"], range(3, 3000, 431), check_nothing_moves, **settings)


# -- the threads alone -----------------------------------------------------------------------------------------------


def test_workers_run_side_by_side_and_tell_the_first_failure() -> None:
    crew, meet = Workers(["a", "b"]), threading.Barrier(2, timeout=10)

    def fail(delay: float, what: str) -> Callable[[], None]:
        def run() -> None:
            meet.wait()
            time.sleep(delay)
            raise ValueError(what)

        return run

    results, failure = crew.run([meet.wait, meet.wait])
    assert sorted(results) == [0, 1] and failure is None, "neither waits for the other"
    _, failure = crew.run([fail(0.2, "late"), fail(0.0, "early")])
    assert failure is not None and failure.thread == 1 and str(failure.error) == "early"
    assert crew.run([threading.current_thread, threading.current_thread])[0][1].name == "b"
    crew.close()
    assert not [thread for thread in threading.enumerate() if thread.name in "ab"]

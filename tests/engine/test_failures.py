"""Reads that fail, for real: the cause is told, nothing hangs, no slot is lost, and what can work afterwards does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import EngineClosedError, TransferError
from expertly.engine.runtime import Engine
from expertly.store.packed import experts_name
from expertly.store.reader import ExpertFile
from tests.engine.conftest import Case, Cases
from tests.engine.failing import FailOnce, interrupt_at_lines, interrupt_twice
from tests.engine.observe import assert_streamed, loaded
from tests.families import generate, make_checkpoint

pytestmark = pytest.mark.timeout(60)


def check_nothing_moves(model: Any) -> None:
    engine = handle(model).engine
    engine.scheduler.check()
    assert not any(engine.scheduler.slots.in_flight)
    assert engine.device.poll() is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("order", ["resident", "id"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_file_truncated_under_a_loaded_model(layer: int, order: str, segments: int, own: tuple[Case, Path]) -> None:
    case, store = own
    path = store / experts_name(layer)
    whole = path.read_bytes()
    with loaded(store, segments=segments, order=order) as model:
        assert generate(model, case.prompts) == case.tokens
        os.truncate(path, 8192)
        for _ in range(3):
            with pytest.raises(TransferError, match=rf"{path.name}: ends at offset \d+.*truncated"):
                generate(model, case.prompts)
            check_nothing_moves(model)
        path.write_bytes(whole)
        assert generate(model, case.prompts) == case.tokens, "the file is whole again, and so is the model"
        assert_streamed(model)


def test_a_deleted_file_goes_on_working(own: tuple[Case, Path]) -> None:
    """What is open stays readable: removing a cached store does not break who uses it."""
    case, store = own
    with loaded(store) as model:
        shutil.rmtree(store)
        assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("system", ["on-demand", "lru", "lfu", "static"])
@pytest.mark.parametrize("at", [1, 5, 40])
def test_one_read_error(at: int, system: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, fail = cases["qwen3_moe"], FailOnce(at)
    with loaded(case.store, system=system, segments=segments, memory="30%") as model:
        monkeypatch.setattr(ExpertFile, "read_into", lambda *args: fail(*args))
        with pytest.raises(TransferError, match=r"experts-\d+\.safetensors.*Input/output error"):
            generate(model, case.prompts)
        assert fail.path is not None
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens
        check_nothing_moves(model)


def test_preadv_itself_failing(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, preadv, left = cases["gpt_oss"], os.preadv, [7]

    def failing(*args: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*args)

    with loaded(case.store) as model:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(TransferError, match=r"experts-\d+\.safetensors: reading \d+ bytes .*Input/output error"):
            generate(model, case.prompts)
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


def test_an_unexpected_error_in_a_reader_reaches_the_caller(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours, or memory running out: still no hang, and the thread goes on."""
    case = cases["qwen3_moe"]
    original = ExpertFile.read_into
    with loaded(case.store) as model:

        def failing(*args: Any) -> bool:
            raise MemoryError("none left")

        monkeypatch.setattr(ExpertFile, "read_into", failing)
        with pytest.raises(MemoryError):
            generate(model, case.prompts)
        check_nothing_moves(model)
        monkeypatch.setattr(ExpertFile, "read_into", original)
        assert generate(model, case.prompts) == case.tokens


def test_a_read_error_while_preloading_leaves_nothing(own: tuple[Case, Path]) -> None:
    case, store = own
    before = threading.active_count()
    fail = FailOnce(9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertFile, "read_into", lambda *args: fail(*args))
        with pytest.raises(TransferError, match="Input/output error"):
            expertly.load(str(store), system="resident", device="cpu")
    assert threading.active_count() == before
    with loaded(store, memory="100%", system="resident") as model:
        assert generate(model, case.prompts) == case.tokens


def test_continuous_batching_fails_its_requests_and_the_model_goes_on(own: tuple[Case, Path]) -> None:
    from tests.engine.test_batching import run_batch

    case, store = own
    path = store / experts_name(1)
    whole = path.read_bytes()
    with loaded(store) as model:
        expected = run_batch(model, case.prompts)
        os.truncate(path, 4096)
        with pytest.raises(Exception):  # noqa: B017 - upstream ends its thread and says so in its own way
            assert run_batch(model, case.prompts) == expected
        path.write_bytes(whole)
        check_nothing_moves(model)
        assert run_batch(model, case.prompts) == expected


# -- interrupts ------------------------------------------------------------------------------------------------------


def test_an_interrupt_in_a_hook(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    left = [5]

    def hook(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with loaded(case.store) as model:
        experts = model.model.layers[1].mlp.experts
        handles = [experts.register_forward_pre_hook(hook), model.model.layers[2].register_forward_hook(hook)]
        with pytest.raises(KeyboardInterrupt):
            generate(model, case.prompts)
        for one in handles:
            one.remove()
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


def test_a_kernel_that_raises(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, segments=4) as model:
        monkeypatch.setattr(torch, "mm", _raising(RuntimeError("kernel")))
        with pytest.raises(RuntimeError, match="kernel"):
            generate(model, case.prompts)
        monkeypatch.undo()
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


def _raising(error: BaseException) -> Callable[..., Any]:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize("system", ["lru", "fmoe"])
def test_two_interrupts_while_a_disk_is_slow(system: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first is waiting for the reads under way: they may take long, Ctrl-C must not."""
    interrupt_twice(cases["qwen3_moe"], monkeypatch, check_nothing_moves, system=system)


@pytest.mark.parametrize("segments", [1, 4])
def test_an_interrupt_at_any_line_leaves_a_model_that_works_or_says_that_it_cannot(segments: int, cases: Cases) -> None:
    interrupt_at_lines(cases["qwen3_moe"], range(3, 9000, 409), check_nothing_moves, memory="25%", segments=segments)


def test_a_real_signal_in_the_middle_of_a_read(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, release = cases["qwen3_moe"], threading.Event()
    original = ExpertFile.read_into

    def slow(*args: Any) -> bool:
        if not release.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            release.set()
        return original(*args)

    with loaded(case.store) as model:
        monkeypatch.setattr(ExpertFile, "read_into", slow)
        with pytest.raises(KeyboardInterrupt):
            generate(model, case.prompts)
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens


# -- the command line ------------------------------------------------------------------------------------------------


def run_cli(*args: str, code: str) -> Any:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(expertly.__file__).parents[1])])}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


TRUNCATE_AFTER_LOAD = """
import os, sys
from expertly import api
load = api.load
def load_and_truncate(*args, **kwargs):
    model, tokenizer = load(*args, **kwargs)
    os.truncate(api.handle(model).store.layer_extent(1)[0], 4096)
    return model, tokenizer
api.load = load_and_truncate
from expertly.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("speaking") / "model", tokenizer=True)


def test_the_command_line_says_which_file_failed_and_exits_2(speaking: Path, tmp_path: Path) -> None:
    from expertly.model.packing import pack

    store = pack(speaking, tmp_path / "store").folder
    arguments = ("--prompt", "hello", "--memory", "25%", "--device", "cpu", "--json")
    result = run_cli("generate", str(store), *arguments, code=TRUNCATE_AFTER_LOAD)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("expertly: error:")]
    assert experts_name(1) in line and "truncated" in line
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "TransferError" and experts_name(1) in error["message"]


def test_the_command_line_refuses_a_store_that_was_truncated_before(
    speaking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from expertly.cli.main import main
    from expertly.model.packing import pack

    store = pack(speaking, tmp_path / "store").folder
    os.truncate(store / experts_name(2), 5000)
    assert main(["generate", str(store), "--prompt", "hello", "--memory", "25%", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert experts_name(2) in error and "truncated" in error


def test_closing_while_reads_are_in_flight(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    model, _ = expertly.load(str(case.store), memory="50%", device="cpu")
    engine: Engine = handle(model).engine
    engine.device.submit(engine.scheduler.preload(0, 1))
    expertly.unload(model)
    with pytest.raises(EngineClosedError):
        generate(model, case.prompts)

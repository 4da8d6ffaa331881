"""What fails: reads, kernels, predictors, threads, loads, interrupts. The cause is told (of several devices, also whose
it is), nothing hangs, everything is given back, and the next request works or says that it cannot.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly import api
from expertly.api import handle
from expertly.cli.main import main
from expertly.core.errors import ConfigError, EngineClosedError, NanError, StoreError, TransferError
from expertly.engine import cpu, transfer
from expertly.engine import group as groups
from expertly.engine.group import Workers
from expertly.engine.transfer import Readers
from expertly.model.packing import pack
from expertly.store.packed import PackedStore, experts_name
from expertly.store.reader import ExpertFile
from tests.engine import predictors
from tests.engine.conftest import Case, Cases
from tests.engine.failing import FailOnce, interrupt_at_lines, interrupt_twice, raising, replace_reads
from tests.engine.observe import assert_streamed, loaded, open_files, prediction, reader_threads
from tests.engine.predictors import Failing
from tests.families import NUM_EXPERTS, fill_with_nan, generate, make_checkpoint, make_prompts

pytestmark = pytest.mark.timeout(180)

TWO = "cpu:0,cpu:1"
DEVICES = pytest.mark.parametrize("devices", ["cpu", TWO])


@contextmanager
def loaded_on(devices: str, store: Any, **settings: Any) -> Iterator[Any]:
    """A model on one or two devices, each with less than its experts."""
    with loaded(store, devices=devices, **({"memory": "30%" if devices == "cpu" else "60%"} | settings)) as model:
        yield model


def check_nothing_moves(model: Any) -> None:
    for shard in handle(model).engine.executor.shards:
        shard.scheduler.check()
        assert not any(shard.scheduler.slots.in_flight)
        assert shard.device.poll() is None


def assert_works(model: Any, case: Case) -> None:
    """Nothing is left of what failed, and the next request works; its last prefetches may still be under way."""
    check_nothing_moves(model)
    assert generate(model, case.prompts) == case.tokens
    for shard in handle(model).engine.executor.shards:
        shard.scheduler.check()


# -- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "order", "segments", "devices"),
    [(0, "resident", 4, "cpu"), (2, "id", 1, "cpu"), (2, "resident", 1, "cpu"), (1, "resident", 1, TWO)],
)
def test_a_file_truncated_under_a_loaded_model(
    layer: int, order: str, segments: int, devices: str, own: tuple[Case, Path]
) -> None:
    case, store = own
    path = store / experts_name(layer)
    whole, named = path.read_bytes(), "^" if devices == "cpu" else r"^cpu:[01]: "
    with loaded_on(devices, store, system="lru", segments=segments, order=order) as model:
        assert generate(model, case.prompts) == case.tokens
        os.truncate(path, 4096)
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"{named}.*{path.name}: ends at offset \d+.*truncated"):
                generate(model, case.prompts)
            check_nothing_moves(model)
        path.write_bytes(whole)
        assert_works(model, case)  # the file is whole again, and so is the model


def test_a_deleted_file_goes_on_working(own: tuple[Case, Path]) -> None:
    """What is open stays readable: removing a cached store does not break who uses it."""
    case, store = own
    with loaded(store) as model:
        shutil.rmtree(store)
        assert generate(model, case.prompts) == case.tokens


@pytest.mark.parametrize(
    ("codec", "at", "system", "segments"),
    [
        *(("none", 1, "on-demand", 1), ("none", 40, "lru", 4), ("none", 5, "static", 1)),
        *(("planes", 1, "lru", 4), ("planes", 20, "lru", 4)),
    ],
)
def test_one_read_error(
    codec: str, at: int, system: str, segments: int, cases: Cases, planes: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, fail = planes if codec == "planes" else cases["qwen3_moe"], FailOnce(at)
    with loaded(case.store, system=system, segments=segments, memory="30%" if codec == "none" else "75%") as model:
        replace_reads(monkeypatch, lambda *args: fail(*args))
        with pytest.raises(TransferError, match=r"experts-\d+\..*Input/output error"):
            generate(model, case.prompts)
        assert fail.path is not None
        assert_works(model, case)


@pytest.mark.parametrize(("number", "system"), [(0, "fmoe"), (1, "lru")])
def test_a_read_error_on_one_device_names_it_and_the_next_request_works(
    system: str, number: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, original = cases["qwen3_moe"], ExpertFile.read_into
    with loaded_on(TWO, case.store, system=system, segments=4) as model:
        assert generate(model, case.prompts) == case.tokens
        files = {id(file) for file in handle(model).engine.executor.shards[number].device._readers._source.files}

        def failing(file: ExpertFile, *args: Any) -> bool:
            if id(file) in files:
                raise TransferError(f"{file.path}: reading failed (Input/output error)")
            return original(file, *args)

        replace_reads(monkeypatch, failing)
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"^cpu:{number}: .*experts-\d+\.safetensors.*Input/output error"):
                generate(model, case.prompts)
            check_nothing_moves(model)
        monkeypatch.undo()
        assert_works(model, case)


@DEVICES
def test_a_read_error_while_preloading_leaves_nothing(
    devices: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, before = FailOnce(9), threading.active_count()
    replace_reads(monkeypatch, lambda *args: fail(*args))
    named = "" if devices == "cpu" else r"^cpu:[01]: "
    with pytest.raises(TransferError, match=rf"{named}.*Input/output error"):
        expertly.load(str(cases["qwen3_moe"].store), system="resident", devices=devices)
    assert threading.active_count() == before and not reader_threads()


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
        assert_streamed(model)


# -- bugs ------------------------------------------------------------------------------------------------------------


@DEVICES
def test_a_kernel_that_raises(devices: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the last device alone."""
    case, mm = cases["qwen3_moe"], torch.mm

    def failing(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name in ("MainThread" if devices == "cpu" else "expertly-device-1"):
            raise RuntimeError("kernel")
        return mm(*args, **kwargs)

    with loaded_on(devices, case.store, segments=4) as model:
        monkeypatch.setattr(torch, "mm", failing)
        with pytest.raises(RuntimeError, match="kernel"):
            generate(model, case.prompts)
        monkeypatch.undo()
        assert_works(model, case)


@pytest.mark.parametrize("where", ["thread", "inline"])
def test_a_predictor_that_fails_fails_one_pass(where: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, lambda geometry: Failing(geometry, after=4))
    with loaded_on(TWO, case.store, system=system, predict=where) as model:
        with pytest.raises(ValueError, match="the predictor gave up"):
            for _ in range(5):
                generate(model, case.prompts)
        check_nothing_moves(model)
        if where == "thread":
            assert generate(model, case.prompts) == case.tokens, "it goes on without predictions"
            assert prediction(model)["failed"] == "ValueError: the predictor gave up"


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


@DEVICES
def test_transfer_threads_that_have_ended_fail_the_request_and_are_replaced(
    devices: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LOOK_EVERY_S", 0.05)
    case, named = cases["qwen3_moe"], "^a thread" if devices == "cpu" else "^cpu:1: a thread"
    with loaded_on(devices, case.store) as model:
        monkeypatch.setattr(Readers, "_direct", lambda *_: None)  # all reads are theirs
        last = len(handle(model).engine.executor.shards) - 1
        end_readers(model, last, 4)
        with pytest.raises(TransferError, match=f"{named} that reads experts has ended"):
            generate(model, case.prompts)
        assert_works(model, case)
        end_readers(model, last, 3)
        assert generate(model, case.prompts) == case.tokens, "the last one does the work of four"
        end_readers(model, last, 4)  # and all the same it can be unloaded
    assert not reader_threads()


def test_a_transfer_thread_that_breaks_tells_why(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readers, "_direct", lambda *_: None)  # all reads are theirs
    case = cases["qwen3_moe"]
    with loaded_on(TWO, case.store) as model:
        readers = handle(model).engine.executor.shards[1].device._readers
        readers._run_one = raising(RuntimeError("a bug of ours"))
        with pytest.raises(TransferError, match=r"^cpu:1: a thread .* has ended: RuntimeError: a bug of ours"):
            generate(model, case.prompts)
        del readers._run_one
        assert_works(model, case)


def test_a_device_whose_thread_has_ended_says_so_and_can_be_unloaded(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LOOK_EVERY_S", 0.05)
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


def test_workers_run_side_by_side_and_tell_the_first_failure() -> None:
    crew, meet, is_late = Workers(["a", "b"]), threading.Barrier(2, timeout=10), threading.Event()

    def early() -> None:
        meet.wait()
        threading.Timer(0.2, is_late.set).start()
        raise ValueError("early")

    def late() -> None:
        meet.wait()
        is_late.wait()
        raise ValueError("late")

    results, failure = crew.run([meet.wait, meet.wait])
    assert sorted(results) == [0, 1] and failure is None, "neither waits for the other"
    _, failure = crew.run([late, early])
    assert failure is not None and failure.thread == 1 and str(failure.error) == "early"
    assert crew.run([threading.current_thread, threading.current_thread])[0][1].name == "b"
    crew.close()
    assert not [thread for thread in threading.enumerate() if thread.name in "ab"]


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("system", "devices"), [("lru", "cpu"), ("fmoe", "cpu"), ("fmoe", TWO)])
def test_two_interrupts_while_a_disk_is_slow(
    system: str, devices: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first is waiting for the reads under way: they may take long, Ctrl-C must not."""
    interrupt_twice(cases["qwen3_moe"], monkeypatch, check_nothing_moves, system=system, devices=devices, memory="60%")


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (range(3, 9000, 818), {"segments": 1}),
        (range(412, 9000, 818), {"segments": 4}),
        (range(3, 3000, 862), {"system": "lru", "devices": TWO, "device": None}),
        (range(434, 3000, 862), {"system": "fmoe", "devices": TWO, "device": None}),
        (range(5, 9000, 409), {"system": "fmoe", "predict": "inline"}),
        (range(7, 5000, 331), {"system": "lru:prediction=lookahead:preemption=late:order=id", "predict": "inline"}),
    ],
    ids=["P=1", "P=4", "two devices", "two devices that prefetch", "inline", "late, by id"],
)
def test_an_interrupt_at_any_line_leaves_a_model_that_works_or_says_that_it_cannot(
    lines: range, settings: dict[str, Any], cases: Cases
) -> None:
    memory = "60%" if "devices" in settings else "25%"
    interrupt_at_lines(cases["qwen3_moe"], lines, check_nothing_moves, memory=memory, learned="off", **settings)


# -- bytes that flipped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("segments", "devices"), [(1, "cpu"), (4, "cpu"), (2, TWO)])
def test_a_byte_that_flipped_in_an_expert_fails_the_requests_that_need_it(
    segments: int, devices: str, own: tuple[Case, Path]
) -> None:
    """Until the file is whole again. With verify=never nobody is told."""
    case, store = own
    path, offset = PackedStore.open(store).extents[1]
    whole = path.read_bytes()
    nbytes = (len(whole) - offset) // NUM_EXPERTS
    damaged = bytearray(whole)
    for expert in range(NUM_EXPERTS):  # the exponent of a weight of the last segment
        damaged[offset + (expert + 1) * nbytes - 1] ^= 1
    path.write_bytes(damaged)
    with loaded_on(devices, store, segments=segments) as model:
        for _ in range(2):
            with pytest.raises(TransferError, match=rf"{path.name}: layer 1, expert \d, segment.*: .*pack"):
                generate(model, case.prompts)
        check_nothing_moves(model)
        path.write_bytes(whole)  # the same file
        assert_works(model, case)
    path.write_bytes(damaged)
    with loaded_on(devices, store, segments=segments, verify="never") as model:
        generate(model, case.prompts)


@pytest.mark.parametrize("name", ["config.json", "dense.safetensors"])
def test_a_byte_that_flipped_beside_the_experts_is_found_at_loading(name: str, own: tuple[Case, Path]) -> None:
    _, store = own
    raw = bytearray((store / name).read_bytes())
    raw[-2 if name == "config.json" else -1] ^= 1
    (store / name).write_bytes(raw)
    with pytest.raises(StoreError, match=f"{name}: checksum"):
        expertly.load(str(store), memory="50%", device="cpu")


# -- NaN -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        ("model.embed_tokens.weight", "the dense part before the experts of MoE layer 0"),
        ("model.layers.1.self_attn.o_proj.weight", "the dense part before the experts of MoE layer 1"),
        ("model.layers.2.mlp.experts", "the experts of MoE layer 2"),
        ("model.norm.weight", "the dense part behind the last MoE layer"),
        ("lm_head.weight", "the model's head"),
    ],
)
def test_nan_is_told_with_the_layer_that_gave_it_first(tensor: str, told: str, cases: Cases, tmp_path: Path) -> None:
    """Of one prompt, and of several of different lengths, whose padding is NaN's own business."""
    folder = Path(shutil.copytree(cases["qwen3_moe"].folder, tmp_path / "model"))
    fill_with_nan(folder, tensor)
    with loaded(pack(folder, tmp_path / "store").folder, memory="50%", device="cpu") as model:
        for num_prompts in (1, 3, 1):  # a request that failed leaves the next as it was
            with pytest.raises(NanError, match=f"{told} gave NaN: the checkpoint's weights"):
                generate(model, make_prompts(num_prompts, length=14))
        check_nothing_moves(model)


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_says_which_file_failed_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was truncated when the model had been loaded, and before."""
    store = pack(make_checkpoint("qwen3_moe", tmp_path / "model", tokenizer=True), tmp_path / "store").folder
    command = ["generate", str(store), "--prompt", "hello", "--memory", "25%", "--device", "cpu", "--system", "lru"]
    load = api.load

    def load_and_truncate(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model, tokenizer = load(*args, **kwargs)
        os.truncate(store / experts_name(1), 4096)
        return model, tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(api, "load", load_and_truncate)
        assert main([*command, "--json"]) == 2
    output, errors = capsys.readouterr()
    (line,) = [one for one in errors.splitlines() if one.startswith("expertly: error:")]
    assert experts_name(1) in line and "truncated" in line
    error = json.loads(output)["error"]
    assert error["type"] == "TransferError" and experts_name(1) in error["message"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert experts_name(1) in told and "Traceback" not in told + errors


# -- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name"),
    [(api, "record"), (cpu.KIND, "make"), (groups, "Shard"), (api, "Engine"), (api, "load_dense")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_opened_is_closed_again(
    where: Any, name: str, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the error is there, too, which holds on to all that was known where it was raised."""
    monkeypatch.setattr(where, name, raising(ConfigError("no such luck")))
    with pytest.raises(ConfigError, match="no such luck") as raised:
        expertly.load(
            str(cases["mixtral"].store), memory="50%", system="lru", decisions=tmp_path / "made", device="cpu"
        )
    assert raised.tb is not None and (tmp_path / "made").exists()
    assert open_files(tmp_path) == [] and reader_threads() == []

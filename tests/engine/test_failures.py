"""What fails: reads, kernels, predictors, threads, loads, interrupts. The cause is told (of several devices, also whose
it is), nothing hangs, everything is given back, and the next request works or says that it cannot.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import expertly
from expertly import api
from expertly.api import handle
from expertly.core.errors import ConfigError, NanError, StoreError, TransferError
from expertly.engine import cpu
from expertly.model.packing import pack
from expertly.scheduler.cache import LOADING, PREFETCHING
from tests.engine import predictors
from tests.engine.conftest import Case, Cases
from tests.engine.disk import Pread, Preads
from tests.engine.observe import loaded, open_files, reader_threads
from tests.engine.predictors import Failing
from tests.families import fill_with_nan, generate, make_prompts

pytestmark = pytest.mark.timeout(180)


def check_nothing_moves(model: Any) -> None:
    engine = handle(model).engine
    engine.scheduler.check()
    assert not {LOADING, PREFETCHING}.intersection(engine.scheduler.cache.state)
    assert engine.device.poll() is None


def assert_works(model: Any, case: Case) -> None:
    """Nothing is left of what failed, and the next request works; its last prefetches may still be under way."""
    check_nothing_moves(model)
    assert generate(model, case.prompts) == case.tokens
    handle(model).engine.scheduler.check()


# -- reads -----------------------------------------------------------------------------------------------------------


def failing_once(at: int) -> Pread:
    """A pread that fails at its `at`-th call."""
    calls = count(1)  # from several threads

    def read(file: int, buffer: memoryview, offset: int) -> int:
        if next(calls) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(file, [buffer], offset)

    return read


@pytest.mark.parametrize(("at", "system", "segments"), [(1, "on-demand", 1), (40, "lru", 4), (5, "static", 1)])
def test_one_read_error(at: int, system: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, reads = cases["qwen3_moe"], Preads(monkeypatch)
    with loaded(case.store, system=system, segments=segments, memory="30%") as model:
        reads.call = failing_once(at)
        with pytest.raises(TransferError, match=r"experts-\d+\..*Input/output error"):
            generate(model, case.prompts)
        assert_works(model, case)


def test_a_read_error_while_preloading_leaves_nothing(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    Preads(monkeypatch, failing_once(9))
    with pytest.raises(TransferError, match="Input/output error"):
        expertly.load(str(cases["qwen3_moe"].store), system="resident", device="cpu")
    assert threading.active_count() == before and not reader_threads()


# -- bugs ------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_raises(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, memory="30%", segments=4) as model:
        monkeypatch.setattr(torch, "mm", Mock(side_effect=RuntimeError("kernel")))
        with pytest.raises(RuntimeError, match="kernel"):
            generate(model, case.prompts)
        monkeypatch.undo()
        assert_works(model, case)


def test_a_predictor_that_fails_fails_one_pass(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    system = predictors.put(monkeypatch, lambda geometry: Failing(geometry, after=4))
    with loaded(case.store, memory="30%", system=system) as model:
        with pytest.raises(ValueError, match="the predictor gave up"):
            generate(model, case.prompts)
        check_nothing_moves(model)
        assert generate(model, case.prompts) == case.tokens, "it goes on without predictions"
        assert expertly.stats(model).as_dict()["prediction"]["failed"] == "ValueError: the predictor gave up"


# -- interrupts ------------------------------------------------------------------------------------------------------


ROOMS = re.compile("/expertly/(engine|scheduler|policies)/")


def interrupt_at(number: int) -> Any:
    """A tracer that sends SIGINT before so many lines have run in these rooms."""
    lines = count(1)

    def line(frame: Any, event: str, arg: Any) -> Any:
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return line

    return lambda frame, event, arg: line if ROOMS.search(frame.f_code.co_filename) else None


@pytest.mark.parametrize(
    ("lines", "system"),
    [(range(3, 9000, 818), "expertly"), (range(412, 9000, 818), "expertly:segments=4"), (range(5, 9000, 613), "fmoe")],
    ids=["P=1", "P=4", "fmoe"],
)
def test_an_interrupt_at_any_line_leaves_a_model_that_works(lines: range, system: str, cases: Cases) -> None:
    case = cases["qwen3_moe"]
    with loaded(case.store, system=system) as model:
        generate(model, case.prompts, 3)
        for at in lines:
            sys.settrace(interrupt_at(at))
            try:
                with pytest.raises(KeyboardInterrupt):
                    generate(model, case.prompts)
            finally:
                sys.settrace(None)
            assert generate(model, case.prompts, 5) == [tokens[:5] for tokens in case.tokens], f"line {at}"
            check_nothing_moves(model)


# -- bytes that flipped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "dense.safetensors"])
def test_a_byte_that_flipped_beside_the_experts_is_found_at_loading(name: str, copied: tuple[Case, Path]) -> None:
    _, store = copied
    raw = bytearray((store / name).read_bytes())
    raw[-2 if name == "config.json" else -1] ^= 1
    (store / name).write_bytes(raw)
    with pytest.raises(StoreError, match=f"{name}: checksum"):
        expertly.load(str(store), memory="50%", device="cpu")


# -- NaN -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("model.embed_tokens.weight", "the dense part before the experts of MoE layer 0"),
        ("model.layers.1.self_attn.o_proj.weight", "the dense part before the experts of MoE layer 1"),
        ("model.layers.2.mlp.experts", "the experts of MoE layer 2"),
        ("model.norm.weight", "the dense part after the last MoE layer"),
        ("lm_head.weight", "the model's head"),
    ],
)
def test_nan_is_told_with_the_layer_that_gave_it_first(tensor: str, place: str, cases: Cases, tmp_path: Path) -> None:
    """Of one prompt, and of several of different lengths, whose padding is NaN's own business."""
    folder = Path(shutil.copytree(cases["qwen3_moe"].folder, tmp_path / "model"))
    fill_with_nan(folder, tensor)
    with loaded(pack(folder, tmp_path / "store").folder, memory="50%", device="cpu") as model:
        for num_prompts in (1, 3, 1):  # a request that failed leaves the next as it was
            with pytest.raises(NanError, match=f"{place} gave NaN: the checkpoint's weights"):
                generate(model, make_prompts(num_prompts, length=14))
        check_nothing_moves(model)


# -- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [(cpu.KIND, "make"), (api, "Shard"), (api, "Engine"), (api, "load_dense")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_opened_is_closed_again(place: Any, name: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the error is there, too, which holds on to all that was known where it was raised."""
    monkeypatch.setattr(place, name, Mock(side_effect=ConfigError("no such luck")))
    with pytest.raises(ConfigError, match="no such luck") as raised:
        expertly.load(str(cases["mixtral"].store), memory="50%", system="lru", device="cpu")
    assert raised.tb is not None
    assert open_files(cases["mixtral"].store) == [] and reader_threads() == []

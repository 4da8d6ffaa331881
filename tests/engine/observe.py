"""What the unmodified model asks of its experts, counted from outside, to hold our counters against."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import expertly
from expertly.api import handle

COUNTS = ("hits", "partial_hits", "misses")


@dataclass
class Call:
    """One call of an experts module [T, H], [T, K], [T, K] -> [T, H]."""

    layer: int
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    output: torch.Tensor | None = None


@dataclass
class Recorder:
    """The calls of a reference's experts modules, in order."""

    calls: list[Call] = field(default_factory=list)

    def num_demands(self, is_decode: Callable[[Call], bool], is_pad: torch.Tensor | None = None) -> int:
        """Distinct (call, expert) of the calls where `is_decode`; `is_pad` [T] marks rows to leave out."""
        total = 0
        for call in filter(is_decode, self.calls):
            index = call.index if is_pad is None or len(is_pad) != len(call.index) else call.index[~is_pad]
            total += len(index.unique())
        return total


@contextmanager
def recording(reference: nn.Module) -> Iterator[Recorder]:
    """Record an interface family's experts modules while the block runs."""
    recorder = Recorder()
    modules = [m for _, m in reference.named_modules() if hasattr(m, "down_proj") and hasattr(m, "_apply_gate")]
    assert modules, "no experts module found"
    hooks = []
    for layer, module in enumerate(modules):

        def before(_: nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            recorder.calls.append(Call(layer, *(one.detach().clone() for one in args)))

        def after(_: nn.Module, args: Any, output: torch.Tensor) -> None:
            recorder.calls[-1].output = output.detach().clone()

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def loaded(store: Any, **kwargs: Any) -> Iterator[Any]:
    """A model on the CPU, checked and unloaded at the end; a quarter of the memory and no saved maps unless said."""
    where = {} if "devices" in kwargs else {"device": "cpu"}
    model, _ = expertly.load(str(store), **({"memory": "25%", "learned": "off"} | where | kwargs))
    try:
        yield model
        for device in handle(model).engine.executor.shards:
            device.scheduler.check()
    finally:
        expertly.unload(model)


def counts(model: Any, phase: str) -> tuple[int, ...]:
    """(hits, partial hits, misses) of a phase so far."""
    of_phase = expertly.stats(model).as_dict()["phases"][phase]
    return tuple(of_phase[name] for name in COUNTS)


def assert_streamed(model: Any) -> None:
    """It really ran through the pool: experts were demanded, missed and read."""
    stats = expertly.stats(model).as_dict()
    assert sum(counts(model, "prefill")) + sum(counts(model, "decode")) > 0
    assert 0 < stats["bytes_loaded"] <= stats["bytes_disk"], "and what the comparison of first reads takes"
    assert stats["memory_bytes"] < stats["expert_bytes"]


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("expertly-")]


def open_files(folder: Any) -> list[str]:
    """The open files of this process under `folder`."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(os.path.realpath(folder)):
            found.append(target)
    return found


def rss_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_python(code: str, *args: str, limit: float = 60) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(expertly.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)


def prediction(model: Any) -> dict[str, Any]:
    """What `expertly.stats` says of predictions."""
    found = expertly.stats(model).as_dict()["prediction"]
    assert isinstance(found, dict)
    return found

"""What the unmodified model asks of its experts, counted from outside, to hold our counters against."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import expertly
from expertly.api import handle
from expertly.scheduler.systems import System
from tests.scheduler.decisions import Decision, record, replay

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
            recorder.calls.append(Call(layer, *(arg.detach().clone() for arg in args)))

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
    """A model on the CPU, checked and unloaded at the end; a quarter of the memory and no saved maps unless said.
    `segments`: P, of the system `expertly` where none is named.
    """
    segments = kwargs.pop("segments", None)
    if kwargs.get("system") == "resident":  # which keeps whole experts
        segments = None
    if segments is not None:
        kwargs["system"] = f"{kwargs.get('system', 'expertly')}:segments={segments}"
    model, _ = expertly.load(str(store), **({"memory": "25%", "device": "cpu"} | kwargs))
    try:
        assert segments in (None, expertly.stats(model).as_dict()["segments"])
        yield model
        handle(model).engine.scheduler.check()
    finally:
        expertly.unload(model)


class Decisions:
    """What schedulers decided, each with a function that makes it anew."""

    def __init__(self) -> None:
        self.of_schedulers: list[tuple[list[Decision], Callable[[], Any]]] = []

    def difference(self) -> str | None:
        """Of one scheduler: where a new one decides otherwise."""
        ((decisions, again),) = self.of_schedulers
        return replay(decisions, again())

    def num(self, name: str | None = None) -> int:
        """Calls of this name, or of all."""
        return sum(name in (None, decision.name) for decisions, _ in self.of_schedulers for decision in decisions)


@contextmanager
def recorded_decisions() -> Iterator[Decisions]:
    """Record what schedulers decide that are made while the block runs."""
    make, result = System.scheduler, Decisions()

    def scheduler(system: System, *args: Any, **kwargs: Any) -> Any:
        decisions: list[Decision] = []
        result.of_schedulers.append((decisions, lambda: make(system, *args, **kwargs)))
        return record(make(system, *args, **kwargs), decisions.append)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(System, "scheduler", scheduler)
        yield result


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


def reader_threads() -> list[str]:
    """Names of the threads that an engine started and has not ended."""
    compiled = list[str]()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            compiled.append(path.read_text().strip())
    named = [thread.name for thread in threading.enumerate()]
    others = "expertly-team", "expertly-serve"
    return [name for name in (*compiled, *named) if name.startswith("expertly-") and not name.startswith(others)]


def open_files(folder: Any) -> list[str]:
    """The open files of this process under `folder`."""
    result = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith(os.path.realpath(folder)):
            result.append(target)
    return result


def run_python(code: str, *args: str, limit: float = 250) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(expertly.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)

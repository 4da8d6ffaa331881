"""Streams of an accelerator that is not there: its device is RAM, and its copies run when a test says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from expertly.engine import cpu
from expertly.engine.cuda import CudaDevice


class Mark(NamedTuple):
    is_copy: bool
    number: int


class LateStreams:
    """Copies run only when somebody waits for them, so that order mistakes show as wrong tokens. Kernels are over at
    once.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor, list[Mark]]] = []
        self.num_copies = self.num_copied = 0
        self.num_kernels = self.num_over = 0

    def is_capturing(self) -> bool:
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Mark]) -> None:
        self.queue.append((target, source, after))
        self.num_copies += 1

    def mark_copy(self) -> Mark:
        return Mark(True, self.num_copies)

    def mark_compute(self) -> Mark:
        self.num_kernels += 1
        return Mark(False, self.num_kernels)

    def has_run(self, mark: Mark) -> bool:
        return mark.number <= (self.num_copied if mark.is_copy else self.num_over)

    def is_past(self, mark: Mark) -> bool:
        return not mark.is_copy or self.has_run(mark)

    def hold_compute(self, mark: Mark) -> None:
        self.let(mark.number - self.num_copied)

    def synchronize(self) -> None:
        self.let(len(self.queue))
        self.num_over = self.num_kernels

    def stall_ns(self) -> int:
        return 0

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def let(self, count: int) -> None:
        """So many copies run, each after the kernels that it waits for."""
        for _ in range(count):
            target, source, after = self.queue.pop(0)
            self.num_over = max([self.num_over, *(mark.number for mark in after)])
            target.copy_(source)
            self.num_copied += 1


class ManualStreams(LateStreams):
    """Kernels are over when it is said: `num_over`."""

    def is_past(self, mark: Mark) -> bool:
        return self.has_run(mark)


class RandomStreams(LateStreams):
    """Both streams get on when somebody asks whether they have, if the dice say so."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self._chance = dice.choice([0.2, 0.6, 1.0])

    def is_past(self, mark: Mark) -> bool:
        if self._dice.random() < self._chance:
            if not mark.is_copy:
                self.num_over = max(self.num_over, mark.number)
            elif self.queue:
                self.let(1)
        return self.has_run(mark)


def put_in_place(
    monkeypatch: pytest.MonkeyPatch, host_share: int = 100, make: Callable[[], Any] = LateStreams
) -> list[CudaDevice]:
    """Models loaded from now on have such devices instead of the CPU, with host memory for `host_share` percent of the
    experts. The devices that were made.
    """
    made: list[CudaDevice] = []

    def make_device(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, host_nbytes: int) -> CudaDevice:
        nbytes = geometry.nbytes * host_share // 100
        made.append(CudaDevice(torch.device("cpu"), make(), store, geometry, slots, dtype, nbytes))
        return made[-1]

    monkeypatch.setattr(cpu.KIND, "make", make_device)
    return made

"""The process that records what the model routes, and measures what it costs on this machine while the systems run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from expertly.core.costs import CodecCosts, Link, MeasuredCompute
from expertly.core.resources import cpu_name
from expertly.lab.compare.engine_runs import load_arguments
from expertly.lab.compare.worker import Worker, WorkerError
from expertly.sim.hardware import Hardware

Profile = tuple[Link, MeasuredCompute, CodecCosts | None]


class MachineWorker:
    """A worker beside those of the systems. Where measuring fails the comparison goes on: `problem` says why. What was
    measured before it failed is kept.
    """

    def __init__(self) -> None:
        self.worker = Worker("machine")
        self.problem: str | None = None
        self.memory: str | None = None  # what the experts had of it while they were measured
        self._profile: Profile | None = None

    def measure(self, arguments: dict[str, Any], memories: Sequence[str]) -> None:
        """All costs of a model, with the first of these budgets that leaves enough in memory to measure."""
        for memory in memories:
            try:
                loading = load_arguments(arguments | {"segments": None}, memory, "lru")
                self.worker.ask("load", loading)
                self.worker.ask("measure", True)
                self._profile = self.worker.ask("profile")
            except WorkerError as error:
                self.problem = str(error)
            else:
                self.problem, self.memory = None, memory
                break

    def measure_again(self) -> None:
        """What a decode step depends on, to follow a machine that is now faster and now slower."""
        if self.memory is not None and self.problem is None:
            try:
                self.worker.ask("measure", False)
            except WorkerError as error:
                self.problem = str(error)

    def hardware(self, device: str) -> Hardware | None:
        """The medians of what was measured, as a machine to simulate; None where there is nothing."""
        if self.problem is None and self._profile is not None:
            try:
                self._profile = self.worker.ask("profile")
            except WorkerError as error:
                self.problem = str(error)
        if self._profile is None:
            return None
        link, compute, codec = self._profile
        name = cpu_name() if device == "cpu" else device
        return replace(Hardware.read("infinite").with_model(link, compute), codec=codec, name=name)

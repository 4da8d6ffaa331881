"""Keeps torch off instructions that the processor names and then traps: some virtual machines offer AMX that way."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""What oneDNN, which multiplies matrices for torch on a CPU, reads when it is first used."""

WITHOUT_AMX = "AVX512_CORE_FP16"

_PATIENCE_S = 30.0


def keep_off_trapped_instructions(
    cpuinfo: Path = Path("/proc/cpuinfo"), multiply: Callable[[], object] | None = None
) -> bool:
    """Switch AMX off where using it would end the process with SIGILL. True where that was needed.

    A hypervisor may show the feature bit of AMX and hide the leaf that describes its tiles: oneDNN then configures none
    and dies in the first bfloat16 product. Found out by a child that multiplies; nothing is tried where the processor
    has no AMX or the variable is set. Must run before torch multiplies for the first time.
    """
    if VARIABLE in os.environ or not _names_amx(cpuinfo):
        return False
    if _works_here() if multiply is None else _survives(multiply):
        return False
    os.environ[VARIABLE] = WITHOUT_AMX
    return True


def _names_amx(cpuinfo: Path) -> bool:
    with contextlib.suppress(OSError):
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
        return "amx_tile" in flags.split()
    return False


def _multiply() -> None:
    """A product that is worth tiles to oneDNN, on one thread: a child of a threaded process must not start any."""
    import torch

    torch.set_num_threads(1)
    torch.nn.functional.linear(*(torch.ones(32, 64, dtype=torch.bfloat16) for _ in range(2)))


@functools.cache
def _works_here() -> bool:
    """Tried once a process: later oneDNN has made up its mind, and threads may run that a child must not inherit."""
    return _survives(_multiply)


def _survives(multiply: Callable[[], object]) -> bool:
    """Whether a child that multiplies is not killed by an illegal instruction. What does not end
    counts as killed: slower products are better than none.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.disable()  # dying of it is an answer, not a crash to report
            multiply()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False

"""NUMA: a device's host memory lies on the node that the device is attached to, and the threads that fill it run there
(MoE-Infinity, appendix B.2). Best effort: where the system does not allow it, that is noted, and all works without.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, which the C library has no function for."""

_MPOL_PREFERRED = 1
"""Uses other nodes when this one is full; a strict binding would have the kernel kill the process."""


class MemoryNode:
    """One NUMA node."""

    def __init__(self, number: int, cpus: frozenset[int]) -> None:
        self.number = number
        self.cpus = cpus
        self.bound_nbytes = 0
        self.problem: str | None = None
        """The first call that the system refused."""

    def bind(self, address: int, nbytes: int) -> None:
        """Take these pages from the node when they are first touched."""
        try:
            _mbind(address, nbytes, self.number)
            self.bound_nbytes += nbytes
        except OSError as error:
            self._note("its memory cannot be bound", error)

    def pin_thread(self) -> None:
        """Run this thread on CPUs of the node."""
        try:
            _pin(self.cpus)
        except OSError as error:
            self._note("its readers cannot be pinned", error)

    def facts(self) -> dict[str, Any]:
        return {"node": self.number, "bound_bytes": self.bound_nbytes, "problem": self.problem}

    def _note(self, what: str, error: OSError) -> None:
        self.problem = self.problem or f"{what}: {error.strerror or error}"


def node_of_cpu_device(index: int, sysfs: Path = SYSFS) -> MemoryNode | None:
    """The node of logical device cpu:i: number i modulo the nodes. None on a machine with one node."""
    numbers = _nodes(sysfs)
    return None if len(numbers) < 2 else _node(numbers[index % len(numbers)], sysfs)


def node_of_pci_device(address: str, sysfs: Path = SYSFS) -> MemoryNode | None:
    """The node of a PCI device; None on a machine with one node, or where the system does not tell."""
    numbers = _nodes(sysfs)
    text = _read(sysfs / "bus/pci/devices" / address.lower() / "numa_node")
    number = int(text) if text.lstrip("-").isdigit() else -1
    return None if len(numbers) < 2 or number not in numbers else _node(number, sysfs)


def _nodes(sysfs: Path) -> list[int]:
    """Numbers of the nodes with memory."""
    return _ranges(_read(sysfs / "devices/system/node/has_memory"))


def _node(number: int, sysfs: Path) -> MemoryNode:
    return MemoryNode(number, frozenset(_ranges(_read(sysfs / f"devices/system/node/node{number}/cpulist"))))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _ranges(text: str) -> list[int]:
    """Numbers of a kernel list such as `0-3,8`; none where the text is not one."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return []
        found += range(int(first), int(last or first) + 1)
    return found


def _mbind(address: int, nbytes: int, node: int) -> None:
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"unknown on {platform.machine()}")
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // word + 1))()
    mask[node // word] = 1 << node % word
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    failed = syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * word + 1),  # the kernel reads one bit less
        ctypes.c_uint(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _pin(cpus: frozenset[int]) -> None:
    allowed = os.sched_getaffinity(0) & cpus if hasattr(os, "sched_getaffinity") else frozenset[int]()
    if not allowed:
        raise OSError("none of the node's CPUs is allowed")
    os.sched_setaffinity(0, allowed)  # of this thread

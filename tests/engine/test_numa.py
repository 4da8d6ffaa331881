"""Memory nodes, on a machine that is made up: what is bound, who is pinned, and what is said when that fails."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import cpu, numa, reading
from expertly.engine.cpu import CpuDevice
from expertly.engine.numa import MemoryNode, node_of_cpu_device, node_of_pci_device
from expertly.engine.reading import HostPool
from tests.engine.disk import Disk

pytestmark = pytest.mark.timeout(60)

GPU = "0000:c1:00.0"


def machine(root: Path, has_memory: str = "0-1", node_of_gpu: str = "1") -> Path:
    """The files of a machine with CPUs 0-3,8 on node 0 and 4-7 on node 1."""
    system = root / "devices/system/node"
    for number, cpus in enumerate(("0-3,8", "4-7")):
        (system / f"node{number}").mkdir(parents=True)
        (system / f"node{number}/cpulist").write_text(f"{cpus}\n")
    (system / "has_memory").write_text(f"{has_memory}\n")
    (root / "bus/pci/devices" / GPU).mkdir(parents=True)
    (root / "bus/pci/devices" / GPU / "numa_node").write_text(f"{node_of_gpu}\n")
    return root


class Kernel:
    """Notes what it is asked for; `code` is what it answers, 0 for yes."""

    def __init__(self, code: int = 0) -> None:
        self.bound: list[tuple[int, int, int]] = []
        self.pinned: dict[str, frozenset[int]] = {}
        self._code = code

    def mbind(self, address: int, nbytes: int, node: int) -> None:
        self.bound.append((address, nbytes, node))
        self._answer()

    def pin(self, cpus: frozenset[int]) -> None:
        self.pinned[threading.current_thread().name] = cpus
        self._answer()

    def _answer(self) -> None:
        if self._code:
            raise OSError(self._code, os.strerror(self._code))


def test_logical_devices_are_dealt_out_over_the_nodes_and_a_pci_device_has_its_own(tmp_path: Path) -> None:
    root = machine(tmp_path)
    nodes = [*(node_of_cpu_device(index, root) for index in range(3)), node_of_pci_device(GPU.upper(), root)]
    found = [(node.number, node.cpus) for node in nodes if node is not None]
    first, second = (0, {0, 1, 2, 3, 8}), (1, {4, 5, 6, 7})
    assert found == [first, second, first, second]


@pytest.mark.parametrize(
    ("has_memory", "node_of_gpu"), [("0", "0"), ("0-1", "-1"), ("0-1", "7"), ("0-1", "?"), ("", "0"), ("a-b", "0")]
)
def test_where_there_is_one_node_or_nothing_is_known_nothing_is_bound(
    has_memory: str, node_of_gpu: str, tmp_path: Path
) -> None:
    root = machine(tmp_path, has_memory, node_of_gpu)
    assert node_of_pci_device(GPU, root) is None
    assert node_of_pci_device("0000:ff:00.0", root) is None
    if has_memory != "0-1":
        assert node_of_cpu_device(1, root) is None
    assert node_of_cpu_device(0, tmp_path / "nowhere") is None


def test_a_device_without_a_number_is_left_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cpu, "node_of_cpu_device", asked.append)
    for name in ("cpu", "cpu:3"):
        assert cpu.KIND.memory_node(torch.device(name)) is None
    assert asked == [3]


@pytest.mark.parametrize("code", [0, errno.EPERM])
def test_the_slots_are_bound_and_the_readers_run_there(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system refuses is told, and everything works."""
    disk = Disk(Geometry((LayerGeometry(8, 1, 2048, 4, 2, 1),) * 2))
    monkeypatch.setattr(reading, "ExpertFile", disk.open)
    disk.let_all_end()
    kernel = Kernel(code)
    monkeypatch.setattr(numa, "_mbind", kernel.mbind)
    monkeypatch.setattr(numa, "_pin", kernel.pin)
    node = node_of_cpu_device(1, machine(tmp_path))
    device = CpuDevice(disk, disk.geometry, [3], torch.bfloat16, node)
    device.submit([Span(1, 5, 0, 1, 2)])
    assert device.wait() == Span(1, 5, 0, 1, 2)
    try:
        ((address, nbytes, number),) = kernel.bound
        assert number == 1 and address % 4096 == 0 and address == device.rows(0).data_ptr()
        assert nbytes >= device.rows(0).nbytes
        assert device.node is node and node is not None
        device.drain()  # every reader has come by
        assert kernel.pinned == {f"expertly-reader-{i}": frozenset({4, 5, 6, 7}) for i in range(4)}
        problem = "its memory cannot be bound: Operation not permitted"
        bound = {"bound_bytes": 0, "problem": problem} if code else {"bound_bytes": nbytes, "problem": None}
        assert node.facts() == {"node": 1, **bound}
    finally:
        device.close()


@pytest.mark.parametrize("node", [0, 63, 64])
def test_the_system_call_names_the_node(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[Any]] = []

    def syscall(*args: Any) -> int:
        calls.append([getattr(arg, "value", arg) for arg in args])
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    numa._mbind(0x7000_0000, 8192, node)
    ((number, address, nbytes, mode, mask, max_node, flags),) = calls
    assert (number, address, nbytes, mode, flags) == (237, 0x7000_0000, 8192, 1, 0)
    assert sum(word << 64 * i for i, word in enumerate(mask)) == 1 << node and max_node == 64 * len(mask) + 1


def test_machines_without_the_call_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    node = MemoryNode(1, frozenset({0}))
    node.bind(4096, 4096)
    assert node.problem == "its memory cannot be bound: unknown on riscv64"


def test_threads_are_pinned_within_what_is_allowed() -> None:
    allowed = os.sched_getaffinity(0)
    nowhere, here = MemoryNode(0, frozenset({100_000})), MemoryNode(0, frozenset({min(allowed)}))
    seen: list[set[int]] = []

    def run() -> None:
        for node in (nowhere, here):
            node.pin_thread()
            seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert nowhere.problem == "its readers cannot be pinned: none of the node's CPUs is allowed"
    assert here.problem is None
    assert seen == [allowed, {min(allowed)}] and os.sched_getaffinity(0) == allowed, "the thread's alone"


def test_binding_for_real_where_the_kernel_has_it() -> None:
    """On one node or many, to node 0: memory works as before."""
    node = MemoryNode(0, frozenset())
    pool = HostPool(Geometry((LayerGeometry(2, 1, 64, 16, 2, 1),)), [2], [2048], torch.uint8, node)
    pool.buffer(Span(0, 0, 0, 1, 0))[:4] = b"abcd"
    assert bytes(pool.rows(0).reshape(-1)[:4].tolist()) == b"abcd"
    assert (node.problem is None) == (node.bound_nbytes > 0)

"""Prefetch against compute on the simulated accelerator, held against the simulator: what is asked of the device by the
same loop, with a host that runs ahead of its kernels and a thread that goes on copying.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import cuda
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import get_system
from expertly.scheduler.tier import Tier
from expertly_lab.sim import study as study_module
from expertly_lab.sim.compute import ComputeModel
from expertly_lab.sim.hardware import Link
from expertly_lab.sim.link import Clock
from expertly_lab.sim.simulator import Simulator
from expertly_lab.sim.study import Memory
from expertly_lab.sim.tiered import TieredLink
from expertly_lab.trace.reader import Trace
from lab.tests.sim.drive import can_run, make_study, make_trace, random_passes, toy
from tests.engine.disk import Disk
from tests.engine.streams import Accelerator, ThreadStreams, WatchedDevice

pytestmark = pytest.mark.timeout(300)

LAYERS = (LayerGeometry(16, 2, 2, 256, 2, 1),) * 6
"""Experts of 1024 bytes: a microsecond of compute each."""


class AcceleratedLink:
    """What a Simulator asks of its link, from a CudaDevice on a simulated accelerator."""

    num_devices = 1

    def __init__(self, accelerator: Accelerator, geometry: Geometry, slots: list[int], tier: Tier | None) -> None:
        """`tier`: empty; None: the host has all experts before anything runs."""
        disk = Disk(geometry)
        disk.let_all_end()
        self.accelerator = accelerator
        with pytest.MonkeyPatch.context() as patch:
            disk.put(patch)
            cpu, full = torch.device("cpu"), Tier(geometry, geometry.nbytes)
            device = WatchedDevice(cpu, accelerator, disk, geometry, slots, torch.uint8, tier or full)
        self.device, self._content, self._geometry = device, disk.content, geometry
        self.submit, self.prefetch, self.cancel = device.submit, device.prefetch, device.cancel
        self.poll, self.wait = device.poll, device.wait
        host = device.tier
        for layer, shape in enumerate(geometry.layers) if tier is None else ():
            for expert in range(shape.num_experts):
                transfer = cuda.Transfer(Span(layer, expert, 0, geometry.segments_per_expert, 0))
                assert host.request(transfer) is not None
                for _ in range(transfer.num_reads):
                    host.arrived(host.readers.wait())

    @property
    def stall_ns(self) -> int:
        return sum(end - begin for begin, end in self.device.waits)

    def compute(self, span: Span, duration_ns: int) -> None:
        """A kernel reads the span's bytes, which are the expert's own."""
        blocks = self._geometry.blocks_per_segment(span.layer)
        rows = self.device.rows(span.layer)[span.slot * blocks : (span.slot + span.num_segments) * blocks]
        assert bytes(rows.contiguous().view(torch.uint8).numpy()) == self._content(span), span
        self.accelerator.kernel(duration_ns)
        self.device.used([span])


class Accelerated(Simulator):
    """A Simulator whose device computes behind the host, which waits once a layer: for what its router chose."""

    link: Any

    def __init__(
        self, wake_ns: int, moves: Link, scheduler: Scheduler, compute: ComputeModel, _: Clock, link: Any, **more: Any
    ) -> None:
        self.accelerator = accelerator = Accelerator(moves, wake_ns=wake_ns)
        accelerator.busy_until_ns = 0  # type: ignore[attr-defined]  # its kernels are no part of the host's time
        slots = scheduler.budget.pool_slots()
        tier = link._tier if isinstance(link, TieredLink) else None
        mine: Any = AcceleratedLink(accelerator, scheduler.geometry, slots, tier)
        super().__init__(scheduler, compute, accelerator, mine, **more)
        self.begun_ns: list[int] = []  # when passes began

    def preload(self) -> None:
        geometry = self.scheduler.geometry
        for layer, shape in enumerate(geometry.layers):
            for expert in range(shape.num_experts):
                self.link.submit(spans := self.scheduler.preload(layer, expert))
                for _ in spans:
                    self.scheduler.loaded(self.link.wait())
        self.accelerator.synchronize()

    def _run_iteration(self, iteration: Any) -> None:
        self.begun_ns.append(self.accelerator.now_ns)
        super()._run_iteration(iteration)

    def _use(self, spans: Sequence[Span]) -> None:
        for span in spans:
            num_tokens = self._tokens.get(span.expert, 1) if self._tokens else 1
            self.link.compute(span, self._span_ns(span.layer, num_tokens, span.num_segments))

    def _spend(self, text: str, layer: int, duration_ns: int) -> None:
        self.accelerator.kernel(duration_ns)
        self.accelerator.to_host(torch.empty(0))  # the router's choice, or the next token


def both(
    trace: Trace, system: str, memory: str, link: Link, monkeypatch: pytest.MonkeyPatch, wake_ns: int, **settings: Any
) -> tuple[Simulator, Accelerated]:
    """The simulator's run, and the device's."""
    result: list[Any] = []
    hardware = toy(link=link, disk=Link(float("inf"), 0))
    for make in (Simulator, partial(Accelerated, wake_ns, link)):
        monkeypatch.setattr(study_module, "Simulator", make)
        study = make_study(trace, hardware, **settings)
        of_system = get_system(system)
        geometry = study.geometry_of(of_system)
        budget = Memory("100%" if of_system.keeps_everything else memory).budget(geometry, True)
        result.append(study.simulate(of_system, budget, memory, geometry))
    result[1].link.device.close()
    return result[0], result[1]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    passes = random_passes(3, LAYERS, 30, prompt=4, num_requests=3)
    return make_trace(tmp_path_factory.mktemp("trace"), passes, LAYERS, num_requests=3, is_full=True)


def tpot_ns(run: Simulator) -> float:
    assert run.metrics.tpot_s is not None
    return run.metrics.tpot_s * 1e9


# -- the simulator says so ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes_per_s", [5e8, 2e9])
def test_every_preset_takes_as_long_as_the_simulator_says(
    nbytes_per_s: float, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "AHEAD_NBYTES", 1)  # these experts are so small that all that is predicted would be ahead
    result = {}
    for system in can_run(trace):
        simulated, there = both(trace, system, "50%", Link(nbytes_per_s, 7), monkeypatch, wake_ns=50)
        result[system] = tpot_ns(there) / tpot_ns(simulated) - 1
    assert len(result) > 20
    assert {name: off for name, off in result.items() if abs(off) > 0.05} == {}


@pytest.mark.parametrize("segments", [1, 4])
def test_the_tier_behind_it_reads_what_the_simulators_reads(
    segments: int, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, if what was used last never goes. Of `lfu` the newest goes, unless it is just being copied."""
    reads = {}
    for system in ("on-demand", "lru", "lru:host=lfu", "expertly"):
        settings = {"host_memory": "40%", "segments": segments}
        simulated, there = both(trace, system, "20%", Link(2e9, 7), monkeypatch, wake_ns=50, **settings)
        assert isinstance(simulated.link, TieredLink)
        reads[system] = there.link.device.stats()["disk_nbytes"]
        assert reads[system] == pytest.approx(simulated.link.disk_nbytes, rel=0.02 if "lfu" in system else 0)
    assert 100 * 1024 < reads["lru:host=lfu"] < 0.9 * reads["lru"], "routing is skewed: the frequent stay"


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 4])
def test_with_a_perfect_predictor_and_a_link_fast_enough_nothing_is_waited_for(
    segments: int, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(2e9, 7)
    resident, oracle, lru = (
        tpot_ns(both(trace, system, "50%", link, monkeypatch, wake_ns=50, segments=segments)[1])
        for system in ("resident", "oracle", "lru")
    )
    assert oracle <= 1.03 * resident
    assert lru > 1.02 * resident, "there was something to wait for"


@pytest.mark.parametrize("segments", [1, 4])
def test_a_link_that_is_the_limit_is_hardly_ever_idle_in_decode(
    segments: int, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert takes 20 us to come and one to compute; the copy thread wakes up after 4 % of what a segment takes."""
    link = Link(5e7, 0)
    _, run = both(trace, "oracle", "35%", link, monkeypatch, wake_ns=800 // segments, segments=segments)
    begin, end = run.begun_ns[1], run.begun_ns[30]  # the first request's decode steps
    idle = 1 - run.accelerator.busy_ns(begin, end) / (end - begin)
    assert idle < 0.05, idle


# -- what moves goes on ------------------------------------------------------------------------------------------------


def bench_of(streams: Any, num_experts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[WatchedDevice, Disk]:
    """A device of one layer of such experts of 4 KiB, with host memory for all and slots for all twice."""
    shape = Geometry((LayerGeometry(num_experts, 1, 16, 128, 2, 1),))
    disk = Disk(shape)
    disk.let_all_end()
    disk.put(monkeypatch)
    cpu = torch.device("cpu")
    tier = Tier(shape, shape.nbytes)
    return WatchedDevice(cpu, streams, disk, shape, [2 * num_experts], torch.uint8, tier), disk


def test_prefetches_come_while_the_forward_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the clock: 8 copies of 4.096 us one behind the other, in 33 us; nobody asks for anything meanwhile."""
    accelerator = Accelerator(Link(1e9, 0), wake_ns=100)
    monkeypatch.setattr("expertly.engine.cuda.AHEAD_NBYTES", 5000)  # two on the stream
    device, _ = bench_of(accelerator, 8, monkeypatch)
    for expert in range(8):
        device.submit([Span(0, expert, 0, 1, expert)])
        device.wait()
    accelerator.join()
    begin = accelerator.now_ns = accelerator._link_free_ns
    device.prefetch([Span(0, expert, 0, 1, 8 + expert) for expert in range(8)])
    accelerator.sleep(33_000)
    assert accelerator.busy_ns(begin, accelerator.now_ns) == 8 * 4096
    assert [device.poll() for _ in range(9)] == [*(Span(0, e, 0, 1, 8 + e) for e in range(8)), None]
    device.close()


def test_the_copy_thread_goes_on_while_the_forward_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time as it is, from disk through the host tier: nothing but the threads runs."""
    monkeypatch.setattr("expertly.engine.cuda.AHEAD_NBYTES", 1)  # one on the stream: the next begins behind it
    device, disk = bench_of(ThreadStreams(0.001), 8, monkeypatch)
    device.prefetch([Span(0, expert, 0, 1, 8 + expert) for expert in range(8)])
    for _ in range(2000):
        if sum(device.streams.is_past(transfer.mark) for transfer in device._under_way.on_stream) == 8:
            break
        time.sleep(0.005)
    for _ in range(8):
        span = device.poll()
        assert span is not None
        blocks = slice(span.slot * 128, span.slot * 128 + 128)
        assert bytes(device.rows(0)[blocks].numpy().tobytes()) == disk.content(span)
    device.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "expertly-copies"]


def test_what_ends_the_copy_thread_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ThreadStreams):
        def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> Any:
            raise RuntimeError("the device fell off the bus")

    device, _ = bench_of(Broken(0.0), 2, monkeypatch)
    device.submit([Span(0, 0, 0, 1, 0)])
    with pytest.raises(RuntimeError, match="fell off the bus"):
        device.wait()
    device.drain()
    device.close()

"""disk -> host tier -> device, with a device that is RAM: the logic of an accelerator, run for real."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.cli.stats_report import report
from expertly.core.costs import Link
from expertly.core.errors import ConfigError, TransferError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import cuda
from expertly.engine.cuda import CudaDevice
from expertly.native.kernels import VARIABLE
from expertly.scheduler.budget import split_budget
from expertly.store.packed import PackedStore
from tests.engine.conftest import Cases
from tests.engine.disk import Disk
from tests.engine.failing import raising
from tests.engine.observe import loaded, open_files, reader_threads
from tests.engine.slot_kernels import put_slot_kernels
from tests.engine.streams import Accelerator, LateStreams, ManualStreams, put_in_place, run_random_layers
from tests.families import generate

pytestmark = pytest.mark.timeout(60)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host_share", "segments"), [(100, 1), (50, 4), (9, 1), (9, 4)])
def test_tokens_are_the_reference_at_every_host_budget(
    host_share: int, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = cases["mixtral"], put_in_place(monkeypatch, host_share)
    with loaded(case.store, memory="25%", segments=segments, verify="never") as model:
        assert generate(model, case.prompts) == case.tokens
        made[0].tier.check()
        moved, stats = made[0].stats(), expertly.stats(model).as_dict()
        assert moved["copied_nbytes"] == stats["bytes_loaded"]
        assert moved["disk_nbytes"] + moved["host_hit_nbytes"] == moved["copied_nbytes"]
        assert moved["disk_nbytes"] > 0
        if host_share == 100:
            assert moved["disk_nbytes"] <= stats["expert_bytes"], "the host tier reads an expert once"
            assert moved["host_hit_nbytes"] > 0


@pytest.mark.parametrize("kernels", ["torch", "over slots"])
@pytest.mark.parametrize(
    ("system", "segments"),
    [
        ("moepic:tau=2", 4),
        ("moe-infinity", 1),
        ("expertly-ahead", 4),
        ("fmoe", 4),
        ("promoe", 1),
        ("lru:prediction=speculative", 4),
    ],
)
def test_no_system_changes_a_token_on_an_accelerator(
    system: str, segments: int, kernels: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is in a slot until its copy was waited for; torch computes, as on a device that is no processor. With
    kernels over slots, systems that compute at once begin before the choice is known.
    """
    monkeypatch.setenv(VARIABLE, "torch")
    case, made = cases["qwen3_moe"], put_in_place(monkeypatch)
    if kernels == "over slots":
        put_slot_kernels(monkeypatch)
    with loaded(case.store, memory="45%", system=system, segments=segments) as model:
        for _ in range(3):
            assert generate(model, case.prompts) == case.tokens
        made[0].tier.check()
        stats = expertly.stats(model).as_dict()
        if handle(model).engine.prefetching is not None:
            assert stats["phases"]["decode"]["prefetched"] > 0
        assert stats["synchronisations_per_pass"] == len(stats["layers"]) + 2, "a layer's choice; NaN in stack and head"
        computes_at_once = system not in ("moepic:tau=2", "pre-gated")  # parts of experts; nothing is kept
        assert (stats["kernels"]["early"] > 0) == (computes_at_once and kernels == "over slots")
        times = handle(model).engine.executor.shard.times
        if times is not None:
            timing = times.timing()
            assert times.is_known and min(timing.moe_ns) >= 3 * 10_000, "three kernels at the least"


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("segments", [1, 4])
def test_the_host_waits_once_a_layer(
    num_tokens: int, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the router's choice: of nothing else on the device it wants to know the value."""
    monkeypatch.setenv(VARIABLE, "torch")
    made = put_in_place(monkeypatch)
    with loaded(cases["qwen3_moe"].store, memory="45%", segments=segments) as model:
        run_random_layers(model, num_tokens)
        assert made[0].stats()["synchronisations"] == 6


def test_the_first_copy_waits_for_what_the_slots_memory_was_used_for(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(Link(1e9, 0))
    accelerator.kernel(50_000)  # reads memory that was given back since
    bench = Bench(24, monkeypatch, accelerator)
    bench.disk.let_all_end()
    bench.device.submit([span(0)])
    bench.device.wait()
    assert accelerator.copied[0].begin_ns == 50_000
    bench.device.close()


def test_closing_gives_the_host_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    class Pinning(LateStreams):
        def register(self, memory: torch.Tensor) -> Callable[[], None]:
            pinned.append(memory.data_ptr())
            return pinned.clear

    bench = Bench(24, monkeypatch, Pinning())
    assert pinned
    bench.disk.let_all_end()
    bench.device.submit([span(0)])
    bench.device.wait()
    region = weakref.ref(bench.tier.pool.regions[0])
    bench.device.close()
    assert region() is None and not pinned


def test_streams_are_those_of_a_device_with_a_number_and_a_failed_pinning_leaves_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a runtime has it: whoever launches a kernel next is told of an error that nobody asked for."""
    errors: list[str] = []
    waited: list[torch.device] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            errors.append("out of memory")
            return 2

    def launch(size: int, device: torch.device) -> torch.Tensor:
        if errors:
            raise RuntimeError(errors.pop())
        return torch.ones(size)

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", launch)
    streams = cuda.CudaStreams(torch.device("cuda"))
    assert streams._copy_stream.device == torch.device("cuda:1")
    with pytest.raises(OSError, match="8 B cannot be registered"):
        streams.register(torch.ones(8, dtype=torch.uint8))
    assert not errors
    streams.synchronize()
    assert waited == [torch.device("cuda:1")], "all of its streams, whichever thread has queued something"


class Unpinnable(LateStreams):
    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        raise OSError("it cannot be registered")


def test_memory_that_cannot_be_registered_is_not_page_locked(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    case, how = cases["mixtral"], "pageable; it cannot be registered"
    put_in_place(monkeypatch, make=Unpinnable)
    with loaded(case.store, memory="25%", segments=4) as model:
        assert generate(model, case.prompts) == case.tokens
        stats = expertly.stats(model).as_dict()
        assert stats["devices"][0]["host_memory"] == how
        assert f"[host memory: {how}]" in report(stats)


def test_what_fails_behind_the_pool_leaves_nothing(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PackedStore.open(cases["qwen3_moe"].store)
    geometry = store.geometry()
    slots = split_budget(geometry, geometry.nbytes).pool_slots()
    threads = len(reader_threads())
    monkeypatch.setattr(cuda, "Readers", raising(ConfigError("no readers")))
    with pytest.raises(ConfigError, match="no readers"):
        CudaDevice(torch.device("cpu"), LateStreams(), store, geometry, slots, torch.float32, geometry.nbytes)
    assert len(reader_threads()) == threads and open_files(store.folder) == []


# -- prefetches beside loads, story by story: disk and streams get on when they are told to --------------------------

NUM_EXPERTS = 8


class Bench:
    """A device of 3 layers of 8 experts, one segment each, whose host tier has room for `num_host` of all of them."""

    def __init__(self, num_host: int, monkeypatch: pytest.MonkeyPatch, streams: Any = None) -> None:
        nbytes = 4 << 20  # one prefetched span occupies all readers
        shape = Geometry((LayerGeometry(NUM_EXPERTS, 1, 2048, nbytes // 4096, 2, 1),) * 3)
        self.disk, self.streams = Disk(shape), ManualStreams() if streams is None else streams
        self.disk.put(monkeypatch)
        monkeypatch.setattr(cuda, "AHEAD_NBYTES", 1)
        host_nbytes = num_host * nbytes
        self.device = CudaDevice(torch.device("cpu"), self.streams, self.disk, shape, [32], torch.uint8, host_nbytes)
        if streams is None:
            self.streams.num_over = self.streams.num_kernels  # what the slots' memory was before
        self.poll, self.tier = self.device.poll, self.device.tier

    def arrived(self, count: int) -> None:
        """Wait until the readers have handed over so many more spans, if they still read; the device sees them."""
        for _ in range(min(count, len(self.tier.loading))):
            self.device._read(self.tier.readers.wait())
        self.device._begin_prefetches()

    def in_host(self, *spans: Span) -> None:
        """Bring these into the host tier, and to the device."""
        self.disk.let_all_end()
        self.device.submit(spans)
        self.wait(len(spans))
        self.disk.hold()
        self.disk.begun.clear()

    def check(self, span: Span | None) -> Span:
        assert span is not None
        rows = self.device.rows(span.layer)
        neurons = self.disk.geometry.blocks_per_segment(span.layer)
        assert bytes(rows[span.slot * neurons : (span.slot + 1) * neurons].numpy()) == self.disk.content(span)
        return span

    def wait(self, count: int) -> set[Span]:
        return {self.check(self.device.wait()) for _ in range(count)}

    def after_a_copy(self) -> Span:
        """One more copy runs: what arrives."""
        self.streams.let(1)
        return self.check(self.poll())


MakeBench = Callable[[int], Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(num_host: int) -> Bench:
        made.append(Bench(num_host, monkeypatch))
        return made[-1]

    yield make
    for bench in made:
        bench.disk.let_all_end()
        bench.device.drain()
        bench.device.close()


def span(expert: int, layer: int = 0, slot: int | None = None) -> Span:
    return Span(layer, expert, 0, 1, layer * NUM_EXPERTS + expert if slot is None else slot)


def again(expert: int) -> Span:
    """The same expert into another slot."""
    return span(expert, 0, 24 + expert)


def test_one_prefetch_is_on_the_stream_and_none_beside_a_load(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host(*[span(i) for i in range(5)])
    bench.device.prefetch([again(0), again(1), again(2)])
    assert len(bench.streams.queue) == 1 and bench.poll() is None
    bench.device.submit([again(3)])
    assert len(bench.streams.queue) == 2, "the load is right behind it"
    assert bench.after_a_copy() == again(0)
    assert len(bench.streams.queue) == 1, "frozen while the load moves"
    assert bench.after_a_copy() == again(3)
    assert len(bench.streams.queue) == 1 and bench.poll() is None, "it goes on"
    assert [bench.after_a_copy(), bench.after_a_copy()] == [again(1), again(2)]
    assert not bench.streams.queue and bench.poll() is None
    assert bench.device.stats()["host_hit_nbytes"] == 4 * 4 << 20


def test_a_prefetch_does_not_make_the_stream_wait_for_kernels(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host(span(0), span(1))
    bench.device.used([span(1)])
    target = span(0, slot=span(1).slot)
    bench.device.prefetch([target])
    assert not bench.streams.queue, "a kernel reads the slot"
    bench.device.submit([again(0)])
    assert bench.wait(1) == {again(0)}, "a load does not wait for that kernel"
    bench.streams.num_over = bench.streams.num_kernels
    assert bench.poll() is None and len(bench.streams.queue) == 1
    assert bench.after_a_copy() == target


def test_what_is_neither_read_nor_copied_is_cancelled_wherever_it_waits(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host(span(0), span(1))
    bench.device.prefetch([again(0), again(1), span(2), span(3), span(4, layer=1)])
    assert len(bench.streams.queue) == 1
    bench.disk.until_begun(4)  # 2 is being read, 3 is not
    assert bench.device.cancel(0) == [again(1), span(3)]
    bench.device.submit([span(3)])  # the layer needs it, and waits for 0 and 2, too
    assert bench.wait(1) == {again(0)}
    bench.disk.let_all_end()
    assert bench.wait(2) == {span(2), span(3)}
    bench.arrived(1)
    assert bench.after_a_copy() == span(4, layer=1)
    assert bench.disk.begun == [(0, 2)] * 4 + [(0, 3)] * 4 + [(1, 4)] * 4
    bench.tier.check()
    moved = bench.device.stats()
    assert moved["disk_nbytes"] + moved["host_hit_nbytes"] == moved["copied_nbytes"]


def test_a_begun_read_of_the_running_layer_is_copied_as_a_load_is(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host(span(0))
    bench.device.prefetch([span(2)])
    bench.disk.until_begun(4)
    assert bench.device.cancel(0) == []
    bench.streams.hold_compute = lambda mark: None  # type: ignore[method-assign]
    bench.device.submit([again(0)])  # is on the stream, and stays there
    assert bench.device.wait() == again(0)
    bench.disk.let_all_end()
    bench.arrived(1)
    assert len(bench.streams.queue) == 2, "its copy is queued though a load moves"
    assert bench.device.wait() == span(2)


def test_a_load_takes_the_host_tier_s_room_from_what_is_not_begun(make: MakeBench) -> None:
    bench = make(3)
    prefetched, needed = [span(i, layer=1) for i in range(3)], [span(i) for i in range(3)]
    bench.device.prefetch(prefetched)
    bench.disk.until_begun(4)
    bench.device.submit(needed)
    bench.disk.let_end(*[(1, 0)] * 4)
    assert bench.disk.until_begun(8)[4:] == [(0, 0)] * 4
    bench.disk.let_all_end()
    seen = bench.wait(3)
    assert seen == set(needed), "loads first"
    for _ in range(2000):
        bench.streams.synchronize()
        if (arrived := bench.poll()) is not None:
            seen.add(bench.check(arrived))
        elif bench.tier.loading:
            bench.arrived(1)
    assert seen == {*prefetched, *needed}, "and the prefetches come all the same"
    bench.tier.check()


def test_a_failed_prefetch_is_raised_and_drain_forgets_the_rest(make: MakeBench) -> None:
    bench = make(24)
    bench.in_host(span(0), span(1))
    bench.disk.let_all_end()
    bench.disk.fails = lambda layer, expert: expert == 5
    bench.device.prefetch([again(0), again(1), span(5), span(6)])
    with pytest.raises(TransferError, match=r"at offset (20971520|22020096|23068672|24117248) "):
        for _ in range(4):
            bench.device.wait()
    bench.device.drain()
    assert bench.poll() is None and not bench.streams.queue and bench.device.cancel(0) == []
    bench.tier.check()
    bench.disk.fails = lambda layer, expert: False
    bench.device.submit([span(5)])
    assert bench.wait(1) == {span(5)}

"""disk -> host tier -> device, with a device that is RAM: the logic of an accelerator, run for real."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.cli.stats_report import report
from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Span
from expertly.engine import cuda
from expertly.engine.cuda import CudaDevice
from expertly.native.kernels import VARIABLE
from expertly.scheduler.budget import split_budget
from expertly.scheduler.tier import Tier
from expertly.store.packed import PackedStore
from tests.engine.conftest import Cases
from tests.engine.disk import Disk
from tests.engine.observe import loaded, open_files, reader_threads
from tests.engine.slot_kernels import put_slot_kernels
from tests.engine.streams import Accelerator, LateStreams, Link, put_in_place
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
    system: str, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is in a slot until its copy was waited for; what computes at once begins before the choice is known."""
    monkeypatch.setenv(VARIABLE, "torch")
    case, made = cases["qwen3_moe"], put_in_place(monkeypatch)
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
        assert (stats["kernels"]["early"] > 0) == computes_at_once
        times = handle(model).engine.executor.shard.times
        if times is not None:
            timing = times.timing()
            assert times.is_known and min(timing.moe_ns) >= 3 * 10_000, "three kernels at the least"


def load_one(streams: Any, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device with such streams, to which one expert was loaded. See test_prefetch_transports.py for many."""
    shape = Geometry((LayerGeometry(8, 1, 2048, 64, 2, 1),))
    disk = Disk(shape)
    disk.put(monkeypatch)
    disk.let_all_end()
    device = CudaDevice(torch.device("cpu"), streams, disk, shape, [8], torch.uint8, Tier(shape, shape.nbytes))
    device.submit([Span(0, 3, 0, 1, 5)])
    assert device.wait().expert == 3
    return device


def test_the_first_copy_waits_for_what_the_slots_memory_was_used_for(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(Link(1e9, 0))
    accelerator.kernel(50_000)  # reads memory that was given back since
    load_one(accelerator, monkeypatch).close()
    assert accelerator.copied[0].begin_ns == 50_000


def test_closing_gives_the_host_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    class Pinning(LateStreams):
        def register(self, memory: torch.Tensor) -> Callable[[], None]:
            pinned.append(memory.data_ptr())
            return pinned.clear

    device = load_one(Pinning(), monkeypatch)
    region = weakref.ref(device.tier.pool.regions[0])
    assert pinned
    device.close()
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
    monkeypatch.setattr(cuda, "Readers", Mock(side_effect=ConfigError("no readers")))
    with pytest.raises(ConfigError, match="no readers"):
        tier = Tier(geometry, geometry.nbytes)
        CudaDevice(torch.device("cpu"), LateStreams(), store, geometry, slots, torch.float32, tier)
    assert len(reader_threads()) == threads and open_files(store.folder) == []

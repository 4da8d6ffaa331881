"""disk -> host tier -> device, with a device that is RAM: the logic an accelerator shares, run for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import expertly
from expertly import api
from expertly.core.errors import ConfigError
from expertly.engine.tiered import CudaDevice
from expertly.scheduler.budget import split_budget
from expertly.store.packed import PackedStore
from tests.engine.conftest import Cases
from tests.engine.observe import open_files, reader_threads
from tests.families import generate


class LateStreams:
    """A device whose copies run only when somebody waits for them, so that order mistakes show as wrong tokens."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self.num_copies = 0
        self._done = 0

    def is_capturing(self) -> bool:
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        self._queue.append(lambda: target.copy_(source))
        self.num_copies += 1

    def mark_copy(self) -> int:
        return self.num_copies

    def mark_compute(self) -> int:
        return 0

    def is_past(self, mark: int) -> bool:
        return mark <= self._done

    def hold_compute(self, mark: int) -> None:
        while self._done < mark:
            self._queue.pop(0)()
            self._done += 1

    def synchronize(self) -> None:
        self.hold_compute(self.num_copies)

    def stall_ns(self) -> int:
        return 0

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize("host_share", [100, 50, 9])
@pytest.mark.parametrize("segments", [1, 4])
def test_tokens_are_the_reference_at_every_host_budget(
    host_share: int, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["mixtral"]
    made: list[CudaDevice] = []

    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *host: Any) -> CudaDevice:
        nbytes = geometry.nbytes * host_share // 100
        made.append(CudaDevice(device, LateStreams(), store, geometry, slots, dtype, nbytes))
        return made[0]

    monkeypatch.setattr(api, "make_backend", make_backend)
    model, _ = expertly.load(str(case.store), memory="25%", segments=segments, device="cpu")
    assert generate(model, case.prompts) == case.tokens
    made[0].tier.check()
    moved = made[0].stats()
    stats = expertly.stats(model).as_dict()
    assert moved["copied_nbytes"] == stats["bytes_loaded"]
    assert moved["disk_nbytes"] + moved["host_hit_nbytes"] == moved["copied_nbytes"]
    if host_share == 100:
        assert moved["disk_nbytes"] <= stats["expert_bytes"], "the host tier reads an expert once"
        assert moved["host_hit_nbytes"] > 0
    else:
        assert moved["disk_nbytes"] > 0
    expertly.unload(model)


@pytest.mark.parametrize("host_share", [100, 40])
@pytest.mark.parametrize("segments", [1, 4])
def test_loading_ahead_changes_no_token(
    host_share: int, segments: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["mixtral"]

    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *host: Any) -> CudaDevice:
        nbytes = geometry.nbytes * host_share // 100
        return CudaDevice(device, LateStreams(), store, geometry, slots, dtype, nbytes)

    monkeypatch.setattr(api, "make_backend", make_backend)
    model, _ = expertly.load(
        str(case.store), memory="50%", segments=segments, device="cpu", system="fmoe", maps=None, matcher="inline"
    )
    for _ in range(2):
        assert generate(model, case.prompts) == case.tokens
    engine = api.handle(model).engine
    assert sum(counters.decode.prefetched for counters in engine.scheduler.counters) > 0
    engine.scheduler.check()
    expertly.unload(model)


class OrderedStreams(LateStreams):
    """Numbers the marks of the compute stream and notes what each copy waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_uses = 0
        self.copies: list[tuple[torch.Tensor, list[int]]] = []

    def mark_compute(self) -> int:
        self.num_uses += 1
        return self.num_uses

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: list[Any]) -> None:
        self.copies.append((target, after))
        super().copy(target, source, after)


def test_a_copy_waits_for_the_last_use_of_each_slot_it_overwrites(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, case, num_reused = OrderedStreams(), cases["mixtral"], 0

    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *host: Any) -> CudaDevice:
        return CudaDevice(device, streams, store, geometry, slots, dtype, geometry.nbytes)

    monkeypatch.setattr(api, "make_backend", make_backend)
    model, _ = expertly.load(str(case.store), memory="25%", segments=4, device="cpu")
    backend = api.handle(model).engine.device
    base, nbytes = backend.rows(0).data_ptr(), api.handle(model).store.geometry(4).segment_nbytes(0)
    last_use: dict[int, int] = {}  # slot -> mark of the kernels that read it last and have not been waited for
    mark_used = backend.used

    def used(span: Any) -> None:
        check()  # the copies queued before this use
        mark_used(span)
        last_use.update(dict.fromkeys(range(span.slot, span.slot + span.num_segments), streams.num_uses))

    def check() -> None:
        nonlocal num_reused
        for target, after in streams.copies:
            slot = (target.data_ptr() - base) // nbytes
            for overwritten in range(slot, slot + target.nbytes // nbytes):
                if overwritten in last_use:
                    num_reused += 1
                    assert max(after, default=0) >= last_use.pop(overwritten), "the copy does not wait for a reader"
        streams.copies.clear()

    submit = backend.submit

    def submit_and_check(spans: Any) -> None:
        submit(spans)
        check()

    monkeypatch.setattr(backend, "used", used)
    monkeypatch.setattr(backend, "submit", submit_and_check)
    assert generate(model, case.prompts) == case.tokens
    assert num_reused > 50
    expertly.unload(model)


def test_memory_that_cannot_be_pinned_leaves_nothing_behind(cases: Cases) -> None:
    class Unpinnable(LateStreams):
        def register(self, memory: torch.Tensor) -> Callable[[], None]:
            raise ConfigError("host_memory: cannot be page-locked")

    store = PackedStore.open(cases["qwen3_moe"].store)
    geometry = store.geometry()
    slots = split_budget(geometry, geometry.nbytes).pool_slots()
    threads = len(reader_threads())
    with pytest.raises(ConfigError, match="page-locked"):
        CudaDevice(torch.device("cpu"), Unpinnable(), store, geometry, slots, torch.float32, geometry.nbytes)
    assert len(reader_threads()) == threads and open_files(store.folder) == []

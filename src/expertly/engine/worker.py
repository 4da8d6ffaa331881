"""A worker's side of experts on several machines: a Shard on the CPU, over its own copy of the packed store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from expertly.core.errors import ConfigError, StoreError
from expertly.core.placement import Share
from expertly.core.resources import available_host_nbytes, granted_cpus, parse_memory
from expertly.engine import process, wire
from expertly.engine.cpu import CpuDevice
from expertly.engine.pair import Address, Pair
from expertly.engine.shard import Shard
from expertly.engine.stats import of_device
from expertly.model.loading import load_experts
from expertly.scheduler.budget import split_budget
from expertly.scheduler.systems import System, get_runnable
from expertly.store.cache import stores_folder
from expertly.store.manifest import Manifest
from expertly.store.packed import ExtentSource, LayerFile, PackedStore, is_extra, is_packed_store

SPARED_PERCENT = 10
"""Of the free memory, for the rows of prompts, and because Ray ends processes where 95 % of a machine is taken."""


def serve(memory: str | int, threads: int | None, address: tuple[str, int, str]) -> None:
    """What a worker's process does: answer the engine that waits at this address, until it closes the connection.
    `threads` None: the processors of this machine.
    """
    process.keep_few_primitives()
    process.give_back_large_blocks()
    process.keep_off_trapped_instructions()
    torch.set_num_threads(min(threads or granted_cpus(), granted_cpus()))
    worker, engine = ExpertWorker(memory), Pair.join(Address(*address))
    with suppress(ConnectionError):  # it has ended
        while True:
            engine.send(worker.answer(engine.receive()))


class StoreOfShare:
    """The packed store as one device sees it: only its experts, by their numbers on that device."""

    def __init__(self, store: ExtentSource, share: Share) -> None:
        self._store = store
        self._share = share

    def layer_file(self, layer: int) -> LayerFile:
        whole = self._store.layer_file(layer)
        return whole._replace(places=[whole.places[expert] for expert in self._share.experts[layer]])


def make_cpu_shard(name: str, store: PackedStore, share: Share, system: System, nbytes: int) -> Shard:
    """The experts of `share` on the CPU, in `nbytes`. Raises BudgetError where that is too little."""
    geometry = share.geometry
    budget = system.budget(geometry, split_budget(geometry, nbytes))
    dtype = getattr(torch, store.manifest.dtype)
    device = CpuDevice(StoreOfShare(store, share), geometry, budget.pool_slots(), dtype)
    return Shard(name, system.scheduler(geometry, budget), device)


class ExpertWorker:
    """Answers the messages of one engine, one at a time. `memory`: for experts, as in `expertly.load`; "auto": what is
    free, less SPARED_PERCENT.
    """

    def __init__(self, memory: str | int = "auto") -> None:
        self._memory = memory
        self._shard: Shard | None = None

    def answer(self, message: bytes) -> bytes:
        """Never raises: an error is an answer."""
        try:
            with torch.inference_mode():
                return self._answer(wire.Kind(message[0]), message)
        except Exception as error:  # whatever it is: the engine is told, and computes these experts itself
            return wire.message(wire.Kind.FAILED, {"reason": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()

    def _answer(self, kind: wire.Kind, message: bytes) -> bytes:
        if kind is wire.Kind.LAYER:
            return wire.ran_message(self._run_layer(message))
        asked, _ = wire.parts_of(message)
        if kind is wire.Kind.HELLO:
            return wire.message(wire.Kind.DONE, {"memory_nbytes": self._memory_for(asked)})
        if kind is wire.Kind.OPEN:
            self._open(asked)
        return wire.message(wire.Kind.DONE, self._stats())

    def _memory_for(self, asked: Mapping[str, Any]) -> int:
        """Raises ConfigError where the engine is of another version."""
        if asked["version"] != wire.VERSION:
            raise ConfigError(
                f"its messages are of version {wire.VERSION}, the engine's of {asked['version']}; install the same "
                "expertly on all machines"
            )
        nbytes = parse_memory(self._memory, asked["expert_nbytes"], "memory")
        return available_host_nbytes() * (100 - SPARED_PERCENT) // 100 if nbytes is None else nbytes

    def _open(self, asked: Mapping[str, Any]) -> None:
        """Hold the experts that are placed here. Raises StoreError where it does not have the engine's store,
        BudgetError where its memory is too little. An engine ends a worker that raises, here or in a layer.
        """
        store = open_same_store(Path(asked["folder"]), asked["store"])
        store = replace(store, check_every=asked["check_every"]) if asked["check_every"] else replace(store, sums=())
        share = Share(store.geometry(asked["segments"]), asked["experts"])
        self._system = system = get_runnable(asked["system"])
        self._shard = shard = make_cpu_shard(asked["name"], store, share, system, asked["memory_nbytes"])
        shard.bind(load_experts(store.folder, store.manifest, shard.device.dtype), share.experts)
        for layer in range(share.geometry.num_layers) if system.keeps_everything else ():
            shard.preload(layer)

    def _run_layer(self, message: bytes) -> wire.LayerRan:
        shard = self._shard
        assert shard is not None, "it has been opened"
        begin = time.perf_counter_ns()
        begins, work, hidden = wire.layer_in(message, shard.device.dtype)
        if begins:
            shard.begin()
        outputs, waits = shard.run_layer(work, hidden, None)
        end = time.perf_counter_ns()
        shard.note_times(work.router, begin, end, waits)
        return wire.LayerRan(outputs, sum(stop - start for start, stop in waits), end - begin)

    def _stats(self) -> dict[str, Any]:
        shard = self._shard
        assert shard is not None, "it has been opened"
        return {
            "device": of_device(shard, self._system),
            "pid": os.getpid(),
            "kernels": shard.kernels.facts(),
            "layers": [layer.as_dict() for layer in shard.scheduler.counters],
            "resident": shard.scheduler.cache.residency(),
        }


def store_facts(manifest: Manifest) -> dict[str, Any]:
    """What two copies of a store must have in common."""
    files = {name: [file.nbytes, file.checksum] for name, file in manifest.files.items() if not is_extra(name)}
    return {"identity": manifest.identity, "dtype": manifest.dtype, "files": files}


def open_same_store(folder: Path, facts: Mapping[str, Any]) -> PackedStore:
    """The store at `folder`, or of the same name in this machine's cache. Raises StoreError where it lacks `facts`."""
    if not is_packed_store(folder):
        cached = stores_folder() / folder.name
        if not is_packed_store(cached):
            raise StoreError(f"no packed store at {folder} nor at {cached}; copy it there")
        folder = cached
    store = PackedStore.open(folder)
    if store_facts(store.manifest) != facts:
        raise StoreError(f"the store at {folder} differs from the engine's; copy the engine's there")
    return store

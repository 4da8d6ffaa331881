"""Starts workers, asks what memory they have, and has them hold their experts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from expertly.core.errors import ConfigError
from expertly.core.placement import Share
from expertly.core.units import format_nbytes
from expertly.engine import wire
from expertly.engine.remote import Peer, RemoteShard, ask, result_of
from expertly.engine.worker import SPARED_PERCENT, make_cpu_shard, store_facts
from expertly.scheduler.budget import least_nbytes
from expertly.scheduler.presets import BASE_SYSTEM, get_runnable
from expertly.scheduler.system import System
from expertly.store.packed import PackedStore


def start_workers(workers: str | int, memory: str | int, opened: ExitStack) -> Sequence[Peer]:
    """The workers of the options `workers` and `worker_memory`; `opened` ends them. Raises ConfigError."""
    from expertly.engine.ray_workers import start_ray_workers  # Ray is optional

    return start_ray_workers(workers, memory, opened)


def memory_of_workers(
    peers: Sequence[Peer], expert_nbytes: int, memory: str | int, own_nbytes: int, *, is_own_stated: bool
) -> tuple[list[int], bool]:
    """What each worker can give experts, and whether workers and this process share one machine's memory equally.

    `memory`: the option `worker_memory`. `own_nbytes`: what devices here would give experts without workers. With
    "auto", workers on this machine get equal parts of that, or where it `is_own_stated`, of what it leaves. Raises
    ConfigError where a worker does not answer, or is of another version.
    """
    hello = wire.asking(wire.Kind.HELLO, {"version": wire.VERSION, "expert_nbytes": expert_nbytes})
    answers = [ask(peer, hello) for peer in peers]
    told = [result_of(peer, answer)["memory_nbytes"] for peer, answer in zip(peers, answers, strict=True)]
    if memory != "auto" or not all(peer.is_here for peer in peers):
        return told, False
    if is_own_stated:
        return [max(0, nbytes - own_nbytes) // len(peers) for nbytes in told], False
    if own_nbytes < expert_nbytes:  # what they need beside experts
        own_nbytes = own_nbytes * (100 - SPARED_PERCENT) // 100
    return [own_nbytes // (len(peers) + 1)] * len(peers), True


def open_workers(
    peers: Sequence[Peer],
    shares: Sequence[Share],
    *,
    memories: Sequence[int],
    store: PackedStore,
    system: System,
    staging: int | None,
    deadline_s: float,
) -> list[RemoteShard]:
    """Have each worker hold the experts of its share. Raises ConfigError naming the worker that cannot, and why."""
    facts = store_facts(store.manifest)
    dtype = getattr(torch, store.manifest.dtype)
    base, found = get_runnable(BASE_SYSTEM), []
    for peer, share, nbytes in zip(peers, shares, memories, strict=True):
        needed = share.geometry.nbytes
        if system.keeps_everything and nbytes < needed:
            raise ConfigError(
                f"workers: {peer.name} has {format_nbytes(nbytes)} for experts, and system {system.name!r} keeps all "
                f"of its {format_nbytes(needed)}"
            )
        opening = {
            "name": peer.name,
            "folder": str(store.folder.absolute()),
            "store": facts,
            "check_every": store.check_every if store.sums or store.codec != "none" else 0,
            "segments": share.geometry.segments_per_expert,
            "experts": share.experts,
            "system": system.name,
            "memory_nbytes": min(nbytes, needed),
            "staging": staging,
        }
        standby = partial(make_cpu_shard, peer.name, store, share, base, least_nbytes(share.geometry))
        found.append(RemoteShard(peer, share, wire.asking(wire.Kind.OPEN, opening), standby, dtype, deadline_s))
    for one in found:  # all of them open at the same time
        one.wait_open()
    return found

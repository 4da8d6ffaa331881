"""A model's experts on this machine's device and in workers: starts the workers, asks what memory they have, has them
hold their experts, and runs layers with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from expertly.core.errors import ConfigError
from expertly.core.messages import Phase
from expertly.core.observation import Routed
from expertly.core.placement import Placement, Share
from expertly.core.resources import granted_cpus
from expertly.core.units import format_nbytes
from expertly.engine import wire
from expertly.engine.compute import Dispatch, Early, part_of
from expertly.engine.peer import HOST, OPENING_S, LocalProcess, Peer
from expertly.engine.remote import LOST, RemoteShard, words_of
from expertly.engine.shard import Shard, Waits
from expertly.engine.worker import make_cpu_shard, store_facts
from expertly.scheduler.budget import least_nbytes
from expertly.scheduler.counters import LayerCounters
from expertly.scheduler.systems import BASE_SYSTEM, System, get_runnable
from expertly.store.packed import PackedStore


def start_workers(workers: str | int, memory: str | int, opened: ExitStack) -> Sequence[Peer]:
    """The workers of the option `workers`: how many on this machine, or the address of a Ray cluster. `memory`: for
    experts in each; "auto" is what is free there. `opened` ends them. Raises ConfigError.
    """
    address = str(workers)
    if not address.removeprefix("-").isdigit():
        from expertly.engine.ray_workers import start_ray_workers  # Ray is optional

        launches = start_ray_workers(address, memory)
    elif (num := int(address)) < 1:
        raise ConfigError(f"workers={workers!r}: accepted: a number from 1, or the address of a Ray cluster")
    elif memory == "auto":
        raise ConfigError(
            f"workers={num}: they share this machine's memory; accepted: with `memory`, an amount or a share for each"
        )
    else:
        local = partial(LocalProcess, memory, max(1, granted_cpus() // (num + 1)))
        launches = [(f"local-{number}", HOST, local) for number in range(1, num + 1)]
    peers = []
    for name, host, launch in launches:
        with _naming(name):
            peers.append(Peer(name, host, launch))
        opened.callback(peers[-1].end)
    return peers


@contextmanager
def _naming(worker: str) -> Iterator[None]:
    """Raises ConfigError naming the worker, and the reason why it is lost."""
    try:
        yield
    except LOST as error:
        raise ConfigError(f"workers: {worker}: {words_of(error)}") from error


def _ask_all(peers: Sequence[Peer], messages: Sequence[bytes]) -> list[dict[str, Any]]:
    """What each answers, all at the same time. Raises ConfigError naming a worker that does not."""
    for peer, message in zip(peers, messages, strict=True):
        with _naming(peer.name):
            peer.send(message)
    answers = []
    for peer in peers:
        with _naming(peer.name):
            answers.append(wire.parts_of(peer.receive(OPENING_S))[0])
    return answers


def memory_of_workers(peers: Sequence[Peer], expert_nbytes: int) -> list[int]:
    """What each can give experts. Raises ConfigError where one does not answer, or is of another version."""
    hello = wire.message(wire.Kind.HELLO, {"version": wire.VERSION, "expert_nbytes": expert_nbytes})
    return [answer["memory_nbytes"] for answer in _ask_all(peers, [hello] * len(peers))]


def open_workers(
    peers: Sequence[Peer], shares: Sequence[Share], *, memories: Sequence[int], store: PackedStore, system: System
) -> list[RemoteShard]:
    """Have each worker hold the experts of its share, by the same system. Raises ConfigError naming the worker that
    cannot, and why.
    """
    facts, base = store_facts(store.manifest), get_runnable(BASE_SYSTEM)
    openings = []
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
            "check_every": store.check_every if store.sums else 0,
            "segments": share.geometry.segments_per_expert,
            "experts": share.experts,
            "system": system.name,
            "memory_nbytes": min(nbytes, needed),
        }
        openings.append(wire.message(wire.Kind.OPEN, opening))
    return [
        RemoteShard(
            peer,
            share,
            answer,
            partial(make_cpu_shard, peer.name, store, share, base, least_nbytes(share.geometry)),
            getattr(torch, store.manifest.dtype),
        )
        for peer, share, answer in zip(peers, shares, _ask_all(peers, openings), strict=True)
    ]


class Cluster:
    """The Executor of a model with workers: hidden states are sent to them, this device computes its own experts, and
    the workers' outputs are gathered (MoE-Infinity, appendix B.2).

    The time a layer waits for transfers is that of the device or worker that ended last.
    """

    def __init__(self, placement: Placement, shard: Shard, remotes: Sequence[RemoteShard]) -> None:
        """The shares of the placement are those of `shard`, then of `remotes`."""
        self.placement = placement
        self.geometry = placement.geometry
        self.shard = shard
        shard.begins_early = False  # which experts are here is known with the choice
        self.remotes = remotes
        self.settle, self.note_times = shard.settle, shard.note_times

    def bind(self, modules: Sequence[nn.Module]) -> None:
        self.shard.bind(modules, self.placement.shares[0].experts)
        for remote in self.remotes:
            remote.bind(modules)

    def begin(self) -> None:
        self.shard.begin()
        for remote in self.remotes:
            remote.begin()

    def run_layer(
        self, work: Dispatch, hidden: torch.Tensor, routed: Callable[[], Routed] | None, early: Early | None = None
    ) -> tuple[torch.Tensor, Waits]:
        shard, layer, is_behind = self.shard, work.router.layer, self.shard.device.queues_uses
        near, *away = (
            part_of(work, share.router(work.router), share.experts[layer], hidden.device)
            for share in self.placement.shares
        )
        on_host = shard.to_host(hidden).clone() if is_behind else hidden
        for remote, part in zip(self.remotes, away, strict=True):
            remote.send(part.work, on_host)
        own_outputs, waits = shard.run_layer(near.work, hidden, routed)
        outputs = torch.empty(work.num_rows, hidden.shape[1], dtype=own_outputs.dtype, device=hidden.device)
        if not work.covers_all_rows:
            outputs.zero_()
        outputs.index_copy_(0, near.rows, own_outputs)
        for remote, part in zip(self.remotes, away, strict=True):
            its_outputs, waited_ns = remote.take(part.work, on_host)
            outputs.index_copy_(0, part.rows, its_outputs.to(hidden.device))
            if waited_ns is not None and not is_behind:  # an accelerator's stamps are no times
                waits = [(0, waited_ns)]
        return outputs, waits

    def layer_counters(self, layer: int) -> LayerCounters:
        """Of the shard and the workers together, but times of the layer as a whole, which are the shard's."""
        near, total = self.shard.layer_counters(layer), LayerCounters()
        for part in (near, *(remote.layer_counters(layer) for remote in self.remotes)):
            total.add(part)
        for phase in Phase:
            total.of(phase).stall_ns, total.of(phase).expert_ns = near.of(phase).stall_ns, near.of(phase).expert_ns
        return total

    def abandon(self) -> None:
        for remote in self.remotes:
            remote.abandon()
        self.shard.abandon()

    def close(self) -> None:
        self.shard.close()
        for remote in self.remotes:
            remote.close()

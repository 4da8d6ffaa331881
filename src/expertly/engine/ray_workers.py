"""Workers as Ray actors: one a machine of a cluster, or some on this one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.resources import granted_cpus
from expertly.engine.remote import Answer, Peer, PeerLostError

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ConfigError(
        "workers: Ray is not installed in this Python; `pip install 'expertly[ray]'` brings it"
    ) from error


_STORE_NBYTES = 256 << 20
"""Shared memory of a cluster on this machine alone, for the rows of long prompts."""


_users: set[object] = set()
"""Models with workers in a cluster that was started or joined here. Ray has one cluster a process."""


def start_ray_workers(workers: str | int, memory: str | int, opened: ExitStack) -> Sequence[Peer]:
    """`workers`: how many on this machine, or the address of a Ray cluster, which gives one on each of its other
    machines. `opened` ends them, then leaves the cluster, unless other models use it or this process was in it before;
    a cluster on this machine alone ends with that. Raises ConfigError.
    """
    text = str(workers)
    is_here = text.removeprefix("-").isdigit()
    if is_here and int(text) < 1:
        raise ConfigError(f"workers={workers!r}: accepted: a number from 1, or the address of a Ray cluster")
    if _users or not ray.is_initialized():
        user = object()
        _users.add(user)  # before the cluster is there: a model that is collected meanwhile must not end it
        opened.callback(_leave, user)
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: a layer waits for what others leave
        try:
            if is_here:
                local = {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_NBYTES}
                ray.init(**local, log_to_driver=False, configure_logging=False)
            else:
                ray.init(address=text, log_to_driver=False, configure_logging=False)
        except (RayError, OSError, ValueError, ConnectionError, RuntimeError) as error:
            raise ConfigError(f"workers={workers!r}: {str(error).splitlines()[0]}") from error
    own = ray.get_runtime_context().get_node_id()
    if is_here:
        threads = max(1, granted_cpus() // (int(text) + 1))
        peers = [RayPeer(f"local-{number}", own, memory, threads) for number in range(1, int(text) + 1)]
    else:
        others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
        if not others:
            more = f"`ray start --address {text}` on one"
            raise ConfigError(f"workers={workers!r}: the cluster has no other machine; {more}")
        found = sorted((node["NodeManagerHostname"], node["NodeID"]) for node in others)
        hosts = [host for host, _ in found]
        names = [host if hosts.count(host) == 1 else f"{host} {node[:6]}" for host, node in found]
        peers = [RayPeer(name, node, memory, None) for name, (_, node) in zip(names, found, strict=True)]
    for peer in peers:
        opened.callback(peer.close)
    return peers


def _leave(user: object) -> None:
    _users.discard(user)
    if not _users:
        ray.shutdown()


class RayWorker:
    """The actor: an ExpertWorker in a process of its own."""

    def __init__(self, memory: str | int, threads: int | None) -> None:
        """`threads` None: the machine's processors."""
        from expertly.model.lean import import_lean

        import_lean()
        import torch

        from expertly.engine import process
        from expertly.engine.worker import ExpertWorker

        process.keep_few_primitives()
        process.give_back_large_blocks()
        process.keep_off_trapped_instructions()
        torch.set_num_threads(threads or granted_cpus())
        self._worker = ExpertWorker(memory)

    def answer(self, message: bytes) -> bytes:
        return self._worker.answer(message)


class RayPeer:
    """A Peer whose worker is an actor on one node. The actor ends with this process."""

    def __init__(self, name: str, node: str, memory: str | int, threads: int | None) -> None:
        self.name = name
        self.is_here = threads is not None
        self._node = node
        self._arguments = memory, threads
        self._actor = self._start()

    def _start(self) -> Any:
        where = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return ray.remote(RayWorker).options(num_cpus=0, scheduling_strategy=where).remote(*self._arguments)

    def call(self, message: bytes) -> Answer:
        try:
            return _RayAnswer(self._actor.answer.remote(message))
        except RayError as error:
            raise PeerLostError(_line(error)) from error

    def renew(self) -> None:
        self.close()
        try:
            self._actor = self._start()
        except RayError as error:
            raise PeerLostError(_line(error)) from error

    def close(self) -> None:
        with contextlib.suppress(RayError, ValueError):  # it is dead, or Ray was shut down
            if ray.is_initialized():
                ray.kill(self._actor)


class _RayAnswer:
    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def is_there(self) -> bool:
        return bool(ray.wait([self._reference], timeout=0)[0])

    def result(self, timeout_s: float) -> bytes:
        try:
            content: bytes = ray.get(self._reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError from error
        except RayError as error:
            raise PeerLostError(_line(error)) from error
        return content


def _line(error: BaseException) -> str:
    """Ray's first line, and the last that names an exception: an actor that cannot start says its cause there."""
    first, *others = str(error).strip().splitlines() or [""]
    causes = [line.strip() for line in others if re.match(r"\s*[\w.]*(Error|Exception): ", line)]
    return f"{type(error).__name__}: {' '.join([first, *causes[-1:]])}"

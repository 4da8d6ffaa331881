"""Workers as Ray actors: one a machine of a cluster, or some on this one.

Ray starts them, notices that they die, and carries what is asked beside the layers. Layers go over a
`Pair`, whose round trip takes a seventh of a call of Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.resources import granted_cpus
from expertly.engine import pair, wire
from expertly.engine.remote import Answer, AskedAnswer, Peer, PeerLostError

try:
    import ray
    from ray._private import ray_constants
    from ray._private import worker as ray_driver
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ConfigError(
        "workers: Ray is not installed in this Python; `pip install 'expertly[ray]'` brings it"
    ) from error

_STORE_NBYTES = 256 << 20
"""Shared memory of a cluster on this machine alone, for the rows of long prompts."""

_THIS_MACHINE = "127.0.0.1"

_TAG = "EXPERTLY_CLUSTER"
"""In the environment of each process of a cluster that was started here."""

_END_THEM = """
import os, signal, sys, time
sys.stdin.buffer.read()  # ends with the process that holds the other end, or when the cluster is left
time.sleep(1)
for name in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{name}/environ", "rb") as file:
            if sys.argv[1].encode() in file.read().split(bytes(1)):
                os.kill(int(name), signal.SIGKILL)
    except OSError:
        pass
"""
"""A process that kills the others of a cluster when this one has ended. Ray sees to most of them before."""

_watched: list[int] = []
"""The end of the pipe that shows that process that this one is there."""

_users: set[object] = set()
"""Models with workers in a cluster that was started or joined here. Ray has one cluster a process."""


def start_ray_workers(workers: str | int, memory: str | int, opened: ExitStack) -> Sequence[Peer]:
    """`workers`: how many on this machine, or the address of a Ray cluster, which gives one on each of its other
    machines. `opened` ends them, then leaves the cluster, unless other models use it or this process was in it before;
    a cluster on this machine alone ends with that. Raises ConfigError.
    """
    text = str(workers)
    is_here = text.removeprefix("-").isdigit()
    if not pair.IS_AVAILABLE:
        raise ConfigError(f"workers={workers!r}: this PyTorch has no gloo, by which they are asked")
    if is_here and int(text) < 1:
        raise ConfigError(f"workers={workers!r}: accepted: a number from 1, or the address of a Ray cluster")
    if _users or not ray.is_initialized():
        user = object()
        _users.add(user)  # before the cluster is there: a model that is collected meanwhile must not end it
        opened.callback(_leave, user)
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: a layer waits for what others leave
        options: dict[str, Any] = {"address": text}
        if is_here:
            options = {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_NBYTES}
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray_driver._worker_logs_enabled = False  # it tells of dead workers at length, and RemoteShard in a line
        try:
            with _own_cluster() if is_here else contextlib.nullcontext():
                ray.init(**options, log_to_driver=False, configure_logging=False)
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
        peers = [RayPeer(name, node, memory) for name, (_, node) in zip(names, found, strict=True)]
    for peer in peers:
        opened.callback(peer.close)
    return peers


@contextlib.contextmanager
def _own_cluster() -> Iterator[None]:
    """Ray's processes that are started meanwhile listen on this machine's own address alone, and end with this process,
    however it ends: by themselves, Ray's agents go on after it was killed.
    """
    tag = f"{_TAG}={uuid.uuid4().hex}"
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", "-c", _END_THEM, tag]
        subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    _watched.append(writing)
    before = {name: os.environ.get(name) for name in (_TAG, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)}
    is_enabled = ray_constants.ENABLE_RAY_CLUSTER
    os.environ |= {_TAG: tag.partition("=")[2], ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_enabled
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _leave(user: object) -> None:
    _users.discard(user)
    if not _users:
        ray.shutdown()
        ray_driver._worker_logs_enabled = True
        while _watched:
            os.close(_watched.pop())


class RayWorker:
    """The actor: an ExpertWorker in a process of its own. Ray's thread and that of the pair use it in turns."""

    def __init__(self, memory: str | int, threads: int | None) -> None:
        """`threads` None: the machine's processors."""
        import torch

        from expertly.engine import process
        from expertly.engine.worker import ExpertWorker

        process.keep_few_primitives()
        process.give_back_large_blocks()
        process.keep_off_trapped_instructions()
        torch.set_num_threads(min(threads or granted_cpus(), granted_cpus()))
        self._worker = ExpertWorker(memory)
        self._lock = threading.Lock()
        self._num_opened = 0

    def answer(self, message: bytes) -> bytes:
        with self._lock:
            return self._worker.answer(message)

    def open(self, message: bytes, host: str, port: int) -> bytes:
        """Answer OPEN. Then layers come over a pair with the engine, which waits at this address."""
        with self._lock:
            self._num_opened += 1
            answer = self._worker.answer(message)
        if wire.reason_in(answer) is None:
            args = host, port, self._num_opened
            threading.Thread(target=self._serve, args=args, name="expertly-layers", daemon=True).start()
        return answer

    def _serve(self, host: str, port: int, num_opened: int) -> None:
        """Answer the messages of a pair until it breaks, or the worker is opened again."""
        with contextlib.suppress(ConnectionError):
            own: str = host if host == _THIS_MACHINE else ray.util.get_node_ip_address()
            layers = pair.Pair.join(host, port, own)
            while True:
                message = layers.receive()
                with self._lock:
                    if num_opened != self._num_opened:
                        return
                    answer = self._worker.answer(message)
                layers.send(answer).wait()


class RayPeer:
    """A Peer whose worker is an actor on one node. The actor ends with this process."""

    def __init__(self, name: str, node: str, memory: str | int, threads: int | None = None) -> None:
        self.name = name
        self.is_here = threads is not None
        self._node = node
        self._arguments = memory, threads
        self._actor = self._start()
        self._layers: _Layers | None = None  # until it is open

    def _start(self) -> Any:
        where = NodeAffinitySchedulingStrategy(self._node, soft=False)
        return ray.remote(RayWorker).options(num_cpus=0, scheduling_strategy=where).remote(*self._arguments)

    def ask(self, message: bytes) -> AskedAnswer:
        if message[0] == wire.Kind.OPEN:
            return self._open(message)
        try:
            return _RayAnswer(self._actor.answer.remote(message))
        except RayError as error:
            raise PeerLostError(_line(error)) from error

    def call(self, message: bytes) -> Answer:
        assert self._layers is not None, "it has been opened"
        return self._layers.call(message)

    def renew(self) -> None:
        self.close()
        try:
            self._actor = self._start()
        except RayError as error:
            raise PeerLostError(_line(error)) from error

    def close(self) -> None:
        self._layers = None
        with contextlib.suppress(RayError, ValueError):  # it is dead, or Ray was shut down
            if ray.is_initialized():
                ray.kill(self._actor)

    def _open(self, message: bytes) -> AskedAnswer:
        self._layers = None
        try:
            meeting = pair.Meeting(_THIS_MACHINE if self.is_here else ray.util.get_node_ip_address())
            reference = self._actor.open.remote(message, meeting.host, meeting.port)
        except (RayError, ConnectionError) as error:
            raise PeerLostError(_line(error)) from error
        opening = _Opening(self)
        threading.Thread(target=opening.run, args=(reference, meeting), name=f"open-{self.name}", daemon=True).start()
        return opening


class _Opening:
    """The answer of a worker that opens. It is there once the pair is connected, for which a thread waits."""

    def __init__(self, peer: RayPeer) -> None:
        self._peer = peer
        self._found: Future[tuple[bytes, _Layers | None]] = Future()

    def run(self, reference: Any, meeting: pair.Meeting) -> None:
        try:
            content, layers = ray.get(reference), None
            if wire.reason_in(content) is None:
                layers = _Layers(pair.Pair.accept(meeting))
            self._found.set_result((content, layers))
        except Exception as error:  # whatever it is: who waits is told
            self._found.set_exception(PeerLostError(_line(error)))

    def is_there(self) -> bool:
        return self._found.done()

    def result(self, timeout_s: float) -> bytes:
        try:
            content, self._peer._layers = self._found.result(timeout_s)
        except FutureTimeoutError as error:
            raise TimeoutError from error
        return content


class _Layers:
    """The engine's end of a pair."""

    def __init__(self, connected: pair.Pair) -> None:
        self._pair = connected
        self._on_way: deque[pair.Sent] = deque()  # held until an answer shows that it arrived
        self._num_asked = self._num_answered = 0

    def call(self, message: bytes) -> Answer:
        try:
            self._on_way.append(self._pair.send(message))
        except ConnectionError as error:
            raise PeerLostError(str(error)) from error
        self._num_asked += 1
        return _LayerAnswer(self, self._num_asked)

    def answer(self, number: int, timeout_s: float) -> bytes:
        """Answers before it, which nobody wanted, are dropped."""
        until_s = time.monotonic() + timeout_s
        try:
            while True:
                content = self._pair.receive(max(0.0, until_s - time.monotonic()))
                self._on_way.popleft()
                self._num_answered += 1
                if self._num_answered == number:
                    return content
        except ConnectionError as error:
            raise PeerLostError(str(error)) from error


class _LayerAnswer:
    def __init__(self, layers: _Layers, number: int) -> None:
        self._layers = layers
        self._number = number

    def result(self, timeout_s: float) -> bytes:
        return self._layers.answer(self._number, timeout_s)


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

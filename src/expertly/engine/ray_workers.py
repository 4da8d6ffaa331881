"""Workers on the other machines of a Ray cluster: Ray starts them, and says how they ended."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from expertly.core.errors import ConfigError
from expertly.engine.pair import Address
from expertly.engine.peer import Launch
from expertly.engine.worker import serve

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ConfigError(
        "workers: Ray is not installed in this Python; `pip install 'expertly[ray]'` brings it"
    ) from error


def start_ray_workers(address: str, memory: str | int) -> Sequence[tuple[str, str, Launch]]:
    """Name, this machine's address and how to start it, of one worker on each other machine of the cluster at this
    address, which this process stays in until it ends, as in one that it was in before. Raises ConfigError.
    """
    if not ray.is_initialized():
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
        except (RayError, OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"workers={address!r}: {str(error).splitlines()[0]}") from error
    home = ray.get_runtime_context().get_node_id()
    nodes = [
        (node["NodeManagerHostname"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != home
    ]
    if not nodes:
        more = f"`ray start --address {address}` on one"
        raise ConfigError(f"workers={address!r}: the cluster has no other machine; {more}")
    hosts = [host for host, _ in nodes]
    return [
        (
            host if hosts.count(host) == 1 else f"{host} {node[:6]}",
            ray.util.get_node_ip_address(),
            partial(RayProcess, node, memory),
        )
        for host, node in sorted(nodes)
    ]


class RayProcess:
    """A WorkerProcess that is a task on one node."""

    def __init__(self, node: str, memory: str | int, address: Address) -> None:
        """Raises ConnectionError."""
        strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, max_calls=1, scheduling_strategy=strategy)(serve)
        try:
            self._running = task.remote(memory, None, address)
        except RayError as error:
            raise ConnectionError(_line(error)) from error

    def problem(self) -> str | None:
        try:
            if not ray.wait([self._running], timeout=0)[0]:
                return None
            ray.get(self._running)
        except RayError as error:
            return _line(error)
        return "its process ended"

    def end(self) -> None:
        with contextlib.suppress(RayError, ValueError):  # it is dead, or Ray was shut down
            if ray.is_initialized():
                ray.cancel(self._running, force=True)


def _line(error: BaseException) -> str:
    """Ray's first line, and the last that names an exception: a task that cannot start says its cause there."""
    first, *rest = str(error).strip().splitlines() or [""]
    causes = [line.strip() for line in rest if re.match(r"\s*[\w.]*(Error|Exception): ", line)]
    return f"{type(error).__name__}: {' '.join([first, *causes[-1:]])}"

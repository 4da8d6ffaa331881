"""Work on hostile input in a process of little memory and time: chat templates, grammars of JSON schemas."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError, ExpertlyError
from expertly.model import sandbox_process
from expertly.model.sandbox_process import LENGTH

_START_S = 60.0
"""For the process to start, on a machine that is busy with something else."""

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")


class SlowError(ConfigError):
    """A request took more time than its limit."""


class Sandbox:
    """A process that answers one request at a time; others wait. Any thread may call. It starts with the first request,
    and again after one that broke a limit: `cpu_s` of processor time, `seconds` of time, `nbytes` of memory beyond what
    the process takes at its start.

    It has no files but its end of a socket, prints nothing, and ends with this process. Where the machine runs out of
    memory it is ended first.
    """

    def __init__(
        self,
        service: str,
        packages: Sequence[str],
        cpu_s: float,
        seconds: float,
        nbytes: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._packages, self._cpu_s, self._seconds, self._nbytes = packages, cpu_s, seconds, nbytes
        self._settings = {"service": service, "cpu_s": cpu_s, "nbytes": nbytes, **(settings or {})}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def ask(self, request: bytes) -> tuple[bytes, str]:
        """The letter and the text of the answer. Raises ConfigError where a limit was broken (SlowError: that of time),
        or the process ended by itself; the message begins with "takes", "did" or "ended".
        """
        with self._lock:
            letter, answer = self._ask(request)
        if letter == b"M":
            raise self._too_large()
        return letter, answer.decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """End the process. Idempotent; a later request starts another."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> tuple[bytes, bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # memory ran out elsewhere
        if self._process is None:
            self._start()
        assert self._socket is not None
        end = time.monotonic() + self._seconds
        try:
            self._socket.settimeout(self._seconds)
            self._socket.sendall(LENGTH.pack(len(request)) + request)
            head = self._receive(2 + LENGTH.size, end)
            (length,) = LENGTH.unpack(head[2:])
            answer = self._receive(length, end)
            if head[1:2] == b".":
                self._end()
            return head[:1], answer
        except TimeoutError:
            self._end()
            raise SlowError(f"did not end in {self._seconds:g} s") from None
        except OSError:
            raise self._died() from None
        except BaseException:  # an interrupt: the answer would be the next request's
            self._end()
            raise

    def _receive(self, num: int, end: float) -> bytes:
        assert self._socket is not None
        parts = bytearray()
        while len(parts) < num:
            self._socket.settimeout(max(1e-3, end - time.monotonic()))
            part = self._socket.recv(min(num - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError
            parts += part
        return bytes(parts)

    def _start(self) -> None:
        specs = [importlib.util.find_spec(name) for name in self._packages]
        folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin)
        settings = json.dumps({"folders": list(folders), **self._settings})
        command = [sys.executable, "-I", "-S", "-B", sandbox_process.__file__, settings]
        self._socket, theirs = socket.socketpair()
        cause = f"its command: {command}"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # an interrupt of the terminal is for this process
                )
            self._socket.settimeout(_START_S)
            is_up = bool(self._socket.recv(1))
        except OSError as error:
            is_up, cause = False, f"{error}; {cause}"
        if not is_up:
            self._end()
            raise ExpertlyError(f"a process for {self._settings['service']} does not start: {cause}")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None

    def _died(self) -> ConfigError:
        assert self._process is not None
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            status = 0
        self._end()
        if status == -signal.SIGPROF:
            return SlowError(f"did not end in {self._cpu_s:g} s")
        if status == -signal.SIGABRT:  # of Rust where it gets no memory
            return self._too_large()
        name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        return ConfigError(f"ended its process ({name})")

    def _too_large(self) -> ConfigError:
        return ConfigError(f"takes more than {self._nbytes >> 20} MiB")

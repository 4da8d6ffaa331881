"""A connection between two processes that carries messages of bytes over TCP."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hmac import compare_digest
from typing import NamedTuple

_CONNECTING_S = 10.0
_GREETING_S = 1.0
"""How long who connects may take to say the key; meanwhile nobody else can."""

_LENGTH_NBYTES = 8


class Address(NamedTuple):
    """Where a process waits for another, and what that has to say."""

    host: str
    port: int
    key: str


class Pair:
    """One of two ends, for one thread at a time. Messages arrive in order. A process that ends closes it for both.

    `send` and `receive` raise OSError: ConnectionError where the other end is gone, TimeoutError where it takes too
    long. Whatever they raise, the connection is closed: nobody would know where the next message begins.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says nothing
        self._socket = connected

    @classmethod
    def join(cls, address: Address) -> Pair:
        """Connect to the process that waits there. Raises OSError."""
        joined = cls(socket.create_connection(address[:2], _CONNECTING_S))
        joined._socket.sendall(address.key.encode())
        return joined

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        with self._closing():
            self._socket.settimeout(timeout_s)
            self._socket.sendall(len(message).to_bytes(_LENGTH_NBYTES, "little") + message)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; None: wait for it forever."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._closing():
            return self._read(int.from_bytes(self._read(_LENGTH_NBYTES, until_s), "little"), until_s)

    def close(self) -> None:
        """Idempotent. A thread that waits is told, so the socket itself is closed when nobody has it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _read(self, nbytes: int, until_s: float | None) -> bytes:
        content = bytearray(nbytes)
        missing = memoryview(content)
        while missing:
            left_s = None if until_s is None else max(1e-3, until_s - time.monotonic())  # 0 would not wait at all
            self._socket.settimeout(left_s)
            num_read = self._socket.recv_into(missing)
            if not num_read:
                raise ConnectionError("the other end closed the connection")
            missing = missing[num_read:]
        return bytes(content)


class Meeting:
    """Where this process waits for one other, which is told the address and its key."""

    def __init__(self, host: str) -> None:
        """`host`: an address of this machine, on which alone it listens. Raises OSError."""
        self._listening = socket.create_server((host, 0))
        self.address = Address(host, self._listening.getsockname()[1], secrets.token_hex(32))

    def accept(self, timeout_s: float) -> Pair | None:
        """The process that joins; None where it does not within this time. Strangers are sent away."""
        until_s, key = time.monotonic() + timeout_s, self.address.key.encode()
        with suppress(OSError):  # nobody came in time
            while True:
                self._listening.settimeout(max(1e-3, until_s - time.monotonic()))
                joined = Pair(self._listening.accept()[0])
                with suppress(OSError):
                    if compare_digest(joined._read(len(key), time.monotonic() + _GREETING_S), key):
                        self._listening.close()
                        return joined
                joined.close()
                if time.monotonic() > until_s:
                    break
        return None

"""A connection between two processes that carries messages of bytes over TCP."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
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
    """One of two ends, for one thread at a time. Messages arrive in order. A process that ends closes it for both."""

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
        """Raises ConnectionError, or TimeoutError where the other end does not read; the connection is closed then."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(len(message).to_bytes(_LENGTH_NBYTES, "little") + message)
        except BaseException as error:
            raise self._closed(error) from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; None: wait for it forever. Raises ConnectionError; TimeoutError where none begins in time,
        or does not end, which closes the connection.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        length = self._read(_LENGTH_NBYTES, until_s)
        return self._read(int.from_bytes(length, "little"), until_s, is_begun=True)

    def close(self) -> None:
        """Idempotent. A thread that waits is told, so the socket itself is closed when nobody has it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _closed(self, error: BaseException) -> BaseException:
        """What to raise: whatever ended a message half-way, nobody would know where the next one begins."""
        self.close()
        is_known = isinstance(error, (ConnectionError, TimeoutError)) or not isinstance(error, OSError)
        return error if is_known else ConnectionError(str(error))

    def _read(self, nbytes: int, until_s: float | None, *, is_begun: bool = False) -> bytes:
        content = bytearray(nbytes)
        missing = memoryview(content)
        while missing:
            left_s = None if until_s is None else max(1e-3, until_s - time.monotonic())  # 0 would not wait at all
            self._socket.settimeout(left_s)
            try:
                num_read = self._socket.recv_into(missing)
            except BaseException as error:
                if isinstance(error, TimeoutError) and not is_begun and len(missing) == nbytes:
                    raise
                raise self._closed(error) from error
            if not num_read:
                raise ConnectionError("the other end closed the connection")
            missing = missing[num_read:]
        return bytes(content)


class Meeting:
    """Where this process waits for one other, which is told the address and its key."""

    def __init__(self, host: str) -> None:
        """`host`: an address of this machine, on which alone it listens. Raises ConnectionError."""
        try:
            self._listening = socket.create_server((host, 0))
        except OSError as error:
            raise ConnectionError(str(error)) from error
        self.address = Address(host, self._listening.getsockname()[1], secrets.token_hex(32))

    def accept(self, timeout_s: float) -> Pair:
        """Wait for the process that joins. Raises TimeoutError."""
        until_s, key = time.monotonic() + timeout_s, self.address.key.encode()
        while (left_s := until_s - time.monotonic()) > 0:
            self._listening.settimeout(left_s)
            with suppress(OSError):  # none has come in time, or it is somebody else
                connected, _ = self._listening.accept()
                with suppress(OSError):
                    joined = Pair(connected)
                    if compare_digest(joined._read(len(key), time.monotonic() + _GREETING_S), key):
                        self._listening.close()
                        return joined
                connected.close()
        raise TimeoutError

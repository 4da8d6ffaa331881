"""A client's connection: bounds on what it may send before the application hears of it, and on how many there are."""

from __future__ import annotations

import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_WAITED_FOR = 384
"""Connections whose next request, or the rest of it, is not there. Those of requests that are being answered are
bounded by the queue.
"""

MAX_HEAD_NBYTES = 64 << 10
"""Bytes that are no part of a body: a request's headers, and what comes behind a request before it is answered."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, which lets a header and its number grow without end. Where too many are waited for, the one that is
    waited for longest is closed.
    """

    cycle: Any  # the last request whose headers are there
    transport: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_outside = 0  # bytes outside bodies since the last request's headers
        self.since = time.monotonic()
        """It began, or its last request was answered, then."""

    @property
    def is_silent(self) -> bool:
        """Whether no request of it is being answered or read."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waited_for(self) -> bool:
        return self.is_silent or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_WAITED_FOR:
            waited_for = [connection for connection in self.connections if connection.is_waited_for]
            if len(waited_for) > MAX_WAITED_FOR:
                min(waited_for, key=lambda connection: connection.since).transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        is_body = before is not None and before.more_body
        super().data_received(data)
        if is_body or self.cycle is not before:
            self._num_outside = 0
        else:
            self._num_outside += len(data)
            if self._num_outside > MAX_HEAD_NBYTES and not self.transport.is_closing():
                self.send_400_response("Too much outside a body.")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.cycle.more_body = False  # also where the answer came before the end of the body

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        super().on_response_complete()

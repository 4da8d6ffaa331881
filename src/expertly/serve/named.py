"""Between Ray's proxies and a replica's server: every answer says who gave it, and /metrics is of all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Named:
    """`metrics`: of all replicas, in place of what the server itself would say."""

    def __init__(self, inner: ASGIApp, name: str, metrics: Callable[[], bytes]) -> None:
        self._inner = inner
        self._header = (b"x-expertly-replica", name.encode())
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_metrics = scope["type"] == "http" and scope["path"] == "/metrics"
        start: Message = {}
        body = b""

        async def named(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = {**message, "headers": [*message["headers"], self._header]}
                if not is_metrics:
                    await send(start)
            elif is_metrics and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send_metrics(send, start, body)
            else:
                await send(message)

        await self._inner(scope, receive, named)

    async def _send_metrics(self, send: Send, start: Message, body: bytes) -> None:
        if start["status"] == 200:
            body = await asyncio.to_thread(self._metrics)
        kept = [header for header in start["headers"] if header[0].lower() != b"content-length"]
        await send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body, "more_body": False})

"""A hub on this machine, and what its client asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME, COMMIT = "maker/model", "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Serves the files of `folder` as NAME."""

    folder: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)  # whole files, not ranges

    def siblings(self) -> list[dict[str, object]]:
        found = []
        for path in sorted(self.folder.iterdir()):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            one: dict[str, object] = {"rfilename": path.name, "size": path.stat().st_size, "blobId": digest[:40]}
            if path.suffix == ".safetensors":
                one["lfs"] = {"sha256": digest, "size": path.stat().st_size, "pointerSize": 100}
            found.append(one)
        return found


@contextmanager
def served(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_GET(self) -> None:
            self._answer(is_head=False)

        def _answer(self, is_head: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{NAME}/tree"):
                files = [{"type": "file", "path": one["rfilename"], "oid": one["blobId"]} for one in hub.siblings()]
                sized = [one | {"size": (hub.folder / str(one["path"])).stat().st_size} for one in files]
                self._send(200, json.dumps(sized).encode(), {}, is_head)
                return
            if path.startswith(f"/api/models/{NAME}"):
                told = {"id": NAME, "sha": COMMIT, "siblings": hub.siblings(), "tags": [], "private": False}
                self._send(200, json.dumps(told).encode(), {}, is_head)
                return
            file = hub.folder / path.rpartition("/")[2]
            if not path.startswith(f"/{NAME}/resolve/") or not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, is_head)
                return
            data = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            asked = self.headers.get("Range")
            if not is_head and asked is None:
                hub.downloads.append(file.name)
            if not is_head and asked is not None:
                begin, end = asked.removeprefix("bytes=").split("-")
                last = min(int(end or len(data) - 1), len(data) - 1)
                headers["Content-Range"] = f"bytes {begin}-{last}/{len(data)}"
                self._send(206, data[int(begin) : last + 1], headers, is_head)
                return
            self._send(200, data, headers, is_head)

        def _send(self, status: int, data: bytes, headers: dict[str, str], is_head: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not is_head:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

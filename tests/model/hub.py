"""A hub on this machine, and what its client asks for."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, file_download

NAME, COMMIT = "maker/model", "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Serves the files of `folder` as NAME."""

    folder: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)  # whole files, not ranges
    ranges: list[tuple[str, int]] = field(default_factory=list)  # files, and where what was asked for begins
    sent_nbytes: int = 0  # of large files
    cut_after: list[int] = field(default_factory=list)  # bytes of the next large answers before they break off
    fails_after_cut: bool = False  # it is down from then on
    is_down: bool = False

    def siblings(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            name = path.relative_to(self.folder).as_posix()
            one: dict[str, Any] = {"rfilename": name, "size": path.stat().st_size, "blobId": digest[:40]}
            if path.suffix in (".safetensors", ".gguf"):
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
            path = urllib.parse.unquote(self.path.partition("?")[0])
            if hub.is_down:
                self._send(503, b"", {}, is_head)
                return
            if path.startswith(f"/api/models/{NAME}/tree"):
                listed = []
                for one in hub.siblings():
                    lfs = {"lfs": {**one["lfs"], "oid": one["lfs"]["sha256"]}} if "lfs" in one else {}
                    plain = {"path": one["rfilename"], "oid": one["blobId"], "size": one["size"]}
                    listed.append({"type": "file", **plain, **lfs})
                self._send(200, json.dumps(listed).encode(), {}, is_head)
                return
            if path.startswith(f"/api/models/{NAME}"):
                told = {"id": NAME, "sha": COMMIT, "siblings": hub.siblings(), "tags": [], "private": False}
                self._send(200, json.dumps(told).encode(), {}, is_head)
                return
            _, is_resolved, rest = path.partition(f"/{NAME}/resolve/")
            file = hub.folder / (rest.partition("/")[2] if is_resolved else path.removeprefix("/storage/"))
            if not (is_resolved or path.startswith("/storage/")) or not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, is_head)
                return
            data = file.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": COMMIT}
            if is_resolved and file.suffix == ".gguf":  # large files are elsewhere
                linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
                location = f"{hub.url}/storage/{urllib.parse.quote(file.relative_to(hub.folder).as_posix())}"
                self._send(302, b"", {**headers, **linked, "Location": location}, is_head)
                return
            asked = self.headers.get("Range")
            if not is_head and asked is None:
                hub.downloads.append(file.name)
            if not is_head and asked is not None:
                begin, end = asked.removeprefix("bytes=").split("-")
                last = min(int(end or len(data) - 1), len(data) - 1)
                hub.ranges.append((file.relative_to(hub.folder).as_posix(), int(begin)))
                headers["Content-Range"] = f"bytes {begin}-{last}/{len(data)}"
                self._send(206, data[int(begin) : last + 1], headers, is_head)
                return
            self._send(200, data, headers, is_head)

        def _send(self, status: int, data: bytes, headers: dict[str, str], is_head: bool) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if is_head or not data:
                return
            if hub.cut_after and self.path.startswith("/storage/"):
                data, self.close_connection = data[: hub.cut_after.pop(0)], True
                hub.is_down = hub.fails_after_cut
            hub.sent_nbytes += len(data) if self.path.startswith("/storage/") else 0
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


@contextmanager
def asked(hub: FakeHub, folder: Path) -> Iterator[FakeHub]:
    """`hub`, served and the one that the hub's client talks to, whose settings are read when it is imported; what it
    downloads and what is packed lies in `folder`.
    """
    with served(hub) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", found.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "".join(template[1:]))
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what is less is not kept
        patch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))  # before it tries again
        patch.setenv("EXPERTLY_CACHE", str(folder / "cache"))
        yield found

"""A real browser without a window, told what to do through Chromium's debugging pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page. `problems`: exceptions, what it wrote to the console, answers that were errors, what was blocked."""

    def __init__(self, reading: int, writing: int) -> None:
        self.problems: list[str] = []
        self.asked: list[str] = []
        """Addresses that it asked for."""
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol, and what it gives."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (got := self._read()).get("id") != self._number:
            self._note(got)
        assert "error" not in got, got["error"]
        return got["result"]

    def run(self, code: str) -> Any:
        """The value of an expression, awaited."""
        got = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def until(self, code: str, seconds: float = 30) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < end, f"never came true: {code}; the page said {self.problems}"
            time.sleep(0.05)
        return value

    def open(self, url: str, width: int = 1280) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def type(self, selector: str, text: str) -> None:
        """As keys would."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """With the mouse, where it is."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._reading, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])


@contextmanager
def browser(path: str) -> Iterator[Tab]:
    """A browser with a profile of its own, and its first page; ended when the block ends."""
    to_it, from_us = os.pipe()
    to_us, from_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [f"--disable-{asks}" for asks in ("background-networking", "component-update", "sync", "quic")]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        # The protocol is spoken on the file descriptors 3 and 4.
        move = f"import os, sys; os.dup2({to_it}, 3); os.dup2({from_it}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-c", move, path, *flags],
            pass_fds=(to_it, from_it),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        try:
            tab = Tab(to_us, from_us)
            yield tab
        finally:
            os.close(from_us)  # which ends it
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_us)

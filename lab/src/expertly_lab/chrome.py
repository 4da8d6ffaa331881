"""A run as a timeline for chrome://tracing and ui.perfetto.dev: what device and link did, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from expertly.core.errors import ConfigError
from expertly.core.files import replacing
from expertly.core.messages import Span

_THREADS = {"device": 1, "link": 2}


@contextmanager
def chrome_trace(path: Path) -> Iterator[ChromeTrace]:
    """A timeline whose file appears when the block has ended. Raises ConfigError where it cannot be written."""
    if path.is_dir() or not path.name:
        raise ConfigError(f"chrome_trace={str(path)!r}: a folder; must be a file to write")
    try:
        with replacing(path) as file:
            file.write(b"[\n")
            yield ChromeTrace(file)
            file.write(b"\n]\n")
    except OSError as error:
        raise ConfigError(f"chrome_trace={str(path)!r}: cannot be written ({error.strerror or error})") from None


class ChromeTrace:
    """Writes events in the Trace Event Format, in microseconds: a process for each run, with two threads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_runs = 0
        self._before = b""  # what separates the next event from the one before

    def begin_run(self, name: str) -> RunTimeline:
        """The following events are of a new run, called "SYSTEM, BUDGET"."""
        self._num_runs += 1
        pid = self._num_runs
        self.write({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        self.write({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for label, tid in _THREADS.items():
            self.write({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": label}})
        return RunTimeline(self, pid)

    def write(self, event: dict[str, Any]) -> None:
        self._file.write(self._before + json.dumps(event, separators=(",", ":")).encode())
        self._before = b",\n"


class RunTimeline:
    """The SimulationWatcher that writes one run's events. Gaps on the device are stalls, or idle."""

    def __init__(self, file: ChromeTrace, pid: int) -> None:
        self._file = file
        self._pid = pid

    def computed(self, label: str, layer: int, begin_ns: int, end_ns: int) -> None:
        name = label if layer < 0 else f"{label}, layer {layer}"
        self._write(name, label.split()[0], "device", begin_ns, end_ns)

    def moved(self, span: Span, begin_ns: int, end_ns: int) -> None:
        parts = f"{span.segment}..{span.segment + span.num_segments - 1}"
        self._write(f"layer {span.layer}, expert {span.expert}, segments {parts}", "load", "link", begin_ns, end_ns)

    def took(self, begin_ns: int, end_ns: int) -> None:
        self._write("take", "take", "device", begin_ns, end_ns)

    def _write(self, name: str, kind: str, thread: str, begin_ns: int, end_ns: int) -> None:
        event = {"ph": "X", "pid": self._pid, "tid": _THREADS[thread], "name": name, "cat": kind}
        self._file.write(event | {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000})

"""A peer in a process of its own, inside its cgroup from its first byte, which runs a request when it is told to."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE_S = 600.0
"""For one answer: what thrashes for longer is not waited for."""


class Ended(Exception):
    """The process ended before it answered; the message says how, in words for a row."""


class Player:
    """What it was asked last is answered before anything else is asked. Raises Ended where the process ends."""

    def __init__(self, settings: dict[str, Any], group: Path | None = None, packages: Path | None = None) -> None:
        """`group`: a cgroup of version 1. `packages`: a folder of packages that this process alone finds."""

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        self._group = group
        env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}  # which ours sets
        if packages is not None:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), env.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=enter,
            env=env,
            text=True,
        )
        self.loaded = self._answer()

    def play(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Ended(self._how()) from None
        return self._answer()

    def close(self) -> None:
        """Idempotent; leaves no process."""
        if self._process.poll() is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            self._process.kill()
            self._process.wait()
            raise Ended(f"gave no answer in {PATIENCE_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Ended(self._how())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self.close()
            raise Ended(answer["error"])
        return answer

    def _how(self) -> str:
        code = self._process.wait(60)
        if code == -signal.SIGKILL and self._group is not None:
            return "killed: out of memory in its cgroup"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

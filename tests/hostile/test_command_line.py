"""Command lines, streams, signals and limits that nobody means: one line or silence, and the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import expertly
from expertly.cli import main as process

LONG = "a" * 300
MAX_S = 60.0
"""Beside a busy neighbour."""

COMMANDS = """
import sys, time, types
from expertly.core.errors import ConfigError
def run_command(argv):
    if argv[0] == "refuses": raise ConfigError("no")
    if argv[0] == "sleeps": print("asleep", flush=True); time.sleep(60)
    if argv[0] == "prints": print("a result", chr(0x2713)); print("a message", file=sys.stderr)
    return 0
import expertly.cli
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "expertly.cli.commands": print("importing", flush=True); time.sleep(60)
if sys.argv[1] == "imports":
    sys.meta_path.insert(0, Slow())
else:
    commands = sys.modules["expertly.cli.commands"] = expertly.cli.commands = types.ModuleType("expertly.cli.commands")
    commands.run_command = run_command
from expertly.cli.main import main
sys.exit(main())
"""
"""A process of ours with other commands, which are there at once."""

Case = tuple[str, int, str]
"""A line for the shell, where X is that process; its exit code; what is said on stderr: nothing, or one line."""

PROCESSES: dict[str, Case] = {
    "stdout closed": ("X prints >&-", 0, "a message"),
    "stderr closed": ("X refuses 2>&-", 2, ""),
    "stdout full": (
        "X prints >/dev/full 2>said; code=$?; grep -v message said >&2; exit $code",
        2,
        "stdout: No space left on device",
    ),
    "stdout full, an error": ("X refuses --json >/dev/full", 2, "error: no"),
    "stderr full, an error": ("X refuses 2>/dev/full", 2, ""),
    "both full": ("X prints >/dev/full 2>/dev/full", 2, ""),
    "stdout's reader gone": ("(sleep 0.1; X prints 2>/dev/null; echo $? >&2) | true", 0, "141"),
    "stderr's reader gone": ("(sleep 0.1; X prints >/dev/null; echo $? >code) 2>&1 | true; cat code >&2", 0, "0"),
    "the locale C": ("LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 X prints 2>/dev/null", 0, ""),
    "no text": ("X prints $'m\\xff'", 2, "must be UTF-8"),
    "a working folder that was removed": ("mkdir gone; cd gone; rmdir ../gone; X prints", 2, "was removed"),
    "without docstrings": ("PYTHONOPTIMIZE=2 X prints", 2, "PYTHONOPTIMIZE=2: "),
    "without assertions": ("PYTHONOPTIMIZE=1 X prints >/dev/null", 0, "a message"),
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = str(Path(expertly.__file__).parent.parent)
    named = {"PYTHONPATH": path, "EXPERTLY_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), "CODE": COMMANDS}
    return {**os.environ, **named}


def shell(line: str, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", f'X() {{ {sys.executable} -c "$CODE" "$@"; }}; {line}']
    how = {"env": environment, "cwd": folder, "stdin": subprocess.DEVNULL, "timeout": MAX_S}
    return subprocess.run(words, capture_output=True, text=True, **how)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_ends_in_a_line_or_in_silence(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    line, code, said = PROCESSES[name]
    done = shell(line, environment, tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("\n") == bool(said) and said in done.stderr, done.stderr


@pytest.mark.parametrize("command", ["imports", "sleeps"])
def test_ctrl_c_is_no_traceback_at_any_time(command: str, environment: dict[str, str]) -> None:
    words = [sys.executable, "-c", COMMANDS, command]
    running = subprocess.Popen(words, env=environment, stdout=-1, stderr=-1, text=True)
    assert running.stdout is not None and running.stdout.readline()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=MAX_S)
    assert running.returncode == 130
    assert err == ("" if command == "imports" else "expertly: interrupted\n")


TYPED: dict[str, tuple[list[str], str]] = {
    "a model": (["pack", LONG], "File name too long"),
    "a deep store": (["pack", "--verify", "a/" * 3000], "File name too long"),
    "a home of nobody": (["run", "~nobody-of-this-name/m", "hello"], "no home folder is known"),
    "the root": (["pack", "demo", "--out", "/"], "the root of the file system"),
    "no path": (["pack", "demo", "--out", ""], "'--out': '': must be the name of a file or a folder"),
    "a prompt that is no text": (["run", "demo", "h\udcff"], "must be UTF-8"),
    "a temperature below what a float divides by": (["run", "demo", "hi", "--temperature", "1e-320"], "from 0.0001"),
    "a long command": (["x" * 5000], " ... "),
}


@pytest.mark.parametrize("name", TYPED)
def test_what_nobody_means_is_refused_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = TYPED[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    assert process.main(words) == 2
    _, err = capsys.readouterr()
    assert err.startswith("expertly: error: ") and err.count("\n") == 1 and len(err) < 1000
    assert said in err


REFUSED: dict[str, tuple[Exception, str | None]] = {
    "a system error": (OSError(28, "No space left on device", "/some/file"), "/some/file: No space left on device"),
    "memory": (MemoryError(), "the system refuses more memory"),
    "a thread": (RuntimeError("can't start new thread"), "refuses another thread"),
    "torch's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "refuses more memory"),
    "a broken library": (ImportError("cannot import name 'x' from 'rich'", name="rich"), "rich: cannot be imported"),
    "text": (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), "must be UTF-8"),
    "a bug of ours": (ImportError("cannot import name 'x'", name="expertly.core"), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_system_refuses_is_a_line_and_a_bug_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from expertly.cli import commands

    error, said = REFUSED[name]

    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr(commands, "run_command", fail)
    if said is None:
        with pytest.raises(type(error)):
            process.main(["run"])
        return
    assert process.main(["run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("expertly: error: ") and said in err and err.count("\n") == 1

"""Command lines, streams, signals and limits that nobody means: one line or silence, and the right exit code.

Each case is a process of its own, of a command that needs neither torch nor a model, unless it says otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import expertly
from expertly.cli import main as process

PYTHON = f"exec {sys.executable} -m expertly"
LONG = "a" * 300
MAX_S = 60.0
"""Beside a busy neighbour."""

Case = tuple[str, int, str]
"""A line for the shell, where X is the command; its exit code; and what is said on stderr: nothing, or one line."""

STREAMS: dict[str, Case] = {
    "stdout closed": ("X lab systems >&-", 0, ""),
    "stderr closed": ("X nonsense 2>&-", 2, ""),
    "all closed": ("X lab systems <&- >&- 2>&-", 0, ""),
    "stdin closed": ("X lab systems <&- >/dev/null", 0, ""),
    "stdout full": ("X lab systems >/dev/full", 2, "stdout: No space left on device"),
    "stdout full, help": ("X --help >/dev/full", 2, "stdout: No space left on device"),
    "stdout full, version": ("X --version >/dev/full", 2, "stdout: No space left on device"),
    "stdout full, JSON": ("X lab systems --json >/dev/full", 2, "stdout: No space left on device"),
    "stdout full, an error": ("X nonsense --json >/dev/full", 2, "No such command 'nonsense'"),
    "stderr full": ("X nonsense 2>/dev/full", 2, ""),
    "both full": ("X lab systems >/dev/full 2>/dev/full", 2, ""),
    "stdout's reader gone": ("(sleep 0.1; X lab systems; echo $? >&2) | true", 0, "141"),
    "stderr's reader gone": ("(sleep 0.1; X nonsense) 2>&1 >/dev/null | true", 0, ""),
    "only ASCII": ("PYTHONIOENCODING=ascii X lab systems >/dev/null", 0, ""),
    "the locale C": ("LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 X lab systems >/dev/null", 0, ""),
}

PLACES: dict[str, Case] = {
    "a model": (f"X pack {LONG}", 2, "File name too long"),
    "a path": (f"X lab trace info ./{LONG}", 2, "File name too long"),
    "a deep path": (f"X lab trace info {'a/' * 3000}", 2, "File name too long"),
    "a store": (f"X pack --verify {LONG}", 2, "File name too long"),
    "a home of nobody": ("X run '~nobody-of-this-name/m' hello", 2, "no home folder is known"),
    "the root": ("X pack demo --out /", 2, "the root of the file system"),
    "no path": ("X pack demo --out ''", 2, "out='': must be the name of a file or a folder"),
    "no path, with =": ("X pack demo --out=", 2, "out='': must be the name of a file or a folder"),
    "no text": ("X lab trace info $'m\\xff'", 2, "must be UTF-8"),
    "a prompt that is no text": ("X run demo $'h\\xff'", 2, "must be UTF-8"),
    "a cache that is a device": ("EXPERTLY_CACHE=/dev/null X pack --list >/dev/null", 0, "expertly: no store in"),
    "no home": ("env -u HOME -u EXPERTLY_CACHE X pack --list >/dev/null", 0, "expertly: no store in"),
    "a working folder that was removed": ("mkdir gone; cd gone; rmdir ../gone; X lab systems", 2, "was removed"),
}

ENVIRONMENT: dict[str, Case] = {
    "without docstrings": ("PYTHONOPTIMIZE=2 X lab systems", 2, "PYTHONOPTIMIZE=2: "),
    "without assertions": ("PYTHONOPTIMIZE=1 X lab systems >/dev/null", 0, ""),
    "no columns": ("COLUMNS=0 X --help >/dev/null", 0, ""),
    "one column": ("COLUMNS=1 X run --help >/dev/null", 0, ""),
    "columns of nonsense": ("COLUMNS=x LINES=x X run --help >/dev/null", 0, ""),
    "a width of nonsense": ("TERMINAL_WIDTH=x X run --help", 2, "TERMINAL_WIDTH='x'"),
    "a dumb terminal": ("TERM=dumb X lab systems >/dev/null", 0, ""),
    "no folder for temporary files": ("TMPDIR=/nonexistent X lab systems >/dev/null", 0, ""),
    "few files": ("ulimit -n 9; X pack demo --out s", 2, ""),
    "little memory": ("ulimit -v 300000; X pack demo --out s", 2, "the system refuses more memory"),
}

VALUES: dict[str, Case] = {
    f"{option} {value!r}": (f"X doctor demo {option}='{value}'", 2, said)
    for option, said in (("--total-memory", "total_memory="), ("--segments", "--segments"))
    for value in ("", "-1", "NaN%", "1e400", "٣GiB", "9" * 400 + "GiB", "0x10", " ")
}
VALUES |= {
    "temperature below what a float divides by": ("X run demo hello --temperature 1e-320", 2, "from 0.0001"),
    "a long value": (f"X pack demo --dtype {'x' * 5000}", 2, " ... "),
    "help and nonsense": ("X --nonsense --help", 2, "No such option"),
}

TABLES = {"streams": STREAMS, "places": PLACES, "environment": ENVIRONMENT, "values": VALUES}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = str(Path(expertly.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": path, "EXPERTLY_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, cases in TABLES.items() for name in cases])
def test_a_command_ends_in_a_line_or_in_silence(
    table: str, name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    line, code, said = TABLES[table][name]
    shell = f'X() {{ ({PYTHON} "$@"); }}; export -f X; {line}'
    shell = shell.replace("env -u HOME -u EXPERTLY_CACHE X", "unset HOME EXPERTLY_CACHE; X")
    done = subprocess.run(
        ["bash", "-c", shell],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MAX_S,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert said in done.stderr and len(done.stderr) < 1200
    assert len(done.stderr.splitlines()) <= 1


@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.5, 0.9])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(
    seconds: float, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "expertly", "run", "demo", "hello", "--max-new-tokens", "500"]
    running = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=-1, stderr=-1, text=True)
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=MAX_S)
    assert running.returncode == 130 and "Traceback" not in err
    assert [line for line in err.splitlines() if "interrupted" in line] in ([], ["expertly: interrupted"])


def test_a_bug_of_ours_is_not_lost_with_stderr(environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from expertly.cli import commands, main\n"
        "def fail(argv): raise ZeroDivisionError('a bug')\n"
        "commands.run_command = fail; sys.exit(main.main())"
    )
    environment["TMPDIR"] = str(tmp_path)
    for closing, num_files in (("", 0), (" 2>&-", 1), (" 2>/dev/full", 2)):
        line = f'exec {sys.executable} -c "$CODE"{closing}'
        done = subprocess.run(
            ["bash", "-c", line], env=environment | {"CODE": code}, capture_output=True, text=True, timeout=MAX_S
        )
        files = list(tmp_path.glob("expertly-*.traceback"))
        assert done.returncode == 1 and len(files) == num_files
        assert all("ZeroDivisionError: a bug" in file.read_text() for file in files)
        assert ("ZeroDivisionError: a bug" in done.stderr) == (not closing)


REFUSED: dict[str, tuple[Exception, str | None]] = {
    "a system error": (OSError(28, "No space left on device", "/some/file"), "/some/file: No space left on device"),
    "memory": (MemoryError(), "the system refuses more memory"),
    "a thread": (RuntimeError("can't start new thread"), "refuses another thread"),
    "torch's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "refuses more memory"),
    "a library that cannot be mapped": (
        ImportError("libx.so: failed to map segment from shared object", name="torch"),
        "refuses more memory",
    ),
    "a broken library": (ImportError("cannot import name 'x' from 'rich'", name="rich"), "rich: cannot be imported"),
    "text": (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), "must be UTF-8"),
    "a bug of ours": (ImportError("cannot import name 'x'", name="expertly.core"), None),
    "another bug": (ValueError("x"), None),
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

"""The `expertly` process: its standard streams, Ctrl-C, and how it ends, whichever of `commands.py` runs.

Exit codes: 0 done; 1 a bug of ours, with a traceback; 2 an error that the user can fix, in one line; 130 interrupted;
141 the reader of stdout has gone. With --json an error is also one JSON object on stdout,
`{"error": {"type", "message"}}`.

A standard stream that is closed is /dev/null. An error of stdout ends the command, one of stderr never does.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from expertly.core.errors import ConfigError, ExpertlyError

# Nothing else is imported before `main` has seen to Ctrl-C: the commands take half a second.

INTERRUPTED = 130
READER_GONE = 141

OF_SERVER = ("fastapi", "uvicorn", "starlette", "prometheus_client")  # packages that only the server needs
MAX_WORD, MAX_LINE = 256, 900  # characters of an error: of a name or a value in it, and in all

NO_MEMORY = "the system refuses more memory (a limit, as of `ulimit -v` or of a container)"

REFUSED_BY_SYSTEM = {
    "can't start new thread": "the system refuses another thread (a limit of processes or of memory)",
    **dict.fromkeys(("can't allocate memory", "failed to map segment", "Cannot allocate memory"), NO_MEMORY),
    "error return without exception set": "a library could not be imported; perhaps the system refuses more memory",
    "Too many open files": "the system refuses to open another file (a limit, as of `ulimit -n`)",
    "determine home directory": "no home folder is known for this user; set HOME, or write the path without `~`",
}
"""What libraries say, in exceptions of any class, where it is not their fault; and what a user is told."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. None: the process's own, with its streams and signals."""
    if argv is not None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
        return _answer(argv, lambda: None)
    _take_streams()
    sys.unraisablehook = _unraisable
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored: a job in the background
        return _answer(sys.argv[1:], lambda: None)
    signal.signal(signal.SIGINT, _end_at_once)  # while modules are imported there is nothing to close
    try:
        return _answer(sys.argv[1:], lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    finally:
        signal.signal(signal.SIGINT, _end_at_once)


def _answer(argv: Sequence[str], begin: Callable[[], object]) -> int:
    """`begin` is called when the command's modules are there."""
    is_json = "--json" in argv
    try:
        _check_process()
        for word in argv:
            word.encode()  # bytes that are no UTF-8 come as lone surrogates
        from expertly.cli import commands

        begin()
        status = commands.run_command(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("expertly: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (Exception, MemoryError) as error:  # libraries refuse in exceptions of any class
        if isinstance(error, BrokenPipeError) and error.filename == _STDOUT:
            return _leave_stdout()
        refusal = error if isinstance(error, ExpertlyError) else _of_environment(error)
        if refusal is None:
            raise
        return _report(refusal, is_json)


def _check_process() -> None:
    """Raises ConfigError where no command could work."""
    if sys.flags.optimize > 1:
        raise ConfigError("PYTHONOPTIMIZE=2: transformers cannot be imported without its docstrings; accepted: 0 and 1")
    try:
        os.getcwd()
    except OSError:  # Intel's library of products ends the process
        raise ConfigError("the working directory was removed; go to one that exists") from None


def _of_environment(error: Exception) -> ExpertlyError | None:
    """What the user is told of an error that the system, the installation or the typed text caused; None for a bug."""
    if isinstance(error, UnicodeError):
        text = getattr(error, "object", "")
        return ConfigError(f"{text!r:.80}: must be UTF-8 ({getattr(error, 'reason', error)})")
    if isinstance(error, MemoryError):
        return ConfigError(NO_MEMORY)
    if isinstance(error, OSError) and error.errno is not None:
        reason, name = error.strerror or type(error).__name__, error.filename
        is_named = isinstance(name, str | bytes) and name  # a descriptor's number says nothing
        return ConfigError(f"{_cut(os.fsdecode(name), 80)}: {reason}" if is_named else reason)
    said = str(error)
    for sentence, meaning in REFUSED_BY_SYSTEM.items():
        if sentence in said:
            return ConfigError(meaning)
    if isinstance(error, ImportError) and error.name is not None and error.name.split(".")[0] != "expertly":
        if isinstance(error, ModuleNotFoundError):
            package = "'expertly[serve]'" if error.name in OF_SERVER else "expertly"
            return ConfigError(f"{error.name} is not installed in this Python; `pip install {package}` brings it")
        return ConfigError(f"{error.name}: cannot be imported ({said.splitlines()[0]:.200})")
    return None


def _report(error: ExpertlyError, is_json: bool) -> int:
    message = " ".join(_cut(word, MAX_WORD) for word in str(error).split())
    message = "".join(char if char.isprintable() else "?" for char in _cut(message, MAX_LINE))
    print(f"expertly: error: {message}", file=sys.stderr)
    if is_json:
        try:
            print(json.dumps({"error": {"type": type(error).__name__, "message": message}}, ensure_ascii=False))
            sys.stdout.flush()
        except OSError:  # stderr has said it
            return _leave_stdout(2)
    return 2


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-(most // 4) :]}"


def _leave_stdout(status: int = READER_GONE) -> int:
    """Python flushes stdout once more at exit: let that go nowhere instead of failing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


# -- the process -------------------------------------------------------------------------------------------------------

_STDOUT = "stdout"


class _Stream(io.FileIO):
    """A standard stream for output. An error is raised where there is a `label` to name it by, once; what is written
    from then on, and what stderr cannot take, goes nowhere.
    """

    def __init__(self, descriptor: int, label: str | None = None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._label = label

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self._label is not None:
                error.filename, self._label = self._label, None
                raise
            return memoryview(data).nbytes

    def as_text(self, replaced: Any, errors: str, *, is_by_line: bool) -> io.TextIOWrapper:
        """In the encoding of the stream that it replaces."""
        is_text = isinstance(replaced, io.TextIOWrapper)
        encoding, is_direct = (replaced.encoding, replaced.write_through) if is_text else ("utf-8", False)
        buffer = io.BufferedWriter(self)
        return io.TextIOWrapper(buffer, encoding, errors, line_buffering=is_by_line, write_through=is_direct)


def _take_streams() -> None:
    stdin, *outputs = (_descriptor(number) for number in range(3))
    if sys.stdin is None:
        sys.stdin = os.fdopen(stdin, closefd=False)
    stdout, stderr = _Stream(outputs[0], _STDOUT), _Stream(outputs[1])
    # A terminal that lacks a character is no reason to stop.
    sys.stdout = stdout.as_text(sys.stdout, "replace", is_by_line=stdout.isatty())
    sys.stderr = stderr.as_text(sys.stderr, "backslashreplace", is_by_line=True)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


def _descriptor(number: int) -> int:
    """Of a standard stream. One that is closed is opened on /dev/null, or the next file would get its number."""
    if (sys.stdin, sys.stdout, sys.stderr)[number] is not None:
        return number
    opened = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(opened, True)
    return opened


def _end_at_once(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def _unraisable(about: sys.UnraisableHookArgs) -> None:
    """An interrupt in a place that cannot raise, as in a callback, comes again."""
    if issubclass(about.exc_type, KeyboardInterrupt):
        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(about)

"""The dispatcher: parses the command line, runs one subcommand, turns errors into one line and an exit code.

Exit codes: 0 done, 1 a bug of ours (with a traceback), 2 the user's to fix, 130 interrupted, 141 the reader of stdout
has gone. With --json an error is one JSON object on stdout, `{"error": {"type", "message"}}`, besides the line on
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from expertly import __version__
from expertly.cli.output import print_json, quiet_libraries
from expertly.core.errors import ConfigError, ExpertlyError

COMMANDS = (
    "run",
    "generate",
    "serve",
    "pack",
    "trace",
    "simulate",
    "compare",
    "reproduce",
    "maps",
    "train-predictor",
    "configure",
    "tune",
    "doctor",
    "systems",
)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit, so that a bad flag is reported as every other error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="expertly", description="Run Mixture-of-Experts models in the memory you give them.")
    parser.add_argument("--version", action="version", version=f"expertly {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(_module_of(name)).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        args, unknown = build_parser().parse_known_args(argv)
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(args, "prompt", "") is None:
            args.prompt = unknown.pop()  # argparse takes no optional word behind an option
        if unknown:
            raise ConfigError(f"unrecognized arguments: {' '.join(unknown)} (see expertly {args.command} --help)")
        quiet_libraries()
        with _importable_folder():
            status: int = importlib.import_module(_module_of(args.command)).run(args)
        sys.stdout.flush()
        return status
    except ExpertlyError as error:
        return _report(error, is_json="--json" in argv)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "expertly":
            raise
        missing = ConfigError(f"{error.name} is not installed in this Python; `pip install expertly` brings it")
        return _report(missing, is_json="--json" in argv)
    except KeyboardInterrupt:
        print("expertly: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit: let that go nowhere instead of failing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _module_of(command: str) -> str:
    return f"expertly.cli.{command.replace('-', '_')}"


@contextlib.contextmanager
def _importable_folder() -> Iterator[None]:
    """Parts of systems are found in the current folder, too, as `python -m` finds them; but behind what is installed,
    so that no file there stands in for a library. `python -P` finds none.
    """
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = ""
    if not folder or "" in sys.path or folder in sys.path or getattr(sys.flags, "safe_path", False):
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _report(error: ExpertlyError, is_json: bool) -> int:
    message = " ".join(str(error).split())
    print(f"expertly: error: {message}", file=sys.stderr)
    if is_json:
        print_json({"error": {"type": type(error).__name__, "message": message}})
    return 2

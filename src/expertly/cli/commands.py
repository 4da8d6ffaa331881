"""The tree of commands: parses a command line and runs one of them. `main.py` is the process that they run in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import typer

from expertly import __version__
from expertly.cli import (
    compare,
    configure,
    doctor,
    learned,
    pack,
    reproduce,
    run,
    serve,
    simulate,
    systems,
    trace,
    train,
    tune,
)
from expertly.cli.frame import add_command, group
from expertly.cli.output import quiet_libraries
from expertly.core.errors import ConfigError

COMPLETE = "_EXPERTLY_COMPLETE"
Command = Callable[..., int]

MAIN: dict[str, Command] = {
    "run": run.run,
    "serve": serve.run,
    "pack": pack.run,
    "doctor": doctor.run,
    "tune": tune.run,
    "bench": compare.bench,
}
LAB: dict[str, Command] = {
    "simulate": simulate.run,
    "compare": compare.run,
    "reproduce": reproduce.run,
    "train": train.run,
    "configure": configure.run,
    "systems": systems.run,
}
TRACE: dict[str, Command] = {
    "record": trace.record,
    "info": trace.info,
    "import": trace.import_routing,
    "synth": trace.synth,
    "replay": trace.replay,
}
LEARNED: dict[str, Command] = {
    "info": learned.info,
    "build": learned.build,
    "merge": learned.merge,
    "export": learned.export,
}

MOVED = {
    **{name: f"is `expertly lab {name}` now" for name in (*LAB, "trace", "learned")},
    "train-predictor": "is `expertly lab train` now",
    "maps": "is `expertly lab learned` now",
    "maps trim": "is `expertly lab learned merge OUT FILE --capacity N` now",
    "maps size": "has gone; `expertly lab learned info FILE` says what a file takes in memory when it is full",
}
"""Commands of the first edition, and what to type now."""

REFUSED = {
    **{
        f"lab {name} --total-memory": "a trace knows only experts, and not what else takes memory; accepted: --memory. "
        "`expertly doctor MODEL --total-memory SIZE` says how much a model leaves for experts"
        for name in ("simulate", "reproduce")
    },
    "lab trace synth --workload": "has gone: made-up routing is Zipf's only; leave it out",
    "lab trace import --format": "has gone: npz is the only format; leave it out",
    "lab configure --plot": "has gone: the table has the same numbers, and --json prints them",
}
"""Options that commands had, or that others have, and what to do instead."""


def make_app() -> typer.Typer:
    app = group("Run Mixture-of-Experts models in the memory you give them.", MAIN)
    add_command(app, "generate", run.generate, hidden=True)
    lab = group("For research: routing traces, simulation, comparison, papers.", LAB)
    lab.add_typer(group("Routing traces: record, import, make up, look at, replay.", TRACE), name="trace")
    lab.add_typer(group("What systems learn while they run, and keep in files.", LEARNED), name="learned")
    app.add_typer(lab, name="lab")

    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"expertly {__version__}")
            raise typer.Exit

    @app.callback()
    def about(
        version: bool = typer.Option(
            False, "--version", help="Show the version.", metavar="", is_eager=True, callback=show
        ),
    ) -> None:
        """Options that stand before a command."""

    return app


def run_command(argv: Sequence[str]) -> int:
    """Run the command line `argv` and return its exit code. Raises ConfigError where it cannot be parsed, and what the
    command raises.
    """
    quiet_libraries()
    command = typer.main.get_command(make_app())
    try:
        _refuse_moved(argv)
        with _importable_folder():
            if COMPLETE in os.environ:  # the shell asks what may stand here
                command.main(prog_name="expertly")
            with command.make_context("expertly", list(argv)) as context:
                status: int = command.invoke(context)
        return status
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        wrong = _of_usage(error)
        if wrong is None:
            return 2
        raise wrong from None


def _refuse_moved(argv: Sequence[str]) -> None:
    for name in (" ".join(argv[:2]), *argv[:1]):
        if name in MOVED:
            raise ConfigError(f"{name}: {MOVED[name]}")
    for refused, instead in REFUSED.items():
        *command, option = refused.split()
        if [*argv[: len(command)]] == command and any(word.partition("=")[0] == option for word in argv):
            raise ConfigError(f"{option}: {instead}")


def _of_usage(error: typer.TyperException) -> ConfigError | None:
    """The error of a command line that cannot be parsed; None where it was empty and help has been shown."""
    context = getattr(error, "ctx", None)
    path = "expertly" if context is None else context.command_path
    wrong = error.format_message()
    if not wrong:
        return None
    parameters = [] if context is None else context.command.params
    several = [one.opts[0] for one in parameters if getattr(one, "multiple", False)]
    more = f"; before each of several values: {', '.join(several)}" if several else ""
    return ConfigError(f"{wrong.removesuffix('.')} (see {path} --help{more})")


@contextlib.contextmanager
def _importable_folder() -> Iterator[None]:
    """Let parts of systems be imported from the current folder, as `python -m` does, but after everything that is
    installed, so that no file there replaces a library. `python -P` turns it off.
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

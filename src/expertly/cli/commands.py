"""The tree of commands: parses a command line and runs one of them. `main.py` is the process that they run in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from expertly import __version__
from expertly.cli import bench, doctor, pack, run, serve, systems
from expertly.cli.frame import group
from expertly.cli.output import message, quiet_libraries
from expertly.core.errors import ConfigError
from expertly.policies.registry import Registry

MAIN: dict[str, Callable[..., int]] = {
    "run": run.run,
    "serve": serve.run,
    "pack": pack.run,
    "doctor": doctor.run,
    "bench": bench.run,
    "systems": systems.run,
}
GROUPS: Registry[Any] = Registry(
    "command", "expertly.commands", MAIN, lambda loaded: isinstance(loaded, typer.Typer), "a typer.Typer"
)
"""Those that ship, and the groups of installed distributions."""


def make_app(word: str | None = None) -> typer.Typer:
    """The commands that ship and installed ones; of these only `word` where it is one, as importing takes time."""
    app = group("Run Mixture-of-Experts models in the memory you give them.", MAIN)
    for name, installed in _groups(word).items():
        app.add_typer(installed, name=name)

    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"expertly {__version__}")
            raise typer.Exit

    @app.callback()
    def about(
        version: bool = typer.Option(False, "--version", help="Show the version.", is_eager=True, callback=show),
    ) -> None:
        """Options that stand before a command."""

    return app


def _groups(word: str | None) -> dict[str, typer.Typer]:
    if word in MAIN:
        return {}
    if word is not None and not GROUPS.is_path(word) and word in GROUPS:
        return {word: GROUPS[word]}
    if word == "lab":
        raise ConfigError("lab: simulation, comparison, traces and papers are apart; `pip install expertly-lab`")
    for problem in GROUPS.problems():
        message(f"expertly: note: {problem}")
    return {name: installed for name, installed in GROUPS.items() if name not in MAIN}


def run_command(argv: Sequence[str]) -> int:
    """Run the command line `argv` and return its exit code. Raises ConfigError where it cannot be parsed."""
    quiet_libraries()
    command = typer.main.get_command(make_app(next((word for word in argv if not word.startswith("-")), None)))
    try:
        with _importable_folder(), command.make_context("expertly", list(argv)) as context:
            status: int = command.invoke(context)
        return status
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        if refusal := error.format_message():
            raise _of_usage(refusal, getattr(error, "ctx", None)) from None
        return 2  # of an empty command line: help has been shown


def _of_usage(refusal: str, context: typer.Context | None) -> ConfigError:
    path, parameters = ("expertly", []) if context is None else (context.command_path, context.command.params)
    several = [parameter.opts[0] for parameter in parameters if getattr(parameter, "multiple", False)]
    more = f"; before each of several values: {', '.join(several)}" if several else ""
    return ConfigError(f"{refusal.removesuffix('.')} (see {path} --help{more})")


@contextlib.contextmanager
def _importable_folder() -> Iterator[None]:
    """Let parts of systems be imported from the current folder, as `python -m` does, but after everything that is
    installed, so that no file there replaces a library. `python -P` turns it off.
    """
    folder = os.getcwd()
    is_added = not ({"", folder} & {*sys.path} or getattr(sys.flags, "safe_path", False))
    if is_added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if is_added:
            sys.path.remove(folder)

"""Command lines that are read and not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import typer

from expertly.cli.commands import make_app


@cache
def _whole() -> Any:
    return typer.main.get_command(make_app())


def command_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command, or group of commands, that the words name, and what follows its names. Raises AssertionError where
    a group has no such command.
    """
    command, left = _whole(), list(words)
    while left and hasattr(command, "commands"):
        assert left[0] in command.commands, f"{' '.join(words)}: there is no {left[0]}"
        command = command.commands[left.pop(0)]
    return command, left


def commands_of(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by its name, as `lab simulate`."""
    for name, command in (group or _whole()).commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def flags_of(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts} | {"--help", "-h"}


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The values of a command's options. Raises typer's exceptions where it does not take these words."""
    command, left = command_of(words)
    values: dict[str, Any] = command.make_context("expertly", left).params
    return values

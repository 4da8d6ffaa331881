"""Makes a command of a function whose one parameter is a frozen dataclass of options.

`expertly.options` describes such options. --help shows those without a panel; --help-all also shows the panels
"Advanced" and "Research".
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_type_hints

import typer
import typer.core
from rich.markup import escape

from expertly.options import REQUIRED, OptionInfo, flag_of

HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def group(help: str, commands: Mapping[str, Callable[..., int]]) -> typer.Typer:
    """A group of commands, as `expertly lab` is one."""
    app = typer.Typer(help=help, no_args_is_help=True, context_settings=HELP_NAMES, add_completion=False)
    for name, function in commands.items():
        add_command(app, name, function)
    return app


def add_command(app: typer.Typer, name: str, function: Callable[..., int]) -> None:
    """Add `function` as a command. It takes the dataclass that its one parameter is annotated with, and returns the
    exit code. The command's help is the function's docstring, else that of its module behind "`expertly NAME`: ".
    """
    (options,) = (kind for what, kind in get_type_hints(function).items() if what != "return")
    told = {one.name: one for one in fields(options) if "option" in one.metadata}

    def run(**values: Any) -> int:
        return function(options(**{name: values[name] for name in told}))

    parameters = [*(_parameter(one) for one in told.values()), _help_all()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    text = function.__doc__ or str(sys.modules[function.__module__].__doc__).partition("`: ")[2]
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text[:1].upper() + text[1:]))
    app.command(name, help=escape(text))(run)


def _parameter(one: Field[Any]) -> inspect.Parameter:
    told: OptionInfo = one.metadata["option"]
    default = ... if one.default is REQUIRED else one.default
    how: dict[str, Any] = {"metavar": "" if told.type is bool else told.metavar, "help": escape(told.help)}
    if told.is_parsed or told.type is Path:
        how["parser"] = _parser(told)
    kind: Any = told.type if isinstance(told.type, type) else str
    if told.is_several:
        kind = list[kind]
    if told.is_argument:
        return _keyword(one.name, typer.Argument(default, **how), kind)
    how |= {"hidden": told.panel is not None, "rich_help_panel": told.panel}
    return _keyword(one.name, typer.Option(default, flag_of(one.name), **how), kind)


def _keyword(name: str, info: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind | None)


def _parser(told: OptionInfo) -> Callable[[Any], Any]:
    """A parser for an option's text, which says what the option accepts where it refuses. A default that is no text
    passes through it as it is.
    """

    def parse(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        try:
            if told.type is Path and not text:  # as of a shell's variable that is not set: it would mean this folder
                raise ValueError("the name of a file or a folder")
            return told.parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r}: must be {error}") from None

    return parse


def _help_all() -> inspect.Parameter:
    def show(context: typer.Context, asked: bool) -> None:
        if asked:
            for parameter in context.command.params:
                parameter.hidden = False  # type: ignore[attr-defined]
            typer.echo(context.get_help())
            raise typer.Exit

    how: dict[str, Any] = {
        "is_eager": True,
        "expose_value": False,
        "callback": show,
        "help": "Show every option.",
        "metavar": "",
    }
    return _keyword("help_all", typer.Option(False, "--help-all", **how), bool)

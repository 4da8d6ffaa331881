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
    (options,) = (kind for parameter, kind in get_type_hints(function).items() if parameter != "return")
    parameters = [_parameter(field) for field in fields(options) if "option" in field.metadata]

    def run(help_all: bool = False, **values: Any) -> int:
        return function(options(**values))

    run.__signature__ = inspect.Signature([*parameters, _help_all()])  # type: ignore[attr-defined]
    text = function.__doc__ or str(sys.modules[function.__module__].__doc__).partition("`: ")[2]
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text[:1].upper() + text[1:]))
    app.command(name, help=escape(text))(run)


def _parameter(field: Field[Any]) -> inspect.Parameter:
    info: OptionInfo = field.metadata["option"]
    default = ... if field.default is REQUIRED else field.default
    shown: dict[str, Any] = {"metavar": "" if info.is_flag else info.metavar, "help": escape(info.help)}
    if not info.is_flag:
        shown["parser"] = _parser(info)
    kind: Any = bool if info.is_flag else list[str] if info.is_several else str
    if info.is_argument:
        return _keyword(field.name, typer.Argument(default, **shown), kind)
    shown |= {"hidden": info.panel is not None, "rich_help_panel": info.panel}
    return _keyword(field.name, typer.Option(default, flag_of(field.name), **shown), kind)


def _keyword(name: str, info: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind | None)


def _parser(info: OptionInfo) -> Callable[[Any], Any]:
    """Says what the option accepts where it refuses. A default that is no text passes through it as it is."""

    def parse(text: Any) -> Any:
        try:
            return info.parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise typer.BadParameter(f"{text!r}: must be {error}") from None

    return parse


def _help_all() -> inspect.Parameter:
    def show(context: typer.Context, is_asked: bool) -> None:
        if is_asked:
            for parameter in context.command.params:
                parameter.hidden = False  # type: ignore[attr-defined]
            typer.echo(context.get_help())
            raise typer.Exit

    about: dict[str, Any] = {"is_eager": True, "expose_value": False, "callback": show, "metavar": ""}
    return _keyword("help_all", typer.Option(False, "--help-all", help="Show every option.", **about), bool)

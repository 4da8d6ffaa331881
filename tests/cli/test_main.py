"""The dispatcher: exit codes, one-line errors, the --json rule."""

from __future__ import annotations

import json
import re
import runpy
import signal
import sys
import types
from dataclasses import dataclass

import pytest
from rich.cells import cell_len

from expertly import __version__
from expertly.cli import commands
from expertly.cli.main import main
from expertly.cli.output import print_json, progress_bar, reserved_stdout, table
from expertly.core.errors import BudgetError
from expertly.options import RESEARCH, argument, json_flag, one_of, option
from tests.cli.asking import answer, refusal, told
from tests.command_lines import commands_of


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
    file: list[str] | None = argument(None, "files", metavar="FILE", is_several=True)
    often: int = option(1, "times", metavar="N", least=1)
    rare: str = option("a", "seldom needed", metavar="NAME", type=one_of("a", "b"), panel=RESEARCH)
    json: bool = json_flag()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """A subcommand `fake` that does what `command.run` is set to."""
    fake = types.SimpleNamespace()

    def run(args: FakeOptions) -> int:
        """A command."""
        return fake.run(args)

    monkeypatch.setitem(commands.MAIN, "fake", run)
    return fake


def fail(error: BaseException):
    def run(args):
        raise error

    return run


TOO_LITTLE = BudgetError("memory=1: too little;\n  the least is 2")
NO_TORCH = ModuleNotFoundError("No module named 'torch'", name="torch")


def test_errors_are_a_line_and_an_exit_code(command, capsys):
    for error, code, line in (
        (TOO_LITTLE, 2, "error: memory=1: too little; the least is 2"),
        (NO_TORCH, 2, "error: torch is not installed in this Python; `pip install expertly` brings it"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        command.run = fail(error)
        assert main(["fake"]) == code
        assert capsys.readouterr() == ("", f"expertly: {line}\n")
    command.run = fail(TOO_LITTLE)
    said = "memory=1: too little; the least is 2"
    assert answer(capsys, "fake", code=2) == {"error": {"type": "BudgetError", "message": said}}
    assert "--nonsense" in answer(capsys, "systems", "--nonsense", code=2)["error"]["message"]


def test_options_come_as_the_dataclass_says(command, capsys):
    command.run = print
    main(["fake", "a", "--often", "3", "b", "--rare", "b"])
    assert capsys.readouterr().out == f"{FakeOptions(file=['a', 'b'], often=3, rare='b')}\n"
    for value in ("0", "-1", "1.5", "many"):
        said = f"Invalid value for '--often': '{value}': must be a whole number from 1 (see expertly fake"
        assert said in refusal(capsys, "fake", "--often", value)
    assert "'--rare': 'c': must be a or b" in refusal(capsys, "fake", "--rare", "c")
    for flag, shown in (("--help", False), ("--help-all", True)):
        out = told(capsys, "fake", flag)
        assert "--often" in out and ("--rare" in out) == shown


def test_no_command_has_more_than_ten_basic_options_and_run_thirty_in_all():
    """The others stand under Advanced or Research, which --help-all shows."""
    result = dict(commands_of())
    assert {"run", "serve", "bench"} <= result.keys()
    for name, command in result.items():
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        basic = {option.opts[0] for option in options if not option.hidden}
        assert len(basic - {"--help", "--help-all"}) <= 10, (name, basic)
        assert name != "run" or len(options) <= 30


def test_help_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = told(capsys, "--help").partition("Commands")[2].splitlines()[1:-2]
    assert 6 <= len(commands) <= 8
    for command in ("run", "serve", "pack", "doctor", "bench"):
        assert len(told(capsys, command, "--help").splitlines()) <= 45


def test_version(capsys, monkeypatch):
    """Of `expertly` and `python -m expertly`."""
    assert told(capsys, "--version") == f"expertly {__version__}\n"
    monkeypatch.setattr(sys, "argv", ["expertly", "--version"])
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("expertly", run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else Ctrl-C ends the tests' process
    assert ended.value.code == 0


def test_libraries_cannot_print_into_the_result(capsys):
    with reserved_stdout() as stdout:
        print("a library says hello")
        print_json({"x": float("nan"), "y": [1.5, None]}, stdout)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"x": None, "y": [1.5, None]}
    assert err == "a library says hello\n"


def test_one_bar_shows_steps_and_bytes(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("turns") as bar:
        for tell, text in ((bar, "searching"), (bar, "lru:eviction=my_policies.Fading"), (bar.in_bytes, "packing")):
            tell(text, 3 << 20, 4 << 20)
            bar.shown.refresh()
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert printed.count(f"{3 << 20}/{4 << 20} turns") >= 2 and "3 MiB of 4 MiB" in printed


def test_progress_is_for_terminals(capsys):
    with progress_bar() as bar:
        bar("packing", 1, 2)
        assert capsys.readouterr() == ("", "")
        bar.say("measuring")
    assert capsys.readouterr() == ("", "measuring\n")


def test_table_aligns_columns():
    lines = table(("name", "n"), [("a", "1"), ("long name", "10"), ("长", "[b]")]).splitlines()
    assert [line.split()[0] for line in (lines[0], *lines[2:])] == ["name", "a", "long", "长"]
    assert lines[0].endswith("  n") and lines[3].startswith("long name") and lines[3].endswith(" 10")
    assert cell_len(lines[4]) == cell_len(lines[3]) == cell_len(lines[1])

"""The dispatcher: exit codes, one-line errors, the --json rule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
from rich.cells import cell_len

from expertly import __version__
from expertly.cli import commands
from expertly.cli.main import main
from expertly.cli.output import figures_table, fitted, print_json, progress_bar, reserved_stdout, table
from expertly.core.errors import BudgetError
from expertly.options import RESEARCH, argument, json_flag, option
from tests.command_lines import command_of


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
    file: list[str] | None = argument(None, "files", metavar="FILE", is_several=True)
    often: int = option(1, "times", metavar="N", least=1)
    rare: str = option("a", "seldom needed", metavar="NAME", choices=("a", "b"), panel=RESEARCH)
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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (TOO_LITTLE, 2, "expertly: error: memory=1: too little; the least is 2"),
        (NO_TORCH, 2, "expertly: error: torch is not installed in this Python; `pip install expertly` brings it"),
        (KeyboardInterrupt(), 130, "expertly: interrupted"),
    ],
)
def test_errors_are_a_line_and_an_exit_code(error, code, said, command, capsys):
    command.run = fail(error)
    assert main(["fake"]) == code
    assert capsys.readouterr() == ("", said + "\n")


def test_with_json_an_error_is_one_object_on_stdout(command, capsys):
    command.run = fail(TOO_LITTLE)
    assert main(["fake", "--json"]) == 2
    out, err = capsys.readouterr()
    said = "memory=1: too little; the least is 2"
    assert json.loads(out) == {"error": {"type": "BudgetError", "message": said}} and said in err
    assert main(["systems", "--json", "--nonsense"]) == 2
    assert "--nonsense" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_our_own_bugs_are_not_hidden(command):
    command.run = fail(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["fake"])


def test_options_come_as_the_dataclass_says(command, capsys):
    command.run = print
    main(["fake", "a", "--often", "3", "b", "--rare", "b"])
    assert capsys.readouterr().out == f"{FakeOptions(file=['a', 'b'], often=3, rare='b')}\n"
    for value in ("0", "-1", "1.5", "many"):
        assert main(["fake", "--often", value, "--rare", "c"]) == 2
        said = f"Invalid value for '--often': '{value}': must be a whole number from 1 (see expertly fake"
        assert said in capsys.readouterr().err
    assert main(["fake", "--rare", "c"]) == 2
    assert "'--rare': 'c': must be a or b" in capsys.readouterr().err


def test_what_is_seldom_needed_is_shown_when_asked_for(command, capsys):
    for flag, shown in (("--help", False), ("--help-all", True)):
        assert main(["fake", flag]) == 0
        out = capsys.readouterr().out
        assert "--often" in out and ("--rare" in out) == shown


def commands_of(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_no_command_has_more_than_ten_basic_options():
    """The others stand under Advanced or Research, which --help-all shows."""
    found = dict(commands_of(command_of([])[0]))
    assert {"run", "serve", "bench"} <= found.keys()
    for name, command in found.items():
        basic = [
            parameter.opts[0]
            for parameter in command.params
            if parameter.param_type_name == "option" and not parameter.hidden
        ]
        assert len(set(basic) - {"--help", "--help-all"}) <= 10, (name, basic)


def test_help_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands")[2].splitlines()[1:-2]
    assert 6 <= len(commands) <= 8
    for command in ("run", "serve", "pack", "doctor", "bench"):
        assert main([command, "--help"]) == 0
        assert len(capsys.readouterr().out.splitlines()) <= 45


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"expertly {__version__}"


def test_reader_that_went_away_is_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "expertly", "systems"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert done.returncode == 141
    assert done.stderr == ""


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
        for tell, what in ((bar, "searching"), (bar, "lru:eviction=my_policies.Fading"), (bar.in_bytes, "packing")):
            tell(what, 3 << 20, 4 << 20)
            bar._shown.refresh()
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


def test_a_line_is_broken_between_words_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["pack", "demo", "--dtype", "int3"]) == 2
    one_line = capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["pack", "demo", "--dtype", "int3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 50
    assert " ".join(map(str.strip, lines)) == one_line.strip()


def test_the_rule_of_a_wide_table_stays_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert fitted(f"a  b\n{'─' * 90}\n1  2", sys.stderr) == f"a  b\n{'─' * 50}\n1  2"


def test_numbers_stand_in_one_line_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    columns = {"memory": ("memory", str), "system": ("system", str), "TPOT": ("tpot", str)}
    name = "lru:eviction=my_policies.Fading:half_life=32"
    rows = [{"memory": "25%", "system": "lru", "tpot": "7.75 ms"}, {"memory": "", "system": name, "tpot": "8.25 ms"}]
    assert len(figures_table(rows, columns).splitlines()) == 4, "not in a file, whose lines may be long"
    monkeypatch.setattr(sys, "__stdout__", types.SimpleNamespace(isatty=lambda: True))
    for width, most in (("50", 50), ("20", 29)):
        monkeypatch.setenv("COLUMNS", width)
        head, _, *lines = figures_table(rows, columns).splitlines()
        assert head.split() == ["memory", "system", "TPOT"] and max(map(len, (head, *lines))) <= most
        assert [line.split()[-2:] for line in lines if line.endswith(" ms")] == [["7.75", "ms"], ["8.25", "ms"]]
        assert "".join(line.removesuffix("8.25 ms").strip() for line in lines[1:]) == name

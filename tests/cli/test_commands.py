"""Commands of installed distributions: there and in --help; a broken one is named, and the others work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from expertly.cli import commands
from expertly.cli.main import main
from expertly.policies import registry
from tests.cli.asking import Captured, answer, refusal, told

GREETING = '''
from dataclasses import dataclass

from expertly.cli.frame import group
from expertly.options import argument

print("greeting is imported")
number = 3


@dataclass(frozen=True)
class Greeting:
    name: str = argument("you", "whom to greet", metavar="NAME")


def hello(args: Greeting) -> int:
    """Greet somebody."""
    print(f"Hello {args.name}")
    return 7


many = group("Greetings.", {"hello": hello})
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with these commands; no other is installed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "greeting.py").write_text(GREETING, encoding="utf-8")
    (tmp_path / "broken_greeting.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "greeting", raising=False)

    def entry_points(group: str) -> list[object]:
        result = [entry for each in distributions(path=[str(tmp_path)]) for entry in each.entry_points]
        return [entry for entry in result if entry.group == group]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    vars(commands.GROUPS).pop("_entries", None)

    def installed(name: str, **entries: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
        (folder / "entry_points.txt").write_text(f"[expertly.commands]\n{lines}")

    yield installed
    vars(commands.GROUPS).pop("_entries", None)


def test_what_a_distribution_brings_is_a_group_of_commands(install: Install, capsys: Captured) -> None:
    install("greetings", greet="greeting:many")
    assert "greeting is imported" not in told(capsys, "run", "--help"), "only where it is asked for"
    assert "greet    Greetings." in told(capsys, "--help")
    assert "whom to greet" in told(capsys, "greet", "hello", "--help")
    assert main(["greet", "hello", "Ada"]) == 7
    assert capsys.readouterr().out == "Hello Ada\n"
    assert "No such option: --loud" in refusal(capsys, "greet", "hello", "--loud")


def test_a_broken_command_is_named_and_the_others_work(install: Install, capsys: Captured) -> None:
    install("acme", greet="greeting:many", sick="broken_greeting:X", lost="greeting:absent", run="greeting:many")
    install("zeta", greet="greeting:many", number="greeting:number", hello="greeting:hello")
    assert main(["--help"]) == 0
    shown, said = capsys.readouterr()
    assert "Greetings." in shown and "Write a model as a packed store" in shown
    for problem in (
        "command='sick' (broken_greeting:X of acme): cannot be loaded (ModuleNotFoundError: ",
        "command='lost' (greeting:absent of acme): cannot be loaded (AttributeError: ",
        "command='run' (greeting:many of acme): expertly has one of that name, which is used",
        "command='greet' (greeting:many of zeta): acme has one of that name, which is used",
        "command='number' (greeting:number of zeta): is of type int; accepted: a typer.Typer",
        "command='hello' (greeting:hello of zeta): is of type function; accepted: a typer.Typer",
    ):
        assert said.count(f"expertly: note: {problem}") == 1, problem
    assert main(["greet", "hello"]) == 7
    assert capsys.readouterr() == ("Hello you\n", ""), "who does not ask is not told"
    assert "(broken_greeting:X of acme): cannot be loaded" in refusal(capsys, "sick", "--help")


def test_without_the_laboratory_its_commands_say_how_to_install_it(install: Install, capsys: Captured) -> None:
    assert "pip install expertly-lab" in refusal(capsys, "lab", "simulate", "x")
    assert "pip install expertly-lab" in refusal(capsys, "lab")
    assert "expertly-lab" in answer(capsys, "lab", "compare", code=2)["error"]["message"]
    assert "lab " not in told(capsys, "--help")

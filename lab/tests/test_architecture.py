"""Which room of the lab may import which; class names mean one thing in both packages; what needs no torch."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests import test_architecture as of_product
from tests.test_architecture import imports_of, is_of, parsed, run_without_torch

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "expertly_lab"
PURE = ("trace", "baselines", "sim")
"""Without torch and without the engine: it and the simulator are two drivers of one scheduler."""
LOWEST = {"trace": ("trace",), "baselines": ("baselines",), "sim": ("trace", "baselines", "sim")}
"""What of the lab these rooms import; the others import any but `cli`."""
OF_ENGINE = ("torch", "transformers", "expertly.engine", "expertly.model", "expertly.store", "expertly.api")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_import_directions() -> None:
    wrong = []
    for path in modules():
        room = room_of(path)
        for name, line in imports_of(path):
            target = [*name.split("."), ""][1] if is_of(name, "expertly_lab") else None
            is_below = target is None or (target in LOWEST.get(room, (target,)) and (target != "cli" or room == "cli"))
            if not is_below or (room in PURE and any(is_of(name, package) for package in OF_ENGINE)):
                wrong.append(f"{path.name}:{line} imports {name}")
    assert wrong == []


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in [*modules(), *of_product.modules()]:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_pure_rooms_import_without_torch() -> None:
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in modules() if room_of(path) in PURE]
    names = [".".join(("expertly_lab", *path.parts)).removesuffix(".__init__") for path in paths]
    assert len(names) > 10
    run_without_torch("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names))


@pytest.mark.parametrize("words", [["lab", "--help"], ["lab", "simulate", "--help"], ["lab", "trace", "--help"]])
def test_the_command_line_answers_without_torch(words: list[str]) -> None:
    printed = run_without_torch(f"from expertly.cli.main import main\nassert main({words}) == 0")
    assert len(printed) > 300

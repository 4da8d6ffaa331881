"""Which room of the package may import which, read from the syntax trees; class names mean one thing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "expertly"

ROOMS = (
    *("core", "data", "formats", "native", "policies", "testing", "scheduler", "store", "model", "engine"),
    *("arguments", "options", "api", "bench", "hardware", "serve", "cli", "__main__"),
)
"""From the lowest to the highest: a room imports only rooms below it (docs/architecture.md)."""
APART = {"store": {"scheduler"}, "model": {"scheduler"}}
"""Rooms below that a room does without."""
PURE = ("core", "data", "policies", "testing", "scheduler")
"""Importable, and all of it usable, without torch."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_pure(path: Path) -> bool:
    return part_of(path) in PURE


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names imported anywhere in a file, those under TYPE_CHECKING and in functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    return list(imports(parsed(path)))


def violations(is_wrong) -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for path in modules()
        for name, line in imports_of(path)
        if is_wrong(path, name)
    ]


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_room_has_its_place():
    assert {part_of(path) for path in modules()} <= {*ROOMS, "__init__"}


def test_import_directions():
    def is_wrong(path: Path, name: str) -> bool:
        if not is_of(name, "expertly"):
            return False
        room, target = part_of(path), [*name.split("."), "__init__"][1]
        if room == target or room == "__init__":
            return False
        if target == "__init__" or not ((PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()):
            target = "api"  # import expertly, from expertly import load
        return ROOMS.index(target) >= ROOMS.index(room) or target in APART.get(room, ())

    assert violations(is_wrong) == []


def module_imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names imported by a module itself, those under TYPE_CHECKING included; functions import what is optional."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name for name, _ in imports(node))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from module_imports(ast.iter_child_nodes(node))


def test_no_files_import_each_other_in_a_circle():
    files = {".".join(("expertly", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in modules()}
    waiting: dict[str, set[str]] = {}
    for name, path in files.items():
        targets = {target for each in module_imports([parsed(path)]) for target in (each, each.rpartition(".")[0])}
        waiting[name] = targets & files.keys() - {name}
    while done := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in done:
            del waiting[name]
    assert not waiting


FORBIDDEN = {
    "the lab, or what plots": lambda path, name: (
        name.split(".")[0] in ("expertly_lab", "matplotlib", "pandas", "scipy")
    ),
    "transformers, but in model": lambda path, name: is_of(name, "transformers") and part_of(path) != "model",
    "torch in pure parts": lambda path, name: is_pure(path) and (is_of(name, "torch") or is_of(name, "transformers")),
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_nothing_imports(rule):
    assert violations(FORBIDDEN[rule]) == []


def test_no_test_of_the_product_needs_the_lab():
    for path in (REPOSITORY / "tests").rglob("*.py"):
        assert not {name.split(".")[0] for name, _ in imports_of(path)} & {"lab", "expertly_lab"}, path


def test_class_names_are_unique():
    places = defaultdict(list)
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_class_begins_with_more_than_fifteen_attributes():
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                stored = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
                names = {
                    each.attr
                    for each in stored
                    if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
                }
                assert len(names) <= 15, f"{path}:{node.lineno}: {sorted(names)}"


def test_only_the_cuda_device_and_its_measuring_use_torch_cuda():
    uses = set()
    for path in modules():
        tree = parsed(path)
        names = {name for name, _ in imports_of(path)}
        names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if any(is_of(name, "torch.cuda") for name in names):
            uses.add(path.relative_to(PACKAGE).as_posix())
    assert {name for name in uses if not name.startswith("hardware/")} <= {"engine/cuda.py"}


def test_every_package_says_what_lives_there():
    for folder in sorted({path.parent for path in modules()}):
        assert ast.get_docstring(parsed(folder / "__init__.py")), folder


WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocker())
import expertly
assert expertly.__version__ and "numpy" not in sys.modules, "importing it is light"
"""


def run_without_torch(code: str) -> str:
    """What it prints."""
    command = [sys.executable, "-c", WITHOUT_TORCH + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pure_rooms_import_and_the_command_line_answers_without_torch():
    paths = [path.relative_to(PACKAGE).with_suffix("").parts for path in modules() if is_pure(path)]
    names = [".".join(("expertly", *parts)).removesuffix(".__init__") for parts in paths]
    assert len(names) > 10
    commands = [["--help"], ["systems"], ["systems", "--json"], ["run", "--help"]]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)\nfrom expertly.cli.main import main\n"
    printed = run_without_torch(f"{code}for command in {commands}: assert main(command) == 0; print('answered')")
    assert printed.count("answered\n") == len(commands) and len(printed) > 3000


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_numpy_has_no_threads_of_its_own_in_the_command(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    code = "import os, expertly.cli.main, numpy; print(len(os.listdir('/proc/self/task')))"
    assert run_without_torch(code).strip() == "1"

"""The import directions and size limits of the code, read from its syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "expertly"
MAX_LINES = 400

# What each part of the package may import of the others.
CONTROL = {"core", "policies", "control"}
BELOW_SIM = {*CONTROL, "choices", "decisions", "parts", "plans", "systems", "trace"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "data": {"core"},
    "policies": {"core"},
    "control": {"core", "policies"},
    "parts": {"core", "policies", "control"},
    "systems": {"core", "policies", "control", "parts"},
    "decisions": {"core", "policies", "control", "parts", "systems"},
    "plans": {"core", "policies", "control", "parts"},
    "choices": {"core", "policies", "control", "parts", "systems"},
    "testing": {"core", "policies"},
    "trace": {"core"},
    "maps": {"core", "policies"},
    "learned": {"core", "policies", "maps", "sim", "trace"},
    "sim": BELOW_SIM,
    "store": {"core", "data"},
    "native": {"core"},
    "models": {"core", "data", "native", "store"},
    "engine": {*BELOW_SIM, "data", "learned", "maps", "models", "native", "store"},
    "serve": {*CONTROL, "data", "engine", "models", "parts", "store", "systems", "trace"},
    "compare": {*BELOW_SIM, "data", "engine", "learned", "models", "sim", "store", "__init__"},
    "reproduce": {*BELOW_SIM, "data", "learned", "maps", "sim"},
    "tuning": {*BELOW_SIM, "data", "engine", "learned", "maps", "models", "sim", "store"},
    "cli": {
        *BELOW_SIM,
        *(
            "compare",
            "data",
            "engine",
            "learned",
            "maps",
            "models",
            "reproduce",
            "serve",
            "sim",
            "store",
            "tuning",
            "__init__",
        ),
    },
    "__main__": {"cli"},
    "__init__": {"engine"},
}
PURE = {*BELOW_SIM, "data", "maps", "sim", "testing"}
"""Importable, and all of it usable, without torch."""
TRAINING = {"learned/train.py", "learned/study.py"}
"""What of `learned` needs torch: simulating with trained weights does not."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_pure(path: Path) -> bool:
    return part_of(path) in PURE | {"learned"} and path.relative_to(PACKAGE).as_posix() not in TRAINING


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


def test_every_part_has_its_rule():
    assert {part_of(path) for path in modules()} <= ALLOWED.keys()


def test_import_directions():
    def is_wrong(path: Path, name: str) -> bool:
        if not is_of(name, "expertly"):
            return False
        target = [*name.split("."), "__init__"][1]
        if not (PACKAGE / target).is_dir() and not (PACKAGE / f"{target}.py").is_file():
            target = "__init__"  # from expertly import load
        return target != part_of(path) and target not in ALLOWED[part_of(path)]

    assert violations(is_wrong) == []


def reached_from(part: str) -> set[str]:
    """Parts that importing all of `part` imports, through whatever files."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    files |= {name.removesuffix(".__init__"): path for name, path in files.items()}
    todo, seen = [path for path in files.values() if part_of(path) == part], set[Path]()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            for name, _ in imports_of(path):
                todo += [files[dotted] for dotted in (name, name.rpartition(".")[0]) if dotted in files]
    return {part_of(path) for path in seen}


def test_engine_and_simulator_do_not_reach_each_other():
    assert "control" in reached_from("engine") & reached_from("sim")
    assert "sim" not in reached_from("engine") and "engine" not in reached_from("sim")


def test_only_models_imports_transformers():
    assert violations(lambda path, name: is_of(name, "transformers") and part_of(path) != "models") == []


def test_pure_parts_never_import_torch():
    def is_wrong(path: Path, name: str) -> bool:
        return is_pure(path) and any(is_of(name, package) for package in ("torch", "transformers"))

    assert violations(is_wrong) == []


def test_only_backends_use_torch_cuda():
    found = []
    for path in modules():
        is_backend = part_of(path) == "engine" and (path.name.startswith("backend") or path.name == "measure_cuda.py")
        tree = parsed(path)
        uses = [line for name, line in imports(tree) if is_of(name, "torch.cuda")]
        uses += [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
        found += [f"{path.relative_to(REPOSITORY)}:{line}" for line in uses if not is_backend]
    assert found == []


def test_no_file_is_too_long():
    files = [path for folder in ("src", "tests", "tools", "bench") for path in (REPOSITORY / folder).rglob("*.py")]
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


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
"""


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )


def test_sim_and_below_import_without_torch():
    names = [
        ".".join(("expertly", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in modules() if is_pure(path)
    ]
    assert len(names) > 10
    code = "import importlib\n" + "\n".join(f"importlib.import_module({n.removesuffix('.__init__')!r})" for n in names)
    done = run_without_torch(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["systems"], ["systems", "--json"], ["generate", "--help"]])
def test_command_line_answers_without_torch(arguments: list[str]):
    done = run_without_torch(f"from expertly.cli.main import main\nsys.exit(main({arguments!r}))")
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_import_expertly_is_light():
    code = (
        "import sys, expertly; assert expertly.__version__; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = run_without_torch(code)
    assert done.stdout.strip() == "[]", done.stderr

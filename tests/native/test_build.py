"""The package builds with a C compiler and without one, and runs either way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ASK = "from expertly.native.kernels import choose_kernels as choose;k = choose(); print(k.name, '|', k.why)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a build needs, apart from this checkout's own library."""
    folder = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "data")
    shutil.copytree(REPOSITORY / "src", folder / "src", ignore=ignored)
    for name in ("README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, folder)
    settings = (REPOSITORY / "pyproject.toml").read_text()
    assert '"-O3"' in settings
    (folder / "pyproject.toml").write_text(settings.replace('"-O3"', '"-O0"'))
    products = folder / "src/expertly/native/products.c"  # for any processor alone: in seconds, not a minute
    products.write_text(products.read_text().replace("#if defined(__x86_64__)", "#if 0"))
    return folder


def build(source: Path, target: Path, compiler: str | None) -> subprocess.CompletedProcess[str]:
    """As pip does: `build_py` and `build_ext` of the project's own settings, into `target`."""
    environment = dict(os.environ) | ({} if compiler is None else {"CC": compiler})
    code = "from setuptools import setup; setup()"
    return subprocess.run(
        [sys.executable, "-c", code, "build", "--build-lib", str(target), "--build-temp", str(source / "temporary")],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def answer(target: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "EXPERTLY_KERNELS"}
    environment["PYTHONPATH"] = str(target)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_a_compiler_torch_multiplies(source: Path, tmp_path: Path) -> None:
    built = build(source, tmp_path / "built", "/nowhere/cc")
    assert built.returncode == 0, built.stderr
    assert not list((tmp_path / "built").rglob("*.so"))
    assert answer(tmp_path / "built") == "torch | not compiled: there was no C compiler when expertly was installed"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")
def test_with_one_the_compiled_products_do(source: Path, tmp_path: Path) -> None:
    built = build(source, tmp_path / "built", None)
    assert built.returncode == 0, built.stderr
    libraries = sorted(library.parent.name for library in (tmp_path / "built" / "expertly").rglob("*.so"))
    assert libraries == ["native", "store"]
    assert answer(tmp_path / "built").startswith("native ")

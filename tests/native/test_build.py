"""The package builds without a C compiler, and runs; `make test-dist` has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ASK = "from expertly.native.kernels import choose_kernels as choose;k = choose(); print(k.name, '|', k.reason)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a build needs, apart from this checkout's own library."""
    folder = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "data")
    shutil.copytree(REPOSITORY / "src", folder / "src", ignore=ignored)
    for name in ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def test_without_a_compiler_torch_multiplies(source: Path, tmp_path: Path) -> None:
    """Built as pip does: `build_py` and `build_ext` of the project's own settings."""
    target, environment = tmp_path / "built", {k: v for k, v in os.environ.items() if k != "EXPERTLY_KERNELS"}
    build = ("from setuptools import setup; setup()", "build", "--build-lib", target)
    for words in ((*build, "--build-temp", source / "temporary"), (ASK,)):
        done = subprocess.run(
            [sys.executable, "-c", *words],
            cwd=source if words[1:] else tmp_path,
            env=environment | ({"CC": "/nowhere/cc"} if words[1:] else {"PYTHONPATH": str(target)}),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))
    assert done.stdout.strip() == "torch | not compiled: there was no C compiler when expertly was installed"

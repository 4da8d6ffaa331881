"""The compiled code is required: what a build, and a run, say where it is not there; `make test-dist` has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertly.core import compiled as core_compiled
from expertly.core.compiled import PACKAGE, compiled
from expertly.core.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a build needs, apart from this checkout's own libraries."""
    folder = tmp_path / "source"
    shutil.copytree(REPOSITORY / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "*.safetensors"))
    for name in ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.py"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )


def test_without_a_compiler_nothing_is_installed_and_a_run_says_what_to_do(source: Path) -> None:
    built = run(source, "setup.py", "-q", "build", CC="/nowhere/cc")
    assert built.returncode != 0 and "Traceback" not in built.stderr
    assert "expertly needs a C compiler and the C library's headers: apt install gcc libc6-dev" in built.stderr
    ran = run(source, "-m", "expertly", "doctor", PYTHONPATH=str(source / "src"), EXPERTLY_KERNELS="")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert (
        "compiled code native/_products was not built: install expertly again (in a checkout: make setup" in ran.stderr
    )


def test_a_library_of_another_version_or_a_damaged_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = (PACKAGE / "native").glob("_readers*.so")
    monkeypatch.setattr(core_compiled, "PACKAGE", tmp_path)
    (tmp_path / "native").mkdir()
    cases = {
        "other": (built.read_bytes(), "is of version 2, needed is 9"),
        "damaged": (b"no library", "cannot be used"),
    }
    for name, (content, problem) in cases.items():
        path = tmp_path / "native" / f"_readers.{name}.so"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"compiled code native/_readers {problem}.*make setup, or pip install"):
            compiled("native/_readers", 9, {})
        path.unlink()
    with pytest.raises(ConfigError, match="native/_readers was not built"):
        compiled("native/_readers", 9, {})

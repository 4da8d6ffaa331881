"""What `pip install .` gives: a wheel whose control plane is compiled, and which decides as the sources do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PARTS = ("src", "setup.py", "mypyc.ini", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")

has_compiler = shutil.which("cc") is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package, as the wheel does."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in PARTS:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, sources / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, sources / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources]
    subprocess.run(build, check=True, capture_output=True, env=os.environ | {"EXPERTLY_OPT_LEVEL": "0"})
    (wheel,) = folder.glob("expertly-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.skipif(
    not has_compiler, reason="no C compiler, or no headers of Python: the wheel holds the sources alone"
)
@pytest.mark.timeout(900)
def test_it_is_compiled_and_counts_what_was_recorded(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    where = "import expertly.scheduler.slots as slots, expertly.sim.link as link; print(slots.__file__, link.__file__)"
    printed = subprocess.run(
        [sys.executable, "-c", where], env=environment, check=True, capture_output=True, text=True, cwd=installed
    )
    files = printed.stdout.split()
    assert [Path(file).suffix for file in files] == [".so", ".so"] and all(str(installed) in file for file in files)

    golden = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_golden.py",
        "-k",
        "demo and 4",
    ]
    done = subprocess.run(golden, env=environment, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]

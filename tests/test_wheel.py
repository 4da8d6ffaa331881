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
    project = sources / "pyproject.toml"
    project.write_text(project.read_text().replace('"-O3"', '"-O0"'))
    products = sources / "src/expertly/native/products.c"  # for any processor alone: in seconds, not a minute
    products.write_text(products.read_text().replace("#if defined(__x86_64__)", "#if 0"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources]
    subprocess.run(build, check=True, capture_output=True, env=os.environ | {"EXPERTLY_OPT_LEVEL": "0"})
    (wheel,) = folder.glob("expertly-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


COUNT = """
import sys
from pathlib import Path

import expertly.scheduler.slots as slots, expertly.sim.link as link
from tests.golden import simulator
from tests.test_golden import assert_unchanged

assert_unchanged(simulator.demo_replay(Path(sys.argv[1])), 4, ["25%"])
print(slots.__file__, link.__file__)
"""


@pytest.mark.skipif(
    not has_compiler, reason="no C compiler, or no headers of Python: the wheel holds the sources alone"
)
@pytest.mark.timeout(900)
def test_it_is_compiled_and_counts_what_was_recorded(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT, tmp_path],
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = done.stdout.split()
    assert [Path(file).suffix for file in files] == [".so", ".so"] and all(str(installed) in file for file in files)

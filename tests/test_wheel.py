"""What `pip install .` gives: a wheel whose control plane is compiled, and which decides as the sources do.

`make test-dist` runs this in the environment that it installs its wheel in; elsewhere the sources are what is imported.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

import expertly
from expertly.native.kernels import choose_kernels
from expertly.policies.eviction.reuse import compiled_reuse
from expertly.scheduler import slots
from expertly.sim import link
from tests.golden import simulator
from tests.test_golden import assert_unchanged

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = Path(expertly.__file__).resolve().parent

has_compiler = shutil.which("cc") is not None and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


@pytest.mark.skipif(PACKAGE.is_relative_to(REPOSITORY / "src"), reason="of an installed wheel: make test-dist")
@pytest.mark.skipif(
    not has_compiler, reason="no C compiler, or no headers of Python: the wheel holds the sources alone"
)
def test_it_is_compiled_and_counts_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTLY_KERNELS", "auto")
    assert choose_kernels().name.split()[0] == "native"
    assert {library.parent.name for library in PACKAGE.rglob("_*.so")} >= {"native", "store", "eviction"}
    assert compiled_reuse() is not None
    for module in (slots, link):
        assert module.__file__ is not None and Path(module.__file__).suffix == ".so"
    assert_unchanged(simulator.demo_replay(tmp_path), 4, ["25%"])
